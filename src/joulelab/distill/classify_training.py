"""One training stage of a classifier, whoever is trained: the loop, and its validation after every epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from joulelab.data.batches import BatchSource, BatchStream
from joulelab.distill.classify_bench import Bench
from joulelab.distill.classify_quality import EpochValidation
from joulelab.evaluate.classification import Predictions, predict
from joulelab.runs.context import RunContext
from joulelab.train.config import TrainingConfig
from joulelab.train.optim import autocast
from joulelab.train.training_session import TrainingJob, train_in_run
from joulelab.zoo.objective import Objective


@dataclass(frozen=True)
class Lesson:
    """Who learns what, from what, and how."""

    who: str
    what: str
    model: nn.Module
    """On its device."""
    objective: Objective[Any]
    config: TrainingConfig
    seed: int


@dataclass(frozen=True)
class Validation:
    """How the learner is looked at on the way; a body without a head has nothing to look at, and gets none."""

    predict: Callable[[], Predictions]
    every_epoch: bool
    tokens: int = 0
    """In one look."""
    teacher: Predictions | None = None
    """What the teacher says about the same samples, where the student is to be set beside it."""


def train(run: RunContext, lesson: Lesson, batches: BatchSource[Any], validation: Validation | None) -> None:
    config, stage = lesson.config, f"{lesson.who}.validate"
    steps_per_epoch = -(-batches.batches_per_epoch // config.accumulate)
    every = config.evaluate_every_steps or (steps_per_epoch if validation and validation.every_epoch else None)
    look = None
    if validation is not None and every is not None:
        config = config.model_copy(update={"evaluate_every_steps": every})
        look = EpochValidation(run, stage, validation.predict, validation.tokens, steps_per_epoch, validation.teacher)
    task = TrainingJob(
        stage=f"{lesson.who}.{lesson.what}",
        role=lesson.who,
        model=lesson.model,
        batches=batches,
        objective=lesson.objective,
        config=config,
        seed=lesson.seed,
        evaluate=look,
        evaluate_stage=stage,
        evaluate_activity="validate",
    )
    train_in_run(run, task)


def train_on_texts(bench: Bench, lesson: Lesson, looks: bool = True, teacher: Predictions | None = None) -> None:
    batches = BatchStream(bench.set("train"), lesson.config.batch_size, lesson.seed)
    held_out, size = bench.set("validation"), bench.spec.eval_batch_size

    def answers() -> Predictions:
        with autocast(lesson.config.precision, bench.device):
            # whoever asked to stop waits these few batches: the loop can then save
            return predict(lesson.model, held_out, size, bench.device, lambda samples, tokens: None)

    validation = Validation(answers, bench.spec.validate_every_epoch, held_out.tokens_total, teacher)
    train(bench.run, lesson, batches, validation if looks else None)
