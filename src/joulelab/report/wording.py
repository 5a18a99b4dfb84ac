"""Text of numbers other than energy in sentences and cells (energy: meter/figures.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

from joulelab.report.compare.comparison import EnergyRatio
from joulelab.stats import Interval
from joulelab.units import plain_range_text, range_text, three_digits, with_prefix

NOTHING = "-"
INCONCLUSIVE = "inconclusive"
# An interval of a ratio around 1 whose ends differ by more than two orders of magnitude carries no information.
_WIDEST_RATIO = 100.0


def share(value: float, interval: Interval | None) -> str:
    """`81.2 % [80.0, 82.3]`"""
    text = f"{100 * value:.1f} %"
    return text if interval is None else f"{text} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def moment(timestamp: str) -> str:
    """`2026-03-01 10:00:00+00:00`"""
    return datetime.fromisoformat(timestamp).isoformat(sep=" ", timespec="seconds")


def p_value(p: float) -> str:
    if p < 0.001:
        return "p < 0.001"
    return f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def ratio(interval: Interval) -> str:
    """`8.12x [7.20, 9.10]`; without an interval if it is unbounded (one seed) or carries no information."""
    decimals = _decimals(interval.value)
    text = f"{interval.value:.{decimals}f}x"
    if is_uninformative(interval):
        return text
    ends = (f"{end:.{_end_decimals(end, decimals)}f}" for end in (interval.low, interval.high))
    return f"{text} [{', '.join(ends)}]"


def is_uninformative(interval: Interval) -> bool:
    """An interval such as [0.000, 1332], which is not printed: the result is inconclusive."""
    unbounded = math.isinf(interval.high) or interval.low <= 0
    return unbounded or (not interval.excludes(1.0) and interval.high / interval.low > _WIDEST_RATIO)


def ratio_cell(found: EnergyRatio | None) -> str:
    """The ratio to the baseline, and below it why it is inconclusive; 1 for the baseline itself."""
    if found is None:
        return "1"
    if found.ratio is None:
        return f"{NOTHING}\n{found.reason}"
    if found.significant:
        return ratio(found.ratio)
    if found.contended:
        return f"{ratio(found.ratio)}\n{INCONCLUSIVE}\n(CPU\ncontention)"
    needed = f", needs {found.needed}" if found.needed else ""
    return ratio(found.ratio) + (f"\n{INCONCLUSIVE}\n(n={found.seeds}{needed})" if found.seeds > 1 else "\none run")


def _decimals(value: float) -> int:
    return 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3


def _end_decimals(end: float, decimals: int) -> int:
    """As many as the value has; more if the end would print as 0, fewer for ends of more digits."""
    return max(decimals, 3) if end < 0.5 * 10**-decimals else min(decimals, _decimals(end))


def inconclusive(repeats: int, needed: int | None) -> str:
    """`inconclusive (n=3; would need about 9)`"""
    if repeats < 2:
        return f"{INCONCLUSIVE} (n={repeats}: one repeat has no variance)"
    return f"{INCONCLUSIVE} (n={repeats}{f'; would need about {needed}' if needed else ''})"


def gram_cell(low_g: float, high_g: float, lower_bound: bool = False) -> str:
    """`1.2 to 2.3`, for a column titled gCO2e."""
    return plain_range_text(low_g, high_g, "", lower_bound)


def grams(low_g: float, high_g: float, lower_bound: bool = False) -> str:
    """`1.20 to 1.90 kgCO2e`; `≥ 1.20 kgCO2e` of energy that is a lower bound."""
    return range_text(low_g, high_g, "gCO2e", lower_bound)


def rate(value: float | None, unit: str) -> str:
    return NOTHING if value is None else with_prefix(value, unit) if unit else three_digits(value)


def all_equal(values: Sequence[float]) -> str:
    """`(n=2, equal)` instead of an interval of width 0; empty if repeats differ or there is one."""
    return f"(n={len(values)}, equal)" if len(values) > 1 and len(set(values)) == 1 else ""


def listed(words: Sequence[str]) -> str:
    """a / a and b / a, b and c"""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
