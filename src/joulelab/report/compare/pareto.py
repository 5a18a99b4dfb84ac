"""Which methods are on the Pareto front, and two readings of a comparison: at equal quality, and at equal energy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from joulelab.meter.figures import EnergyFigure, amount_text
from joulelab.report.compare.comparison import Comparison, Row
from joulelab.report.compare.differences import SINGLE
from joulelab.report.wording import listed

# Mean energies that differ by less count as equal.
_EQUAL_ENERGY_REL = 0.05


def why_no_front(comparison: Comparison) -> str:
    """Empty if the front can be determined."""
    if comparison.measure is None or not comparison.contended:
        return ""
    return (
        "No Pareto front is marked: energy was estimated from CPU time under CPU contention, so the order of the "
        "methods is unreliable."
    )


def pareto_rows(comparison: Comparison) -> tuple[Row, ...]:
    """Rows that no other beats in quality and energy at once, teacher included, cheapest first."""
    labels = pareto_labels(comparison, {row.label: row.with_teacher for row in comparison.rows})
    return tuple(row for label in labels if (row := comparison.row(label)))


def pareto_labels(comparison: Comparison, energies: Mapping[str, EnergyFigure]) -> tuple[str, ...]:
    """The front by mean quality and these energies, cheapest first.

    A lower bound is not on it, because it would look cheap; nor a method evaluated on other data. Empty under CPU
    contention, which changes the order of estimated energies.
    """
    if comparison.measure is None or comparison.contended:
        return ()
    sign = comparison.measure.sign
    known = [
        (figure.energy_j, -sign * row.quality, row.label)
        for row in comparison.rows
        if row.quality is not None
        and row.same_data
        and (figure := energies[row.label]).energy_j is not None
        and not figure.is_lower_bound
    ]
    front: list[str] = []
    best = math.inf
    # One pass in order of energy: a method is on the front if it is better than every cheaper one.
    # Of equal energies the better quality comes first.
    for _, loss, label in sorted(known, key=lambda one: one[:2]):
        if loss < best:
            best = loss
            front.append(label)
    return tuple(front)


def reading_sentences(comparison: Comparison) -> list[str]:
    """Which method to choose, as far as the statistics allow it."""
    if comparison.measure is None or comparison.contended or not comparison.methods:
        return []
    return [text for text in (_front(comparison), _equal_quality(comparison), _equal_energy(comparison)) if text]


def _front(comparison: Comparison) -> str:
    front = pareto_rows(comparison)
    beaten = [row for row in comparison.rows if row.quality is not None and row.same_data and row not in front]
    if not front or not beaten:
        return ""
    names = listed([row.label for row in front])
    means = " (means over runs)" if any(len(row.runs) > 1 for row in comparison.rows) else ""
    return f"Pareto front of quality and energy, teacher included{means}: {names}."


def _equal_quality(comparison: Comparison) -> str:
    """Among the methods without a significant difference in quality from the baseline, whether one is cheaper."""
    alike = [
        row
        for row in comparison.methods
        if row.difference
        and row.difference.interval
        and not row.difference.significant
        and row.difference.reason not in SINGLE  # one run shows neither a difference nor that there is none
    ]
    if not alike:
        return ""
    known = [row for row in alike if row.full_ratio and row.full_ratio.significant and row.full_ratio.ratio]
    cheaper = [row for row in known if row.full_ratio and row.full_ratio.ratio and row.full_ratio.ratio.value < 1]
    names = listed([row.label for row in alike])
    opening = f"At equal quality (no significant difference from {comparison.baseline}: {names}), "
    if cheaper:
        return f"{opening}{_names(cheaper)} cheaper."
    return f"{opening}{comparison.baseline} is the cheapest." if len(known) == len(alike) else ""


def _names(rows: Sequence[Row]) -> str:
    return f"{listed([row.label for row in rows])} {'is' if len(rows) == 1 else 'are'}"


def _whole_j(row: Row) -> float | None:
    """None for a lower bound, which would look cheap."""
    return None if row.with_teacher.is_lower_bound else row.with_teacher.energy_j


def _equal_energy(comparison: Comparison) -> str:
    """The best quality among methods that use the baseline's energy, by at most 5 % more or less."""
    baseline, measure = comparison.row(comparison.baseline), comparison.measure
    if baseline is None or measure is None or baseline.quality is None or baseline.with_teacher.energy_j is None:
        return ""
    base_j = baseline.with_teacher.energy_j
    others = [
        row
        for row in comparison.methods
        if row.quality is not None
        and row.same_data
        and (whole_j := _whole_j(row)) is not None
        and abs(whole_j - base_j) <= _EQUAL_ENERGY_REL * base_j
    ]
    if not others:
        return ""
    best = max(others, key=lambda row: measure.sign * (row.quality or 0.0))
    better = measure.sign * ((best.quality or 0.0) - baseline.quality) > 0
    if best.difference and best.difference.significant:
        result = f"significantly {'better' if better else 'worse'}"
    elif best.difference and best.difference.reason in SINGLE:
        result = "one run on one side, so the methods cannot be compared"
    elif best.difference and best.difference.interval is None:
        result = f"inconclusive, because {best.difference.reason}"
    else:
        result = "no significant difference"
    return (
        f"At equal energy (within {100 * _EQUAL_ENERGY_REL:.0f} % of {comparison.baseline}'s "
        f"{amount_text(baseline.with_teacher)}), {best.label} has {measure.text(best.quality or 0.0)}: {result}."
    )
