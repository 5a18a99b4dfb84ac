"""A run done in parts, by one job after the other: data on a CPU node, the teacher on a GPU, the students elsewhere.

All parts are attempts of the same run, so its folder has the whole bill. A part ends where the first stage of a later
part would begin; what it made lies in artefacts, which the next attempt finds. Stage names say what is whose.
"""

from __future__ import annotations

from typing import Literal

Part = Literal["data", "teacher", "train"]
PARTS: tuple[Part, ...] = ("data", "teacher", "train")
_EVALUATION = len(PARTS)


class PartDone(BaseException):
    """Raised where the next part would begin. No `Exception`: nobody on the way out should take it for a failure."""


def leave_to_later(stage: str, part: Part | None) -> None:
    """Ends the attempt where `stage` belongs to a later part than the one this job was given."""
    if part is not None and _place(stage) > PARTS.index(part):
        raise PartDone(stage)


def _place(stage: str) -> int:
    """Which part a stage `<who>.<what>` belongs to; idle baselines belong to all of them."""
    who, _, what = stage.partition(".")
    if who == "idle":
        return -1
    if who in ("data", "teacher"):
        return ("data", "teacher").index(who)
    return _EVALUATION if what.endswith("evaluate") else PARTS.index("train")
