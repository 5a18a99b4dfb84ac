"""Going on until the energy's interval is as tight as asked, or the time limit ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar

from joulelab.infer.energy import PIECE_S, Reader, Turn, per_inference
from joulelab.infer.infer_config import InferSpec
from joulelab.meter.session import Meter
from joulelab.train.stats.window_energy import reader_of, why_no_joules

# With fewer pieces than this their spread says nothing.
_FEWEST_PIECES = 3


Ended = Literal["", "no joules", "tight", "limit"]
"""Why a row was not run longer, where an interval was asked for."""


class Timed(Protocol):
    """Whatever is run in rounds."""

    ended: Ended

    @property
    def turns(self) -> list[Turn]: ...

    @property
    def seconds(self) -> float: ...


T = TypeVar("T", bound=Timed)


def until_tight(
    rows: Sequence[T], meter: Meter, spec: InferSpec, device: str, go_on: Callable[[T, float], None]
) -> None:
    """`go_on` runs a row for so many seconds more. Rows take turns as before, as long as they are open."""
    if spec.target_ci is None:
        return
    if why_no_joules(meter, device) is not None:
        for row in rows:
            row.ended = "no joules"
        return
    seconds, still_open = max(spec.min_run_time_s / spec.rounds, PIECE_S), list(rows)
    while still_open:
        read = reader_of(meter, 0, device)  # what the trace covers by now; waiting would let the card cool down
        for row in still_open:
            row.ended = _why_enough(row, read, spec.target_ci, spec.limit_s)
        still_open = [row for row in still_open if not row.ended]
        for row in still_open:
            go_on(row, seconds)


def _why_enough(row: Timed, read: Reader, target: float, limit_s: float) -> Ended:
    found, _ = per_inference(row.turns, read)
    if found is not None and row.seconds >= _FEWEST_PIECES * PIECE_S and found.relative <= target:
        return "tight"
    return "limit" if row.seconds >= limit_s else ""


def stopped_words(row: Timed, spec: InferSpec) -> str:
    """Without the interval itself: the trace ran late while it was decided, and the table has the final one."""
    asked = f"{100 * (spec.target_ci or 0):g} %"
    return {
        "": "",
        "no joules": "there are no joules whose interval could become tight",
        "tight": f"the energy's interval reached {asked}",
        "limit": f"the time limit of {spec.limit_s:g} s, before the energy's interval reached {asked}",
    }[row.ended]
