"""Budgets: whichever is used up first ends the training, the schedule follows it, and the end can be replayed."""

import json
import time
from contextlib import nullcontext
from dataclasses import asdict
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from ragged_language import language_trainer

from joulelab.errors import ConfigError, EndedBySignal, NotFoundError
from joulelab.meter.monitor.tally import LiveEnergy
from joulelab.meter.sensors import Device
from joulelab.meter.trace import LineFile, header
from joulelab.runs.spec import check
from joulelab.train.budget import (
    MIN_FRACTION,
    READ_EVERY_S,
    READ_FRACTION_OF_REST,
    Budget,
    EarlyStopping,
    Position,
    require_energy_reading,
    wait_for_energy_reading,
)
from joulelab.train.checkpoint import CheckpointFolder
from joulelab.train.config import TrainingConfig
from joulelab.train.trainer import TrainerCallbacks, learning_rate_factor
from joulelab.train.training_session import _Session, require_replayed


def budget(clock=None, energy=None, replayed=None, notes=None, **limits):
    config = TrainingConfig(**{"epochs": None, **limits})
    note = notes.append if notes is not None else lambda look: None
    return Budget(
        config, 10, 2, energy or (lambda: None), lambda step, seen: note((step, seen)), replayed, clock or (lambda: 0.0)
    )


def test_the_first_limit_that_is_reached_ends_it():
    assert budget(epochs=2.0).total_steps(Position()) == 10
    assert budget(epochs=2.0, max_steps=3).total_steps(Position()) == 3
    assert budget(max_tokens=100).total_steps(Position()) is None
    assert budget(max_tokens=100).exhausted(Position(step=2, tokens=100))
    assert not budget(max_tokens=100, max_steps=5).exhausted(Position(step=2, tokens=99))


def test_the_expected_time_is_that_of_the_closest_limit():
    at = Position(drawn=20, step=10, tokens=50)
    assert budget(epochs=2.0, max_tokens=1000).expected_s(at, 3.0) == 30.0
    assert budget(max_tokens=100, max_time_s=100.0).expected_s(at, 3.0) == 60.0
    assert budget(max_time_s=20.0, max_steps=100).expected_s(at, 3.0) == 20.0
    assert budget(max_time_s=20.0, replayed=[(7, 0.2), (39, 1.0)]).expected_s(at, 3.0) == 120.0
    now, used = [0.0], [7.0]
    joules = budget(clock=lambda: now[0], energy=lambda: used[0], max_energy_j=1000.0)
    joules.start()
    now[0], used[0] = 1.0, 57.0
    assert joules.expected_s(at, 3.0) is None, "the counter may be a refresh behind the clock"
    now[0], used[0] = 10.0, 507.0
    assert joules.expected_s(at, 3.0) == 20.0


def test_a_run_to_replay_that_does_not_exist_is_found_before_the_work(tmp_path):
    run = SimpleNamespace(store=tmp_path)
    require_replayed(run, TrainingConfig())
    with pytest.raises(NotFoundError, match="no runs under"):
        require_replayed(run, TrainingConfig(), TrainingConfig(replay_budget_of="gone"))


def test_a_run_can_be_replayed_without_another_limit_if_its_readings_reach_the_end(tmp_path):
    folder, own = (write_run(tmp_path, name) for name in ("earlier", "own"))
    run = SimpleNamespace(store=tmp_path, paths=SimpleNamespace(folder=own))
    config = TrainingConfig(epochs=None, replay_budget_of=str(folder))
    session = SimpleNamespace(run=run, job=SimpleNamespace(config=config, stage="model.train"))
    with pytest.raises(ConfigError, match="no time or energy budget readings"):
        _Session._readings_to_replay(session)
    line = {"stage": "model.train", "step": 4, "budget_fraction": 0.5}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match="had spent 50 % of its budget when it ended"):
        _Session._readings_to_replay(session)
    session.job.config = TrainingConfig(epochs=1.0, replay_budget_of=str(folder))
    assert _Session._readings_to_replay(session) == [(4, 0.5)]
    session.job.config = config
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**line, "step": 9, "budget_fraction": 1.1}) + "\n")
    assert _Session._readings_to_replay(session) == [(4, 0.5), (9, 1.1)]
    with pytest.raises(ConfigError, match="is this run itself"):
        require_replayed(run, TrainingConfig(replay_budget_of=str(own)))


