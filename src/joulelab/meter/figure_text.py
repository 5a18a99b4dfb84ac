"""Energy figures as text: number, unit, uncertainty, method, in that order. Every place that prints joules uses this.

Measured figures print their random 95 % interval; the gain error follows once per output (`gain_text`). Estimates print
their total uncertainty, because their scale is the larger error. A figure with time or work without data is a lower
bound, measured or estimated: `≥` with the coverage and never with `±`, since no interval around it would cover the
true value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from joulelab.meter.figures import COVERED, EnergyFigure, Method, combined_half_width_j
from joulelab.units import energy_text, with_prefix

CODECARBON = "codecarbon"
"""The source of figures that CodeCarbon reported."""
LOWER_BOUND = "≥: lower bound, some time or work has no readings"
_METHODS: dict[Method, str] = {
    "counter": "energy counter",
    "integrated": "integrated power",
    "estimated": "estimated",
    "missing": "missing",
}


def amount_text(figure: EnergyFigure | None) -> str:
    """`512 J ±0.2 %`, estimated `146 J ±70 %`, incomplete `≥ 512 J (72 % covered)`; for cells next to a method."""
    if figure is None:
        return "-"
    if figure.energy_j is None:
        return "missing"
    spread = uncertainty_text(figure)
    number = with_prefix(figure.energy_j, "J", _more_digits(figure) if spread else 0)
    covered = f" ({coverage_text(figure.coverage)})" if figure.coverage < COVERED else ""
    if figure.is_lower_bound and _is_undetermined(figure):
        return f"inconclusive{covered}"
    return f"{bound_mark(figure)}{number}{f' {spread}' if spread else ''}{covered}"


def _is_undetermined(figure: EnergyFigure) -> bool:
    """Whether energy above idle, a difference, is not distinguishable from 0 in the covered time: it bounds nothing."""
    known = [error for error in figure.errors if error.name != "missing time"]
    difference = any(error.name == "idle" for error in known)
    return difference and combined_half_width_j(known) >= abs(figure.energy_j or 0.0)


def _more_digits(figure: EnergyFigure) -> int:
    """One digit beyond the usual three where rounding to three could leave the printed interval."""
    if not figure.energy_j or not figure.measured:
        return 0
    size = abs(figure.energy_j)
    rounding_j = 0.005 * 10 ** math.floor(math.log10(size))
    return int((figure.half_width_j or 0.0) < 1.01 * rounding_j)


def labeled_text(figure: EnergyFigure, mixed: bool = False) -> str:
    """`512 J ±0.2 %, energy counter`; for cells and sentences without room for the reason of a missing figure."""
    return "missing" if figure.energy_j is None else f"{amount_text(figure)}, {method_text(figure, mixed)}"


def figure_text(figure: EnergyFigure, mixed: bool = False) -> str:
    """`512 J ±0.2 %, gain ±5 %, energy counter`; `missing` with its reason and the fix."""
    if figure.energy_j is None:
        fix = f" ({figure.fix})" if figure.fix else ""
        return f"missing: {figure.reason or 'no reason recorded'}{fix}"
    parts = [amount_text(figure), gain_text([figure]), method_text(figure, mixed)]
    return ", ".join(part for part in parts if part)


def bound_mark(figure: EnergyFigure) -> str:
    """`≥ ` before a number that is a lower bound, else empty: also for rates computed from the figure."""
    return "≥ " if figure.is_lower_bound else ""


def uncertainty_text(figure: EnergyFigure) -> str:
    """`±0.2 %`: random for measured energy, total for an estimate; empty where it is not known or is a lower bound.

    CodeCarbon states no scale error, so the total of its figures is not known.
    """
    if figure.energy_j is None or figure.half_width_j is None or figure.is_lower_bound:
        return ""
    if not figure.measured and not figure.gain_error_rel:
        return ""
    if not figure.energy_j:
        return f"±{energy_text(figure.half_width_j)}" if figure.half_width_j else ""
    relative = figure.half_width_j / abs(figure.energy_j)
    if not figure.measured:
        relative = figure.total_error_rel or relative
    return f"±{relative_text(relative) if relative <= 1 else energy_text(relative * abs(figure.energy_j))}"


def gain_text(figures: Iterable[EnergyFigure]) -> str:
    """`gain ±5 %` of measured figures, a range where sensors differ; empty where none is stated.

    Estimates are left out where the uncertainty printed with them contains theirs.
    """
    apart = [figure for figure in figures if figure.measured or figure.is_lower_bound]
    stated = {round(figure.gain_error_rel, 3) for figure in apart if figure.gain_error_rel}
    if not stated:
        return ""
    low, high = (relative_text(end) for end in (min(stated), max(stated)))
    return f"gain ±{low}" if low == high else f"gain ±{low} to ±{high}"


def uncertainty_note(figures: Iterable[EnergyFigure], with_gain: bool = True) -> str:
    """What ± and ≥ mean below a table, with the gain error; empty where no figure has either."""
    listed = list(figures)
    interval = _interval_note(listed, with_gain)
    bounds = [figure for figure in listed if figure.is_lower_bound]
    if not bounds:
        return interval
    # the gain error is printed once: the sentence on ± has it where there is one
    gain = f"; {gain}" if with_gain and not interval and (gain := gain_text(bounds)) else ""
    return f"{interval} {LOWER_BOUND}{gain}.".strip()


def _interval_note(figures: Iterable[EnergyFigure], with_gain: bool) -> str:
    shown = [figure for figure in figures if uncertainty_text(figure)]
    measured = [figure for figure in shown if figure.measured]
    gain = f"; {gain} in addition" if with_gain and (gain := gain_text(measured)) else ""
    if not shown:
        return ""
    if len(measured) == len(shown):
        return f"±: random 95 % interval{gain}."
    if not measured:
        return "±: total uncertainty of the estimate."
    return f"±: random 95 % interval of measured energy{gain}; total uncertainty of estimates."


def estimate_note(figures: Iterable[EnergyFigure]) -> str:
    """Below a table of sums and differences without ±: how uncertain they are where they are estimates; else empty."""
    estimates = [figure for figure in figures if not figure.measured and uncertainty_text(figure)]
    spread = uncertainty_text(max(estimates, key=lambda one: one.total_error_rel or 0.0)) if estimates else ""
    return f"Energy is estimated, {spread}; the scale error cancels in ratios and counts." if spread else ""


def method_text(figure: EnergyFigure, mixed: bool = False) -> str:
    if mixed:
        return "measured + estimated"
    return "estimated by CodeCarbon" if figure.sources == (CODECARBON,) else _METHODS[figure.method]


def methods_text(figures: Iterable[EnergyFigure]) -> str:
    """All methods that occur, strongest first: for the caption of a table."""
    found = {figure.method for figure in figures if figure.energy_j is not None}
    return " and ".join(text for method, text in _METHODS.items() if method in found) or _METHODS["missing"]


def relative_text(share: float) -> str:
    """At most two significant digits: an uncertainty deserves no more."""
    value = 100 * share
    if value < 0.05:
        return "<0.1 %"
    return f"{value:.1f}".removesuffix(".0") + " %" if value < 9.95 else f"{value:.0f} %"


def coverage_text(coverage: float) -> str:
    """`57.7 % covered`."""
    return f"{covered_percent(coverage)} covered"


def covered_percent(coverage: float) -> str:
    """`57.7 %`, the same digits wherever coverage is printed; rounded down, so that incomplete never reads as 100 %."""
    return f"{math.floor(round(1000 * coverage, 6)) / 10:g} %"
