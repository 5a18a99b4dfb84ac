"""A cached and a live teacher train the same student; a teacher at chance level is refused with its numbers."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_reviews import tiny_model

from joulelab.data import tokenized_text
from joulelab.data.batches import BatchStream
from joulelab.data.labeled_text import LabeledText
from joulelab.data.splits import text_id
from joulelab.distill.classify import recipe
from joulelab.distill.classify.config import ClassifySpec, DistillConfig
from joulelab.distill.classify.data import open_cache, write_cache
from joulelab.distill.classify.objective import (
    ClassifyObjective,
    LiveTeacher,
    TextForward,
    freeze_teacher,
    make_connector,
    truncated_body,
)
from joulelab.distill.classify.recipe import (
    _SIGNIFICANCE,
    TextRecipe,
    chance_problem,
    correct_needed,
    require_better_than_chance,
)
from joulelab.errors import ConfigError
from joulelab.evaluate.classification import Predictions
from joulelab.train.config import TrainingConfig
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.trainer import SimpleTrainer

CPU = torch.device("cpu")
DISTILL = DistillConfig(alpha=0.4, feat_beta=1.0, rel_distance=1.0, rel_angle=1.0)


@pytest.fixture
def dataset(tmp_path):
    words = tuple(f"text {number}" for number in range(24))
    data = LabeledText(tuple(map(text_id, words)), words, tuple(number % 2 for number in range(24)), ("0", "1"))
    random = np.random.default_rng(0)
    lengths = random.integers(3, 9, size=24)
    rows = {word: random.integers(5, 17, size=length).tolist() for word, length in zip(words, lengths, strict=True)}
    return tokenized_text.write(tmp_path / "set", data, lambda batch: [rows[word] for word in batch], 17, pad_id=0)


def trained(dataset, teacher):
    student = tiny_model(layers=1, width=8, seed=1)
    torch.manual_seed(2)
    objective = ClassifyObjective(DISTILL, TextForward(-1, "mean"), teacher, make_connector(8, 16))
    # SGD: a key's bias has no gradient but rounding, and Adam would make steps of full length from that
    config = TrainingConfig(epochs=2, batch_size=6, learning_rate=1e-2, prefetch=0, optimizer="sgd")
    trainer = SimpleTrainer(student, BatchStream(dataset, 6, seed=0), objective, config, NoOpStats())
    trainer.train()
    return student


def test_a_cached_and_a_live_teacher_make_the_same_student_to_rounding(tmp_path, dataset):
    """The cache's batches are padded otherwise than the step's: that is all the rounding there is."""
    teacher, forward = freeze_teacher(tiny_model(seed=5), CPU, "fp32"), TextForward(1, "mean")
    (tmp_path / "cache").mkdir()
    write_cache(
        tmp_path / "cache",
        teacher,
        dataset,
        forward=forward,
        batch_size=5,
        device=CPU,
        count=lambda samples, tokens: None,
    )
    cached, live = (
        trained(dataset, open_cache(tmp_path / "cache", dataset)),
        trained(dataset, LiveTeacher(teacher, forward)),
    )
    start = tiny_model(layers=1, width=8, seed=1).state_dict()
    for name, value in cached.state_dict().items():
        torch.testing.assert_close(value, live.state_dict()[name], rtol=1e-4, atol=1e-5)
    assert not torch.equal(cached.state_dict()["classifier.weight"], start["classifier.weight"])


def test_a_live_teacher_is_no_part_of_what_is_trained(dataset):
    teacher = freeze_teacher(tiny_model(seed=5), CPU, "fp32")
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    trained(dataset, LiveTeacher(teacher, TextForward(1, "mean")))
    assert not teacher.training
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_the_hint_stage_runs_and_trains_nothing_above_the_hint():
    model = tiny_model(layers=3)
    ids = torch.tensor([[5, 6, 7]])
    whole = model(input_ids=ids, output_hidden_states=True).hidden_states[2]
    with truncated_body(model, 2) as body:
        assert len(body.encoder.layer) == 2
        hint = body(input_ids=ids, output_hidden_states=True).hidden_states[2]
    assert len(model.base_model.encoder.layer) == 3
    torch.testing.assert_close(hint, whole)


def predictions(right, trials, ones=0.5):
    labels = (np.arange(trials) < ones * trials).astype(np.int64)
    predicted = labels.copy()
    predicted[right:] = 1 - predicted[right:]
    return Predictions(np.arange(trials).astype(str), labels, predicted)


def test_what_luck_reaches_is_binomial():
    def tail(trials, right):
        from math import comb

        return sum(comb(trials, k) for k in range(right, trials + 1)) / 2**trials

    for trials in (20, 300):
        needed = correct_needed(trials, 0.5)
        assert tail(trials, needed) <= _SIGNIFICANCE < tail(trials, needed - 1)
    assert correct_needed(5, 0.5) == 6  # five texts can tell nothing


def test_a_teacher_that_guesses_is_refused_with_its_numbers():
    with pytest.raises(ConfigError, match=r"guesser is correct on 160 of 300 validation texts \(53.3 %\).*not trained"):
        require_better_than_chance(predictions(160, 300), "guesser")
    with pytest.raises(ConfigError, match="the label order does not match"):
        require_better_than_chance(predictions(20, 300), "swapped")
    assert chance_problem(predictions(240, 300), "good", "test") == ""
    # always naming the commonest class is no skill, however high its accuracy
    assert "90.0 %" in chance_problem(predictions(270, 300, ones=0.9), "constant", "test")


@pytest.mark.parametrize("validates", [False, True])
def test_a_teacher_trained_to_chance_level_is_flagged_on_the_test_texts(monkeypatch, validates):
    warnings = []
    run = SimpleNamespace(warn=warnings.append)
    spec = ClassifySpec(pipeline="classify", validate_every_epoch=validates, distill=DistillConfig(teacher="live"))
    trained = SimpleNamespace(folder=Path("teacher"), bill=None, reused=False)
    runner = SimpleNamespace(
        run=run, spec=spec, train_model=lambda *given, **more: trained, input_bill=lambda *given, **more: None
    )
    predicted = {"test": predictions(31, 64), "validation": predictions(30, 64)}
    monkeypatch.setattr(TextRecipe, "_teacher_predictions", lambda self, data, split, *given: predicted[split])
    monkeypatch.setattr(recipe, "report_quality", lambda *given: None)
    TextRecipe(runner).teacher(SimpleNamespace(bills=[]))
    assert len(warnings) == 1
    assert "the teacher is at chance level: 31 of 64 test samples correct (48.4 %, 95 % interval" in warnings[0]
    assert "always predicting the most frequent class gives 50.0 %" in warnings[0]