def write_run(store, name):
    folder = store / f"{name}-20260101T000000Z-ab12"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    return folder


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
    timed.update(Position(step=4), timed.read(Position(step=4)))
    assert timed.fraction(Position(step=5)) == pytest.approx(0.6)
    later = budget(clock=lambda: now[0], max_time_s=100.0)
    later.load_state(timed.state())
    later.start()
    now[0] += 40.0
    later.update(Position(step=9), later.read(Position(step=9)))
    assert later.exhausted(Position(step=10))


def test_a_joule_budget_ends_training_and_its_run_can_be_replayed():
    """The meter of this test gives 7 J a look; the replay has no meter at all and ends at the same step and weights."""
    spent, notes = [0.0], []

    def meter():
        spent[0] += 7.0
        return spent[0]

    around = TrainerCallbacks(energy_j=meter, on_budget_reading=lambda step, seen: notes.append((step, seen)))
    first = language_trainer(8, around, max_steps=None, max_energy_j=100.0, max_time_s=1e-3 * 1e6, warmup_share=0.3)
    first.budget.clock_s = Ticking()
    first.train()
    assert first.position.step > 3
    assert notes[-1][1] >= 1

    replay = language_trainer(
        8, TrainerCallbacks(replayed_readings=notes), max_steps=None, max_energy_j=100.0, warmup_share=0.3
    )
    replay.train()
    assert replay.position == first.position
    for a, b in zip(first.model.parameters(), replay.model.parameters(), strict=True):
        assert torch.equal(a, b)


class Machine:
    """A GPU of given power, a recorder that reads power every 0.5 s and the counter every second, and a clock."""

    def __init__(self, trace, power_w):
        self.power_w, self.now_s, self.used_j, self._written_s = power_w, 1000.0, 0.0, 999.5
        self._trace = LineFile(trace)
        device = asdict(Device(device="gpu:0", component="gpu", name="simulated", refresh_s=0.1, gain_error_rel=0.05))
        self._trace.append(header(devices=[device], missing=[]))
        self.monotonic_ns = lambda: round(self.now_s * 1e9)
        self.work(2.0)

    def work(self, duration_s):
        while duration_s > 1e-9:
            span_s = min(duration_s, self._written_s + 0.5 - self.now_s)
            self.used_j += span_s * self.power_w(self.now_s)
            self.now_s, duration_s = self.now_s + span_s, duration_s - span_s
            if self.now_s >= self._written_s + 0.5 - 1e-9:
                self._written_s += 0.5
                line = {"kind": "gpu", "device": "gpu:0", "mono_ns": self.monotonic_ns()}
                counter = {"energy_counter_j": self.used_j} if self._written_s % 1 == 0 else {}
                self._trace.append({**line, "power_watts": self.power_w(self.now_s), **counter})


