"""Figures of a sweep: joules per item and items per second by configuration, and the phases of a step as bars."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import altair as alt

from joulelab.report.figures import Figure, bounds_caption, finish, with_bounds
from joulelab.report.palette import HUES
from joulelab.report.sweep import Sweep, SweepRow
from joulelab.report.sweep_table import interval_text, item_energy_text
from joulelab.stats import Interval
from joulelab.units import three_digits

_ROW_HEIGHT = 44
_PHASES = ("input", "forward", "backward", "optimiser_step")


def sweep_figures(sweep: Sweep) -> tuple[Figure, ...]:
    found = (
        _by_configuration(sweep, "Joules per item", f"J per {sweep.item}", "j_per_item", None),
        _by_configuration(sweep, "Speed", f"{sweep.item}s per second", "items_per_s", three_digits),
        _phases(sweep, "Where a step's joules went", "J per step", "phase_j", 1.0),
        _phases(sweep, "Where a step's time went", f"ms of {sweep.clock} time per step", "phase_s", 1000.0),
    )
    return tuple(figure for figure in found if figure is not None)


def _by_configuration(sweep: Sweep, title: str, axis: str, name: str, text: Any) -> Figure | None:
    """`text` writes a value; None for energy, whose rows may be lower bounds."""
    rows = [(row, interval) for row in sweep.rows if isinstance(interval := getattr(row, name), Interval)]
    if not rows:
        return None
    texts = [interval_text(interval, text) if text else item_energy_text(row) for row, interval in rows]
    bounds = [row.lower_bound and text is None for row, _ in rows]
    values = [_mark(*found, shown, bound) for found, shown, bound in zip(rows, texts, bounds, strict=True)]
    base = alt.Chart(alt.Data(values=values)).encode(
        y=alt.Y("row:N", title=None, sort=None, axis=alt.Axis(labelExpr="split(datum.label, '\\n')", ticks=False)),
        tooltip=["configuration:N", "shown:N"],
    )
    scale = alt.Scale(zero=True, nice=True)
    spread = base.mark_rule(strokeWidth=2, opacity=0.6, color=HUES[0]).encode(x=alt.X("low:Q"), x2="high:Q")
    x = alt.X("value:Q", title=axis, scale=scale)
    points = base.mark_point(filled=True, size=90, opacity=1, color=HUES[0]).encode(x=x)
    chart = alt.layer(spread, with_bounds(points, base, any(bounds), x=x))
    height = _ROW_HEIGHT * len(rows) + 20
    described = "; ".join(f"{row.label} {shown}" for (row, _), shown in zip(rows, texts, strict=True))
    caption = f"Mean over the repeats; bars: 95 % t interval.{bounds_caption(any(bounds))}"
    return Figure(title, finish(chart, height), f"{title}: {described}.", caption, height)


def _mark(row: SweepRow, interval: Interval, shown: str, lower_bound: bool) -> dict[str, Any]:
    bounded = math.isfinite(interval.high) and not lower_bound
    return {
        "row": _folded(row),
        "configuration": row.label,
        "value": interval.value,
        "low": max(0.0, interval.low) if bounded else interval.value,
        "high": interval.high if bounded else interval.value,
        "shown": shown,
        "lower_bound": lower_bound,
    }


def _phases(sweep: Sweep, title: str, axis: str, name: str, factor: float) -> Figure | None:
    values = [
        {"row": _folded(row), "phase": phase.replace("_", " "), "value": factor * found[phase], "place": place}
        for row in sweep.rows
        if (found := getattr(row, name))
        for place, phase in enumerate(_PHASES)
        if phase in found
    ]
    if not values:
        return None
    domain = [phase.replace("_", " ") for phase in _PHASES]
    chart = (
        alt.Chart(alt.Data(values=values))
        .mark_bar(cornerRadius=1)
        .encode(
            y=alt.Y("row:N", title=None, sort=None, axis=alt.Axis(labelExpr="split(datum.label, '\\n')", ticks=False)),
            x=alt.X("value:Q", title=axis, stack="zero"),
            color=alt.Color("phase:N", title="Phase", scale=alt.Scale(domain=domain, range=list(HUES[: len(domain)]))),
            order=alt.Order("place:Q"),
            tooltip=["phase:N", "value:Q"],
        )
    )
    height = _ROW_HEIGHT * len({value["row"] for value in values}) + 20
    described = "; ".join(f"{value['row']} {value['phase']} {value['value']:.3g}" for value in values)
    return Figure(title, finish(chart, height), f"{title}: {described}.", "", height)


def _folded(row: SweepRow) -> str:
    return "\n".join(textwrap.wrap(row.label, 24))
