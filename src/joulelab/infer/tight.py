"""Going on until the energy's interval is as tight as asked, or the time limit ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from joulelab.infer.energy import PIECE_S, Reader, Turn, per_inference
from joulelab.infer.infer_config import InferSpec
from joulelab.meter.session import Meter
from joulelab.train.stats.window_energy import reader_of, why_no_joules

# With fewer pieces than this their spread says nothing.
_FEWEST_PIECES = 3


class Timed(Protocol):
    """Whatever is run in rounds."""

    stopped: str
    """Why it was not run longer, where an interval was asked for."""

    @property
    def turns(self) -> list[Turn]: ...

    @property
    def seconds(self) -> float: ...


T = TypeVar("T", bound=Timed)


def until_tight(rows: Sequence[T], meter: Meter, spec: InferSpec, go_on: Callable[[T, float], None]) -> None:
    """`go_on` runs a row for so many seconds more. Rows take turns as before, as long as they are open."""
    if spec.target_ci is None:
        return
    if why_no_joules(meter) is not None:
        for row in rows:
            row.stopped = "there are no joules whose interval could become tight"
        return
    seconds, still_open = max(spec.min_run_time_s / spec.rounds, PIECE_S), list(rows)
    while still_open:
        read = reader_of(meter, 0)  # what the trace covers by now; waiting would let the card cool down
        for row in still_open:
            row.stopped = _why_enough(row, read, spec.target_ci, spec.max_time_s)
        still_open = [row for row in still_open if not row.stopped]
        for row in still_open:
            go_on(row, seconds)


def _why_enough(row: Timed, read: Reader, target: float, max_time_s: float) -> str:
    found, _ = per_inference(row.turns, read)
    enough = row.seconds >= _FEWEST_PIECES * PIECE_S
    if found is not None and enough and found.relative <= target:
        return f"the energy's interval reached {100 * target:g} %"
    if row.seconds >= max_time_s:
        wide = "unknown" if found is None else f"{100 * found.relative:.1f} %"
        return f"the time limit of {max_time_s:g} s; the energy's interval is {wide}"
    return ""
