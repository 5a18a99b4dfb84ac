"""Rows that took turns, each against the first of its input: ratios of time and joules, and what they say in words."""

from __future__ import annotations

from collections.abc import Sequence

from joulelab.report.grid import Grid, make_grid
from joulelab.report.inference_rows import InferenceRow, RowRatio
from joulelab.report.wording import INCONCLUSIVE, says_nothing
from joulelab.stats import Interval


def ratio_grid(ratios: Sequence[RowRatio]) -> Grid:
    several = len({one.row.group for one in ratios}) > 1
    rows = [row for one in ratios for row in (one.row, one.base)]
    cells = [
        (
            *([input_text(one.row)] if several else []),
            _way(one.row, rows),
            _way(one.base, rows),
            _interval(one.time),
            _interval(one.energy) if one.energy else "not measured",
            _verdict(one.time, "time", "slower", "quicker"),
        )
        for one in ratios
    ]
    note = (
        "Rows of one input took turns. Each round gives one ratio, of its two medians or of its joules per item; here "
        "is the geometric mean of these, with Student's 95 % interval. It is not the ratio of the medians over all "
        "rounds, which stand above. Below 1 the row takes less than the one it is compared with."
    )
    ratio = "ratio\nmean of rounds!"
    titles = ("Input!|" if several else "") + f"Row|Against|Time {ratio}|Energy {ratio}|In words"
    return make_grid("Against the first row, in turns", titles, cells, note)


def input_text(row: InferenceRow) -> str:
    tokens = row.values["tokens"]
    return f"batch {row.values['batch_size']}" + (f", {tokens} tokens" if tokens else "")


def _way(row: InferenceRow, rows: Sequence[InferenceRow]) -> str:
    """In what its way differs from that of the others."""
    keys = [key for key in ("norm", "mode", "dtype") if len({one.values[key] for one in rows}) > 1]
    return ", ".join(str(row.values[key]) for key in keys)


def _interval(found: Interval) -> str:
    if says_nothing(found):
        return f"{found.value:.3f}" + (f", {INCONCLUSIVE}" if found.bounded else "")
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _verdict(found: Interval, of: str, above: str, below: str) -> str:
    if not found.bounded:
        return "one round tells no spread"
    if not found.excludes(1.0):
        return f"no significant difference in {of}"
    change = 100 * abs(found.value - 1)
    return f"{change:.1f} % {above if found.value > 1 else below}"