@pytest.mark.parametrize("budget_j", [100.0, 300.0, 1000.0])
@pytest.mark.parametrize("step_s", [0.02, 0.11, 0.4])
@pytest.mark.parametrize("wave", ["steady", "square"])
def test_a_joule_budget_is_passed_by_one_step_and_the_sensor_delay_at_most(
    tmp_path, monkeypatch, budget_j, step_s, wave
):
    """It was passed by up to 16 % and more, the first steps were made at rate 0, and the warm-up was one jump."""
    power_w = (lambda at_s: 250.0) if wave == "steady" else (lambda at_s: 400.0 if at_s % 3 < 1.5 else 100.0)
    machine = Machine(tmp_path / "trace.jsonl", power_w)
    monkeypatch.setattr("joulelab.meter.monitor.tally.time", machine)
    live = LiveEnergy(tmp_path / "trace.jsonl")
    rates, spent = [], []
    around = TrainerCallbacks(
        energy_j=live.read_now,
        on_log=lambda report: (rates.append(report.learning_rate), spent.append(machine.used_j)),
    )
    trainer = language_trainer(
        8, around, max_steps=None, max_energy_j=budget_j, warmup_share=0.3, learning_rate=1.0, log_every_steps=1
    )
    trainer.budget.clock_s = lambda: machine.now_s
    forward = trainer.forward
    trainer.forward = lambda batch: (machine.work(step_s), forward(batch))[1]
    trainer.train()
    before_j = spent[0]  # the first step is setup
    sensor_delay_s, most_w = 0.5, 250.0 if wave == "steady" else 400.0
    allowed_j = most_w * step_s + (0.0 if wave == "steady" else most_w * sensor_delay_s)
    overshoot_j = machine.used_j - before_j - budget_j
    assert -allowed_j <= overshoot_j <= allowed_j + 1e-6
    assert all(rate > 0 for rate in rates)
    if wave == "steady":
        middles = [max(0.0, after_j - before_j - most_w * step_s / 2) / budget_j for after_j in spent]
        share = most_w * step_s / budget_j
        assert rates == pytest.approx([learning_rate_factor("linear", at, 0.3) for at in middles], abs=0.02 + share)
        assert max((abs(b - a) for a, b in pairwise(rates)), default=0.0) <= 1.5 * share / 0.3 + 0.02


@pytest.mark.parametrize("limit", [{"max_time_s": 10.0}, {"max_energy_j": 2500.0}], ids=["time", "joules"])
def test_setup_spends_no_time_and_no_joules_of_a_budget(limit):
    """100 s of compilation in the first step and 50 s in a later one used up the budget before training began."""
    now_s = [0.0]
    trainer = language_trainer(8, TrainerCallbacks(energy_j=lambda: 250.0 * now_s[0]), max_steps=None, **limit)
    trainer.budget.clock_s = lambda: now_s[0]
    forward = trainer.forward

    def slow(batch):
        compile_s = {0: 100.0, 5: 50.0}.get(trainer.position.step, 0.0)
        with trainer.budget.paused() if compile_s else nullcontext():
            now_s[0] += compile_s
        now_s[0] += 0.5
        return forward(batch)

    trainer.forward = slow
    trainer.train()
    assert trainer.position.step == pytest.approx(1 + 20, abs=1)


def test_a_pause_within_a_pause_is_counted_once_and_a_failed_one_ends():
    now_s = [0.0]
    timed = budget(clock=lambda: now_s[0], max_time_s=100.0)
    timed.start()
    with timed.paused():
        now_s[0] += 3.0
        with timed.paused():
            now_s[0] += 4.0
        assert timed.state()["time_s"] == 0.0
    with pytest.raises(KeyError), timed.paused():
        now_s[0] += 2.0
        raise KeyError
    now_s[0] += 1.0
    assert timed.state()["time_s"] == pytest.approx(1.0)


@pytest.mark.parametrize(("max_tokens", "batch_size"), [(1500, 8), (20_000, 4), (100, 8)])
def test_no_step_of_a_token_budget_has_rate_0(max_tokens, batch_size):
    """The first step was made at rate 0, and so was a last step whose middle lay beyond the budget."""
    rates = []
    around = TrainerCallbacks(on_log=lambda report: rates.append(report.learning_rate))
    trainer = language_trainer(
        batch_size, around, max_steps=None, max_tokens=max_tokens, warmup_share=0.2, log_every_steps=1
    )
    trainer.train()
    assert len(rates) == trainer.position.step
    assert min(rates) > 0


