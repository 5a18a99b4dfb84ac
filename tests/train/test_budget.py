"""Budgets: whichever is used up first ends the training, the schedule follows it, and the end can be replayed."""

import pytest
import torch
from pydantic import ValidationError
from ragged_language import language_trainer

from joulelab.errors import EndedBySignal
from joulelab.train.budget import Budget, EarlyStopping
from joulelab.train.checkpoint import CheckpointFolder
from joulelab.train.config import TrainingConfig
from joulelab.train.position import Position
from joulelab.train.schedule import rate_factor
from joulelab.train.surroundings import Surroundings


def budget(clock=None, energy=None, replayed=None, notes=None, **limits):
    config = TrainingConfig(**{"epochs": None, **limits})
    note = notes.append if notes is not None else lambda look: None
    return Budget(
        config, 10, 2, energy or (lambda: None), lambda step, seen: note((step, seen)), replayed, clock or (lambda: 0.0)
    )


def test_the_first_limit_that_is_reached_ends_it():
    assert budget(epochs=2.0).steps == 10
    assert budget(epochs=2.0, max_steps=3).steps == 3
    assert budget(max_tokens=100).steps is None
    assert budget(max_tokens=100).over(Position(step=2, tokens=100))
    assert not budget(max_tokens=100, max_steps=5).over(Position(step=2, tokens=99))


def test_training_without_an_end_is_refused():
    with pytest.raises(ValidationError, match="no end"):
        TrainingConfig(epochs=None)
    with pytest.raises(ValidationError, match="evaluate_every_steps"):
        TrainingConfig(early_stopping_patience=2)


def test_time_is_looked_at_and_counts_over_attempts():
    now = [0.0]
    timed = budget(clock=lambda: now[0], max_time_s=100.0)
    timed.start()
    now[0] = 60.0
    timed.see(Position(step=4), timed.look(Position(step=4)))
    assert timed.fraction(Position(step=5)) == pytest.approx(0.6)
    later = budget(clock=lambda: now[0], max_time_s=100.0)
    later.load_state(timed.state())
    later.start()
    now[0] += 40.0
    later.see(Position(step=9), later.look(Position(step=9)))
    assert later.over(Position(step=10))


def test_a_joule_budget_ends_training_and_its_run_can_be_replayed():
    """The meter of this test gives 7 J a look; the replay has no meter at all and ends at the same step and weights."""
    spent, notes = [0.0], []

    def meter():
        spent[0] += 7.0
        return spent[0]

    around = Surroundings(energy_j=meter, budget_look=lambda step, seen: notes.append((step, seen)))
    first = language_trainer(8, around, max_steps=None, max_energy_j=100.0, max_time_s=1e-3 * 1e6, warmup_share=0.3)
    first.budget.clock_s = Ticking()
    first.train()
    assert first.position.step > 3
    assert notes[-1][1] >= 1

    replay = language_trainer(
        8, Surroundings(replayed_looks=notes), max_steps=None, max_energy_j=100.0, warmup_share=0.3
    )
    replay.train()
    assert replay.position == first.position
    for a, b in zip(first.model.parameters(), replay.model.parameters(), strict=True):
        assert torch.equal(a, b)


class Ticking:
    """Two seconds pass between any two questions."""

    now_s = 0.0

    def __call__(self):
        self.now_s += 2.0
        return self.now_s


def test_the_schedule_is_a_function_of_the_budgets_fraction():
    assert rate_factor("cosine", 0.55, 0.1) == pytest.approx(0.5)
    assert rate_factor("cosine", 1.0, 0.1) == pytest.approx(0.0)
    assert rate_factor("constant", 0.9, 0.1) == 1.0
    assert rate_factor("constant", 0.05, 0.1) == pytest.approx(0.5)


def test_a_token_budget_lets_the_rate_fall_to_zero():
    rates = []
    around = Surroundings(report=lambda report: rates.append(report.learning_rate))
    trainer = language_trainer(8, around, max_steps=None, max_tokens=1500, learning_rate=1.0, warmup_share=0.2)
    trainer.train()
    assert trainer.position.tokens >= 1500
    assert rates[-1] < 0.1 < max(rates)


def test_early_stopping_waits_for_its_patience_and_survives_a_resume():
    stopping = EarlyStopping(2)
    for loss in (3.0, 2.0, 2.5):
        stopping.take(loss)
    later = EarlyStopping(2)
    later.load_state(stopping.state())
    assert not later.over
    later.take(2.1)
    assert later.over
    assert later.best == 2.0


def test_held_out_loss_that_does_not_improve_ends_training_and_leaves_the_model_in_training_mode():
    modes = []
    trainer = None

    def evaluate():
        modes.append(trainer.model.training)
        return 1.0

    around = Surroundings(evaluate=evaluate)
    trainer = language_trainer(8, around, max_steps=100, evaluate_every_steps=5, early_stopping_patience=3)
    trainer.train()
    assert trainer.position.step == 20  # the first look is the best one, three more are not better
    assert modes == [False] * 4
    assert trainer.model.training


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_prefetching_changes_nothing_and_resumes_at_the_exact_batch(tmp_path, prefetch):
    plain = language_trainer(4, max_steps=12, prefetch=0)
    plain.train()
    folder = CheckpointFolder(tmp_path)
    calls = []

    def stop_once():
        calls.append(1)
        if len(calls) == 5:
            raise EndedBySignal(15)

    cut = language_trainer(4, Surroundings(checkpoints=folder, check_stop=stop_once), max_steps=12, prefetch=prefetch)
    with pytest.raises(EndedBySignal):
        cut.train()
    rest = language_trainer(4, Surroundings(checkpoints=folder), max_steps=12, prefetch=prefetch)
    rest.train()
    assert rest.position == plain.position
    for a, b in zip(plain.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_error_in_the_input_thread_reaches_the_loop():
    trainer = language_trainer(8, prefetch=2)
    trainer._input._source.at = lambda epoch, index: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.step()
