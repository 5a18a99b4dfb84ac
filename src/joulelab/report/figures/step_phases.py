"""Time and energy of a step by phase, for a comparison and for a sweep; and a sweep's energy and speed."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from joulelab.report.compare.comparison import Comparison, Row
from joulelab.report.compare.method_rows import training_stage
from joulelab.report.figures.chart_base import (
    FOLDED_AXIS,
    HUES,
    Figure,
    bounds_caption,
    finish,
    folded,
    moving,
    with_bounds,
)
from joulelab.report.tables.sweep_table import Sweep, SweepRow, interval_text, item_energy_text
from joulelab.report.tables.training_table import phase_joules, phase_times
from joulelab.runs.record import RunRecord
from joulelab.stats import Interval
from joulelab.units import three_digits

_PHASES = ("input", "forward", "backward", "optimiser_step")
_ROW_HEIGHT = 44


def phase_figures(comparison: Comparison) -> tuple[Figure, ...]:
    found = (
        _figure(comparison, "Energy of a step by phase", "J per step", _joules, 1.0, "phases-joules"),
        _figure(comparison, "Time of a step by phase", "ms per step", _seconds, 1000.0, "phases-time"),
    )
    return tuple(figure for figure in found if figure)


def _stage_name(record: RunRecord) -> str:
    stage = training_stage(record)
    return stage.name if stage else ""


def _joules(record: RunRecord) -> dict[str, float]:
    return {name: float(row["energy_j"]) for name, row in phase_joules(record, _stage_name(record)).items()}


def _seconds(record: RunRecord) -> dict[str, float]:
    """From a tracker if there was one; else from the phase marks of the training loop."""
    found = phase_times(record, _stage_name(record))
    if found:
        return found
    stage = training_stage(record)
    phases = stage.phases if stage else {}
    steps = phases["optimiser_step"].count if "optimiser_step" in phases else 0
    return {name: phases[name].sum_s / steps for name in _PHASES if name in phases} if steps else {}


def _figure(
    comparison: Comparison,
    title: str,
    axis: str,
    of: Callable[[RunRecord], dict[str, float]],
    factor: float,
    name: str,
) -> Figure | None:
    values = []
    for row in comparison.rows:
        for place, (phase, value) in enumerate(_means(row, of).items()):
            values.append(
                {
                    "row": folded(row.label),
                    "method": row.label,
                    "phase": phase.replace("_", " "),
                    "value": factor * value,
                    "place": place,
                }
            )
    if not values:
        return None
    used = {value["phase"] for value in values}
    pairs = [
        (name, hue) for phase, hue in zip(_PHASES, HUES, strict=False) if (name := phase.replace("_", " ")) in used
    ]
    scale = alt.Scale(domain=[name for name, _ in pairs], range=[hue for _, hue in pairs])
    chart = (
        alt.Chart(alt.Data(values=values))
        .transform_filter("indexof(hidden, datum.method) < 0")
        .mark_bar(cornerRadius=1)
        .encode(
            y=alt.Y("row:N", title=None, sort=None, axis=alt.Axis(**FOLDED_AXIS)),
            x=alt.X("value:Q", title=axis, stack="zero"),
            color=alt.Color("phase:N", title="Phase", scale=scale),
            order=alt.Order("place:Q"),
            tooltip=["method:N", "phase:N", alt.Tooltip("value:Q", title=axis, format=".3g")],
        )
    )
    height = _ROW_HEIGHT * len({value["row"] for value in values}) + 20
    described = "; ".join(f"{value['method']} {value['phase']} {value['value']:.3g}" for value in values)
    caption = "Mean over a method's runs; the forward pass of a live teacher is part of the forward pass."
    return Figure(title, finish(moving(chart), height), f"{title}: {described}.", caption, height, name=name)


def _means(row: Row, of: Callable[[RunRecord], dict[str, float]]) -> dict[str, float]:
    found: Sequence[dict[str, float]] = [values for run in row.runs if (values := of(run.record))]
    return {
        phase: sum(values[phase] for values in known) / len(known)
        for phase in _PHASES
        if (known := [values for values in found if phase in values])
    }


def sweep_figures(sweep: Sweep) -> tuple[Figure, ...]:
    found = (
        _by_configuration(sweep, "Energy per item", f"J per {sweep.item}", "j_per_item", None),
        _by_configuration(sweep, "Speed", f"{sweep.item}s per second", "items_per_s", three_digits),
        _phases(sweep, "Energy of a step by phase", "J per step", "phase_j", 1.0),
        _phases(sweep, "Time of a step by phase", f"ms of {sweep.clock} time per step", "phase_s", 1000.0),
    )
    return tuple(figure for figure in found if figure is not None)


def _by_configuration(sweep: Sweep, title: str, axis: str, name: str, text: Any) -> Figure | None:
    """`text` formats a value; None for energy, whose rows may be lower bounds."""
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
