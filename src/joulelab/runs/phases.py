"""Phases of a run, done by one job after the other: data on a CPU node, the teacher on a GPU, the students elsewhere.

All phases are attempts of the same run, so its record has the whole energy bill. A pipeline asks `RunContext.includes`
before it begins a phase and returns if the attempt ends before it; the next attempt finds the artifacts of the earlier
phases. A pipeline that does not ask runs all of its phases in one attempt.
"""

from __future__ import annotations

from typing import Literal

Phase = Literal["data", "teacher", "train"]
"""The last phase of an attempt, as a user chooses it."""
PHASES: tuple[Phase, ...] = ("data", "teacher", "train")
_ORDER = (*PHASES, "evaluate")


def comes_after(phase: Phase | Literal["evaluate"], last: Phase) -> bool:
    return _ORDER.index(phase) > _ORDER.index(last)
