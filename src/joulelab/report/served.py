"""What a model costs when it is used: the stages in which a finished model ran on data, one item at a time or many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from joulelab.meter.figures import EnergyFigure
from joulelab.report.comparison import ComparedRun
from joulelab.report.inference_rows import timed_rows
from joulelab.runs.record import StageRecord

INFER = "infer."
_USES = (".evaluate", ".infer", ".generate", ".serve")
_ITEMS: tuple[tuple[Literal["token", "sample"], str], ...] = (("token", "tokens_per_s"), ("sample", "samples_per_s"))


@dataclass(frozen=True)
class Served:
    """One run's model at work; per token where tokens were counted, else per sample."""

    run: ComparedRun
    stage: StageRecord
    item: str
    energy: EnergyFigure
    """Of one item."""
    s_per_item: float

    @property
    def j_per_item(self) -> float:
        return self.energy.energy_j or 0.0


def served(run: ComparedRun) -> Served | None:
    """The stage in which the run's own model worked: a student's before a teacher's."""
    used = [stage for stage in run.record.stages if stage.name.endswith(_USES) or stage.name.startswith(INFER)]
    used.sort(key=lambda stage: stage.role == "teacher")
    timed = timed_rows(run.record)
    for stage in used:
        row = timed.get(stage.name)
        if row is not None and row.energy is not None:
            tokens = row.values.get("new_tokens", 1)
            item = "token" if "new_tokens" in row.values else "sample"
            return Served(run, stage, item, row.energy.gross(tokens), 1 / (tokens * row.items_per_s))
        for item, per_s in _ITEMS:
            each, rate = stage.energy_per(item), getattr(stage, per_s)
            if each is not None and each.energy_j is not None and rate:
                return Served(run, stage, item, each, 1 / rate)
    return None