def test_the_rates_of_a_step_budget_are_those_of_before():
    """Middle of the step over all steps, to the bit."""
    rates = []
    around = TrainerCallbacks(on_log=lambda report: rates.append(report.learning_rate))
    trainer = language_trainer(8, around, max_steps=7, warmup_share=0.2, learning_rate=0.3, log_every_steps=1)
    trainer.train()
    schedule = trainer.config.schedule
    assert rates == [0.3 * learning_rate_factor(schedule, min(1.0, (step + 0.5) / 7), 0.2) for step in range(7)]


class Ticking:
    """Two seconds pass between any two questions."""

    now_s = 0.0

    def __call__(self):
        self.now_s += 2.0
        return self.now_s


@pytest.mark.parametrize("budget", [{"max_steps": 7}, {"max_steps": None, "max_tokens": 7 * 200}])
def test_a_warm_up_in_steps_multiplies_the_schedule(budget):
    """Whatever the budget is counted in; `warmup_share` is then not used."""
    rates, positions = [], []
    around = TrainerCallbacks(
        on_log=lambda report: (rates.append(report.learning_rate), positions.append(report.position.step))
    )
    trainer = language_trainer(
        8, around, **budget, warmup_steps=4, warmup_share=0.9, learning_rate=0.3, schedule="constant", log_every_steps=1
    )
    trainer.train()
    assert len(rates) > 4
    assert rates == pytest.approx([0.3 * min(1.0, step / 4) for step in positions])


def test_a_warm_up_in_steps_and_a_decay():
    rates = []
    around = TrainerCallbacks(on_log=lambda report: rates.append(report.learning_rate))
    language_trainer(8, around, max_steps=7, warmup_steps=4, learning_rate=0.3, log_every_steps=1).train()
    linear = [1 - (step + 0.5) / 7 for step in range(7)]
    assert rates == pytest.approx([0.3 * min(1.0, (step + 1) / 4) * linear[step] for step in range(7)])


def test_the_schedule_is_a_function_of_the_budgets_fraction():
    assert learning_rate_factor("cosine", 0.55, 0.1) == pytest.approx(0.5)
    assert learning_rate_factor("cosine", 1.0, 0.1) == pytest.approx(0.0)
    assert learning_rate_factor("constant", 0.9, 0.1) == 1.0
    assert learning_rate_factor("constant", 0.05, 0.1) == pytest.approx(0.5)


def test_a_token_budget_lets_the_rate_fall_to_zero():
    rates = []
    around = TrainerCallbacks(on_log=lambda report: rates.append(report.learning_rate))
    trainer = language_trainer(8, around, max_steps=None, max_tokens=1500, learning_rate=1.0, warmup_share=0.2)
    trainer.train()
    assert trainer.position.tokens >= 1500
    assert rates[-1] < 0.1 < max(rates)


def test_early_stopping_waits_for_its_patience_and_survives_a_resume():
    stopping = EarlyStopping(2)
    for loss in (3.0, 2.0, 2.5):
        stopping.update(loss)
    later = EarlyStopping(2)
    later.load_state(stopping.state())
    assert not later.triggered
    later.update(2.1)
    assert later.triggered
    assert later.best == 2.0


