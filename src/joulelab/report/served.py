"""What a model costs when it is used: the stages in which a finished model ran on data, one item at a time or many."""

from __future__ import annotations

from dataclasses import dataclass

from joulelab.report.comparison import ComparedRun
from joulelab.runs.record import StageRecord

INFER = "infer."
_USES = (".evaluate", ".infer", ".generate", ".serve")


@dataclass(frozen=True)
class Served:
    """One run's model at work; per token where tokens were counted, else per sample."""

    run: ComparedRun
    stage: StageRecord
    item: str
    j_per_item: float
    s_per_item: float


def served(run: ComparedRun) -> Served | None:
    """The stage in which the run's own model worked: a student's before a teacher's."""
    used = [stage for stage in run.record.stages if stage.name.endswith(_USES) or stage.name.startswith(INFER)]
    used.sort(key=lambda stage: stage.role == "teacher")
    for stage in used:
        if stage.j_per_token is not None and stage.tokens_per_s:
            return Served(run, stage, "token", stage.j_per_token, 1 / stage.tokens_per_s)
        if stage.j_per_sample is not None and stage.samples_per_s:
            return Served(run, stage, "sample", stage.j_per_sample, 1 / stage.samples_per_s)
    return None
