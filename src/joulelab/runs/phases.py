"""A run done in parts, by one job after the other: data on a CPU node, the teacher on a GPU, the students elsewhere.

All parts are attempts of the same run, so its folder has the whole bill. A part ends where the first stage of a later
part would begin; what it made lies in artefacts, which the next attempt finds. The roles of stages say what is whose.
"""

from __future__ import annotations

from typing import Literal

from joulelab.runs.record import StageKind

Phase = Literal["data", "teacher", "train"]
PHASES: tuple[Phase, ...] = ("data", "teacher", "train")
_EVALUATION = len(PHASES)


class PhaseFinished(BaseException):
    """Raised where the next part would begin. No `Exception`: nobody on the way out should take it for a failure."""


def end_before_later_phase(stage: str, kind: StageKind, part: Phase | None) -> None:
    """Ends the attempt where `stage` belongs to a later part than the one this job was given."""
    if part is not None and _place(kind) > PHASES.index(part):
        raise PhaseFinished(stage)


def _place(kind: StageKind) -> int:
    """Which part a stage belongs to; idle baselines belong to all of them."""
    if kind.role == "idle":
        return -1
    if kind.role in ("data", "teacher"):
        return ("data", "teacher").index(kind.role)
    return _EVALUATION if kind.activity == "evaluate" else PHASES.index("train")