def test_held_out_loss_that_does_not_improve_ends_training_and_leaves_the_model_in_training_mode():
    modes = []
    trainer = None

    def evaluate():
        modes.append(trainer.model.training)
        return 1.0

    around = TrainerCallbacks(evaluate=evaluate)
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

    cut = language_trainer(
        4, TrainerCallbacks(checkpoints=folder, check_stop=stop_once), max_steps=12, prefetch=prefetch
    )
    with pytest.raises(EndedBySignal):
        cut.train()
    rest = language_trainer(4, TrainerCallbacks(checkpoints=folder), max_steps=12, prefetch=prefetch)
    rest.train()
    assert rest.position == plain.position
    for a, b in zip(plain.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_error_in_the_input_thread_reaches_the_loop():
    trainer = language_trainer(8, prefetch=2)
    trainer._input._source.at = lambda epoch, index: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.step()


def test_early_stopping_reads_checkpoints_of_earlier_versions():
    stopping = EarlyStopping(2)
    stopping.load_state({"best": 1.5, "looks_since_best": 2})
    assert (stopping.best, stopping.triggered) == (1.5, True)


def test_the_middle_of_a_step_is_between_its_begin_and_its_end():
    assert budget(max_steps=10).fraction_amid(Position(step=3), 0) == pytest.approx(0.35)
    assert budget(max_tokens=100).fraction_amid(Position(step=0, tokens=40), 20) == pytest.approx(0.5)
    assert budget(max_tokens=100).fraction_amid(Position(step=0, tokens=90), 30) == pytest.approx(0.95)
    both = budget(max_steps=10, max_tokens=100)
    assert both.fraction_amid(Position(step=3, tokens=80), 10) == pytest.approx(0.85)
    assert both.fraction(Position(step=3, tokens=20)) == pytest.approx(0.3)
    assert budget(max_steps=10).fraction_amid(Position(step=12), 0) == 1.0


def test_between_two_readings_the_fraction_goes_on_at_their_rate():
    """0.2 after step 4 (the 5th), 0.3 after step 9: 0.02 per step; half of the rest, 0.65, is the most."""
    timed = budget(max_time_s=100.0)
    assert timed.fraction_amid(Position(step=0), 0) == MIN_FRACTION
    timed.update(Position(step=4), 0.2)
    assert timed.fraction_amid(Position(step=5), 0) == pytest.approx(0.2 + 0.5 * 0.2 / 4)
    timed.update(Position(step=9), 0.3)
    assert timed.fraction_amid(Position(step=12), 0) == pytest.approx(0.3 + 2.5 * 0.02)
    assert timed.fraction_amid(Position(step=99), 0) == pytest.approx(0.65)
    state = timed.state()
    assert (state["seen"], state["seen_at"], state["per_step"]) == (0.3, 10, pytest.approx(0.02))
    timed.update(Position(step=14), 1.0)
    assert timed.fraction_amid(Position(step=99), 0) == pytest.approx(0.65)
    resumed = budget(max_time_s=100.0)
    resumed.load_state({"time_s": 30.0, "energy_j": 0.0, "seen": 0.3})
    assert resumed.fraction_amid(Position(step=20), 0) == pytest.approx(0.3)


def test_a_reading_is_due_after_a_tenth_of_the_rest():
    """20 of 100 s are spent: 80 s are left, so the next reading is due after 8 s, or earlier if that is the limit."""
    now = [1000.0]
    timed = budget(clock=lambda: now[0], max_time_s=100.0)
    timed.start()
    now[0] += 20.0
    assert timed.read(Position(step=3)) == pytest.approx(0.2)
    timed.update(Position(step=3), 0.2)
    due_s = min(READ_EVERY_S, READ_FRACTION_OF_REST * 80.0)
    now[0] += 0.99 * due_s
    assert timed.read(Position(step=4)) == 0.2
    now[0] += 0.02 * due_s
    assert timed.read(Position(step=5)) == pytest.approx((20 + 1.01 * due_s) / 100)


def test_spent_energy_never_goes_back_and_what_a_pause_spends_is_left_out():
    now, joules = [0.0], [500.0]
    metered = budget(clock=lambda: now[0], energy=lambda: joules[0], max_energy_j=100.0)
    metered.start()
    joules[0] += 40.0
    now[0] += 1.0
    assert metered.read(Position(step=1)) == pytest.approx(0.4)
    metered.update(Position(step=1), 0.4)
    with metered.paused():
        joules[0] += 1000.0
        now[0] += 50.0
        with metered.paused():
            joules[0] += 1.0
        assert metered.state()["energy_j"] == pytest.approx(40.0)
    assert (metered.state()["energy_j"], metered.state()["time_s"]) == pytest.approx((40.0, 1.0))
    joules[0] -= 10.0
    now[0] += 100.0
    assert metered.read(Position(step=2)) == 0.4
    joules[0] += 85.0
    metered.stop()
    assert metered.overshoot_j == pytest.approx(15.0)
    silent = budget(energy=lambda: None, max_energy_j=100.0)
    silent.start()
    assert silent.state()["energy_j"] == 0.0
    timed = budget(energy=lambda: 7.0, max_time_s=10.0)
    timed.start()
    assert timed.state()["energy_j"] == 0.0


def test_a_replay_uses_the_latest_reading_up_to_its_step():
    replay = budget(replayed=[(2, 0.25), (5, 0.5)], energy=lambda: 1e9, max_energy_j=10.0)
    replay.start()
    assert [replay.read(Position(step=step)) for step in (1, 2, 4, 5, 9)] == [0.0, 0.25, 0.25, 0.5, 0.5]
    replay.stop()
    assert replay.overshoot_j == 0.0 and budget(max_steps=3).read(Position(step=2)) == 0.0


def test_a_reading_is_noted_once():
    notes = []
    timed = budget(notes=notes, max_time_s=10.0)
    for step, fraction in ((1, 0.0), (2, 0.5), (3, 0.5)):
        timed.update(Position(step=step), fraction)
    assert notes == [(2, 0.5)]


def test_patience_is_counted_since_the_best():
    stopping = EarlyStopping(2)
    for loss, since in ((3.0, 0), (2.0, 0), (2.0, 1), (1.0, 0), (1.5, 1)):
        stopping.update(loss)
        assert (stopping.evaluations_since_best, stopping.triggered) == (since, False)
    stopping.update(1.2)
    assert stopping.triggered and stopping.best == 1.0 and not EarlyStopping(None).triggered
    old = EarlyStopping(2)
    old.load_state({"best": 1.0, "looks_since_best": 1.0})
    assert old.evaluations_since_best == 1
    old.load_state({"best": 1.0})
    assert old.evaluations_since_best == 0


def test_a_training_with_an_energy_budget_waits_for_a_reading_and_names_the_fix_without_one(monkeypatch):
    readings, waited = [None, None, 7.5], []
    run = SimpleNamespace(
        spec=SimpleNamespace(energy=SimpleNamespace(sample_interval_s=5.0)), stop=SimpleNamespace(check=list)
    )
    live = SimpleNamespace(read_now=lambda estimates: readings.pop(0) if readings else None)
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: waited.append(seconds) or now.__setitem__(0, now[0] + 1.0))
    config = TrainingConfig(epochs=None, max_energy_j=5.0)
    assert wait_for_energy_reading(run, live, config) == 7.5 and len(waited) == 2
    waited.clear()
    with pytest.raises(ConfigError, match="no energy sensor works"):
        wait_for_energy_reading(run, live, config)
    assert waited == [0.1] * 11  # twice the interval of 5 s
    assert (Position().step, Position().tokens) == (0, 0)


