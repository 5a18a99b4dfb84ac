"""Phases of a run, done by one job after the other: data on a CPU node, the teacher on a GPU, the students elsewhere.

All phases are attempts of the same run, so its record has the whole energy bill. A pipeline asks `RunContext.includes`
before it begins a phase and returns if the attempt ends before it; the next attempt finds the artifacts of the earlier
phases. A pipeline that does not ask runs all of its phases in one attempt.
"""

from __future__ import annotations

from typing import Literal

from joulelab.runs.record import StageKind

Phase = Literal["data", "teacher", "train"]
"""The last phase of an attempt, as a user chooses it."""
PHASES: tuple[Phase, ...] = ("data", "teacher", "train")
_ORDER = (*PHASES, "evaluate")


def comes_after(phase: Phase | Literal["evaluate"], last: Phase) -> bool:
    return _ORDER.index(phase) > _ORDER.index(last)


class PhaseFinished(BaseException):
    """Ends a pipeline that opens a stage of a later phase without asking. Not a failure, hence no `Exception`."""


def end_before_later_phase(stage: str, kind: StageKind, last: Phase | None) -> None:
    if last is None or kind.role == "idle":
        return
    phase = kind.role if kind.role in ("data", "teacher") else "evaluate" if kind.activity == "evaluate" else "train"
    if _ORDER.index(phase) > _ORDER.index(last):
        raise PhaseFinished(stage)
