"""How good teacher and student are: on validation samples after every epoch, on test samples at the end.

Looking is no training: each look is billed to a stage of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from joulelab.distill.classify_bench import Bench
from joulelab.distill.ticking import ticks
from joulelab.evaluate.classification import Predictions, load_predictions, predict, quality
from joulelab.runs.artifacts import Bill
from joulelab.runs.context import RunContext
from joulelab.runs.record import Result
from joulelab.train.training_session import EvaluationPoint


@dataclass(frozen=True)
class EpochValidation:
    """Called by the loop between two steps, inside the stage it has opened; tells the held-out loss, which early
    stopping follows."""

    run: RunContext
    stage: str
    predict: Callable[[], Predictions]
    tokens_per_look: int
    steps_per_epoch: int
    teacher: Predictions | None = None

    def __call__(self, moment: EvaluationPoint) -> float:
        found = self.predict()
        figures = quality(found, self.teacher)
        epoch = moment.step / self.steps_per_epoch
        numbers = {name: figure.value for name, figure in figures.items()}
        self.run.log(moment.step, stage=self.stage, epoch=round(epoch, 3), loss=found.loss(), **numbers)
        self.run.result(f"{self.stage}.accuracy.epoch_{round(epoch, 2):g}", figures["accuracy"])
        moment.stage.count(samples=moment.looks * len(found.labels), tokens=moment.looks * self.tokens_per_look)
        return found.loss()


def evaluated(
    bench: Bench, who: str, split: str, load: Callable[[], nn.Module], parents: list[Bill], reuse: bool = False
) -> Predictions:
    """What the model says about every text of a split, kept beside it; `load` is called only where it must run."""

    def make(folder: Path) -> None:
        dataset = bench.set(split)
        opened = bench.run.stage(f"{who}.evaluate", len(dataset), again=True, role=who, activity="evaluate")
        with opened as stage:
            model = load()  # in the stage: whoever finds the predictions inherits what loading took
            predict(model, dataset, bench.spec.eval_batch_size, bench.device, ticks(bench.run, stage)).save(folder)

    made = bench.run.artifact(
        predictions_name(who, split),
        kind="predictions",
        inputs={"split": split},
        parents=[*parents, bench.data.bill],
        make=make,
        reuse=reuse,
    )
    return load_predictions(made.folder)


def predictions_name(who: str, split: str) -> str:
    """Test predictions are what comparisons pair item by item; those on validation texts must not pass for them."""
    return f"{who}-predictions" if split == "test" else f"{who}-{split}"


def tell(run: RunContext, who: str, found: Predictions, teacher: Predictions | None = None) -> None:
    figures: dict[str, Result] = quality(found, teacher)
    for name, figure in figures.items():
        run.result(f"{who}.{name}", figure)
    said = f"{who} accuracy {100 * figures['accuracy'].value:.1f} % on {len(found.labels)} held-out samples"
    if "agreement" in figures:
        said += f"; it answers as the teacher does for {100 * figures['agreement'].value:.1f} %"
    run.progress.say(said)
