"""How a language student's held-out loss fell while it took its joules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from joulelab.meter.trace import read_lines
from joulelab.report.comparison import ComparedRun
from joulelab.report.joules import Part
from joulelab.runs.paths import RunPaths

TRAIN = "student.train"
# The looks at the SFT student too: where another run paid for it, they stand on its bill under one figure.
_BEFORE = ("student.sft", "student.sft-validate", "student.reference")


@dataclass(frozen=True)
class Course:
    """One student's way: looks at held-out loss by the share of its last training that was done."""

    shares: tuple[float, ...]
    losses: tuple[float, ...]
    before_j: float
    train_j: float

    @classmethod
    def of(cls, run: ComparedRun) -> Course | None:
        stage, steps = run.record.stage(TRAIN), run.record.results.get(f"{TRAIN}.steps")
        if stage is None or stage.best.energy_j is None or steps is None:
            return None
        looks = {
            int(line["step"]): float(line["held_out_loss"])
            for line in read_lines(RunPaths(run.folder).metrics)
            if "held_out_loss" in line and line.get("stage") == "student.validate"
        }
        if not looks:
            return None
        order = sorted(looks)
        before_j = sum(part.figure.energy_j or 0.0 for part in run.parts if is_before(part))
        return cls(
            tuple(step / steps.value for step in order), tuple(looks[step] for step in order), before_j,
            stage.best.energy_j,
        )  # fmt: skip

    @property
    def final(self) -> float:
        return self.losses[-1]

    @property
    def whole_j(self) -> float:
        return self.before_j + self.train_j

    @property
    def first_look_j(self) -> float:
        return self.before_j + self.shares[0] * self.train_j

    def charged_to(self, loss: float) -> float | None:
        """One that ends worse than at its first look, as students of preferences do, is charged for all of it: its end
        is what was made."""
        found = self.joules_to(loss)
        return self.whole_j if found is None and loss == self.final else found

    def joules_to(self, loss: float) -> float | None:
        """To the first look, or point between two, that is as good; None where that was before the first look."""
        if loss > self.losses[0]:
            return None
        lowest = np.minimum.accumulate(self.losses)
        share = float(np.interp(-loss, -lowest, self.shares))
        return self.before_j + share * self.train_j


def is_before(part: Part) -> bool:
    """Work before the last training: the SFT student's (whoever paid for it) and the reference's."""
    return not part.shared and any(stage in _BEFORE for stage in part.stages)