def test_a_reading_is_required_only_for_an_energy_budget(monkeypatch):
    asked = []
    monkeypatch.setattr("joulelab.train.budget.wait_for_energy_reading", lambda run, live, config: asked.append(config))
    run = SimpleNamespace(meter=SimpleNamespace(live=lambda: None))
    metered, plain = TrainingConfig(epochs=None, max_energy_j=5.0), TrainingConfig(epochs=1.0)
    require_energy_reading(run, metered, None, plain)
    assert asked == [metered]
    require_energy_reading(run, plain, energy_j=3.0)
    assert asked == [metered, plain] and EarlyStopping(1).state()["evaluations_since_best"] == 0


def test_a_step_adds_its_samples_and_tokens():
    assert Position(drawn=9).after_step(3, 40).after_step(2, 10) == Position(drawn=9, step=2, samples=5, tokens=50)


def test_the_meter_is_read_for_an_energy_budget_that_is_not_replayed():
    def unread():
        raise AssertionError("the meter was read")

    for unmetered in (
        budget(energy=unread, max_time_s=10.0),
        budget(energy=unread, replayed=[(2, 0.25)], max_energy_j=10.0),
    ):
        unmetered.start()
        unmetered.stop()
        assert (unmetered.state()["energy_j"], unmetered.overshoot_j) == (0.0, 0.0)


def test_a_meter_that_answers_late_counts_from_0():
    joules = [None, 5.0]
    metered = budget(energy=lambda: joules.pop(0), max_energy_j=100.0)
    metered.start()
    assert metered.state()["energy_j"] == 5.0


def test_time_counts_from_the_start_of_a_budget_that_was_only_made():
    now = [50.0]
    timed = budget(clock=lambda: now[0], max_time_s=10.0)
    now[0] += 2.0
    assert timed.state() == {"time_s": 2.0, "energy_j": 0.0, "seen": 0.0, "seen_at": 1.0, "per_step": 0.0}
    assert timed.read(Position()) == pytest.approx(0.2)


def test_an_epoch_that_does_not_fill_the_last_step_is_rounded_up():
    assert budget(epochs=0.5).total_steps(Position()) == 3 and budget(epochs=0.4).total_steps(Position()) == 2
    two = budget(epochs=2.0)
    assert two.fraction(Position(drawn=10, step=5)) == 0.5 and two.exhausted(Position(drawn=20, step=10))
    assert two.fraction_amid(Position(drawn=2, step=0), 0) == 0.05 == 0.5 / 10
    assert two.fraction_amid(Position(drawn=20, step=9), 0) == 0.95


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_rest_of_an_epoch_is_trained_on_any_number_of_ranks(ranks):
    """Half of 1,000 micro-batches were drawn in 250 steps of two ranks."""
    resumed = Budget(TrainingConfig(epochs=1.0), 1000, ranks)
    half = Position(drawn=500, step=250)
    assert resumed.fraction(half) == 0.5 and resumed.total_steps(half) == 250 + 500 // ranks
    assert resumed.exhausted(Position(drawn=1000, step=250 + 500 // ranks))


def test_a_reading_at_the_same_step_changes_no_rate():
    timed = budget(max_time_s=100.0)
    timed.update(Position(step=4), 0.2)
    timed.update(Position(step=4), 0.3)
    assert timed.state()["per_step"] == pytest.approx(0.2 / 4)


def test_a_reading_is_due_when_its_time_has_come():
    now = [0.0]
    timed = budget(clock=lambda: now[0], max_time_s=100.0)
    now[0] = 20.0
    timed.update(Position(step=3), timed.read(Position(step=3)))
    now[0] += READ_EVERY_S
    assert timed.read(Position(step=4)) == pytest.approx(0.21)


@pytest.mark.parametrize(
    ("measured", "estimate", "counts", "refused"),
    [((), "cpu", False, True), ((), "cpu", True, False), ((), None, True, True), (("gpu",), None, False, False)],
)
def test_a_joule_budget_without_a_sensor_is_refused_before_the_run(monkeypatch, measured, estimate, counts, refused):
    found = SimpleNamespace(measured=measured, estimate=estimate)
    monkeypatch.setattr("joulelab.runs.environment.discover_sensors", lambda config: found)
    limit = {"epochs": None, "max_energy_j": 5.0, "budget_counts_estimates": counts}
    spec = check({"pipeline": "train", "name": "x", "model": "gpt2", "size": "tiny", "training": limit})
    with pytest.raises(ConfigError, match="no energy sensor works") if refused else nullcontext():
        spec.require_energy_reading()
