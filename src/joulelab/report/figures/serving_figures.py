"""Serving cost: energy against time per item, and energy against latency of an inference run.

Both are read from inference stages; the evaluation of a training run is not serving.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from joulelab.meter.figures import amount_text, labeled_text, relative_text
from joulelab.report.compare.break_even_report import serving_costs
from joulelab.report.compare.comparison import Comparison
from joulelab.report.figures.chart_base import (
    Figure,
    bounds_caption,
    energy_unit,
    finish,
    label_scales,
    moving,
    with_bounds,
)
from joulelab.report.tables.inference_rows import InferenceRow, inference_rows, input_text, pareto, why_no_front
from joulelab.runs.record import RunRecord
from joulelab.units import with_prefix

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def joules_against_time(comparison: Comparison) -> Figure | None:
    found = [(row.label, one) for row in comparison.rows for run in row.runs if (one := serving_costs(run))]
    items = {one.item for _, one in found}
    if len(found) < 2 or len(items) > 1:
        return None
    item = items.pop()
    factor, unit = energy_unit([one.j_per_item for _, one in found])
    slowest = max(one.s_per_item for _, one in found)
    time_factor, time_unit = next((step for step in _TIMES if slowest >= step[0]), _TIMES[-1])
    values = [
        {
            "method": label,
            "run": f"{label}, seed {one.run.seed}",
            "stage": one.stage.name,
            "time_per_item": float(f"{one.s_per_item / time_factor:.5g}"),
            "energy": float(f"{one.j_per_item / factor:.5g}"),
            "joules": labeled_text(one.energy),
            "time": with_prefix(one.s_per_item, "s"),
            "lower_bound": one.energy.is_lower_bound,
        }
        for label, one in found
    ]
    domain, colors, shapes = label_scales([row.label for row in comparison.rows])
    base = alt.Chart(alt.NamedData("uses")).transform_filter("indexof(hidden, datum.method) < 0")
    x = alt.X("time_per_item:Q", title=f"Time per {item} ({time_unit})", scale=alt.Scale(type="linear", zero=True))
    y = alt.Y("energy:Q", title=f"Energy per {item} ({unit})", scale=alt.Scale(zero=True))
    points = base.mark_point(filled=True, size=100, opacity=0.9).encode(
        x=x,
        y=y,
        color=alt.Color("method:N", title="Method", scale=alt.Scale(domain=domain, range=colors)),
        shape=alt.Shape("method:N", title="Method", scale=alt.Scale(domain=domain, range=shapes)),
        tooltip=["run:N", "stage:N", "time:N", "joules:N"],
    )
    bounds = any(one.energy.is_lower_bound for _, one in found)
    chart = with_bounds(points, base, bounds, x=x, y=y)
    described = [f"{label} {labeled_text(one.energy)} in {with_prefix(one.s_per_item, 's')}" for label, one in found]
    stages = " and ".join(dict.fromkeys(one.stage.name for _, one in found))
    return Figure(
        title=f"Energy against time per {item}",
        spec=finish(moving(chart), 280, uses=values),
        description=f"Energy against time per {item} at inference: {'; '.join(described)}.",
        caption=f"Measured in {stages}, in batches; a single request takes longer." + bounds_caption(bounds),
        height=280,
        name="joules-against-time",
        log_axis="x",
    )


HEIGHT = 300


def joules_against_latency(record: RunRecord) -> Figure | None:
    everyone = inference_rows(record)
    rows = [row for row in everyone if row.energy is not None]
    if len(rows) < 2:
        return None
    front = pareto(everyone)
    factor, unit = energy_unit([row.energy.gross_j for row in rows if row.energy])
    several = len({row.item for row in rows}) > 1
    values = [_point(row, factor, row in front, several) for row in rows]
    item = rows[0].values["item"]
    estimated = ", estimated" if any(row.energy and row.energy.estimated for row in rows) else ""
    return Figure(
        title="Energy against latency",
        spec=finish(_layers(values, f"Energy per {item} ({unit}{estimated})"), HEIGHT),
        description=f"Energy per {item} against latency of a call. " + "; ".join(map(_described, rows)) + ".",
        caption=f"One mark per row, labeled with its batch size{' x tokens' if several else ''}; {_about_bars(rows)} "
        + _about_line(front, why_no_front(everyone), several),
        height=HEIGHT,
        name="joules-against-latency",
        log_axis="x",
    )


def models_against_latency(records: Sequence[RunRecord]) -> Figure | None:
    """Energy per item against latency of several models; None if fewer than two have both, or their items differ."""
    named = [(record.label, row) for record in records for row in inference_rows(record) if row.energy is not None]
    items = {row.values["item"] for _, row in named}
    if len({label for label, _ in named}) < 2 or len(items) > 1:
        return None
    factor, unit = energy_unit([row.energy.gross_j for _, row in named if row.energy])
    several = len({row.item for _, row in named}) > 1
    values = [{**_point(row, factor, False, several), "way": label} for label, row in named]
    estimated = ", estimated" if any(row.energy and row.energy.estimated for _, row in named) else ""
    item = items.pop()
    described = [f"{label}, {_described(row)}" for label, row in named]
    return Figure(
        title="Energy against latency",
        spec=finish(_layers(values, f"Energy per {item} ({unit}{estimated})", "Model"), HEIGHT),
        description=f"Energy per {item} against latency of a call. " + "; ".join(described) + ".",
        caption=f"One mark per model and row, labeled with its batch size{' x tokens' if several else ''}; "
        + _about_bars([row for _, row in named]),
        height=HEIGHT,
        name="joules-against-latency",
        log_axis="x",
    )


def _about_bars(rows: Sequence[InferenceRow]) -> str:
    """Bars are the spread within a run; the scale error is common to all marks and would hide their differences."""
    energies = [row.energy for row in rows if row.energy]
    bars = "bars: 95 % interval of the spread between readings"
    scale = [energy.gain_error_rel for energy in energies if energy.gain_error_rel]
    if not scale:
        return f"{bars}."
    what = "scale error of the estimate" if any(energy.estimated for energy in energies) else "gain error of the sensor"
    return f"{bars}, without the {what} (up to ±{relative_text(max(scale))}), which cancels in ratios on one machine."


def _ticks(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 times powers of ten, from at or below the smallest value to at or above the largest."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    steps = [float(f"{digit}e{power}") for power in range(low, high + 1) for digit in (1, 2, 5)]
    first = max(index for index, step in enumerate(steps) if step <= min(values))
    last = min(index for index, step in enumerate(steps) if step >= max(values))
    return steps[first : max(last, first + 1) + 1]


def _about_line(front: Sequence[InferenceRow], why_not: str, several: bool) -> str:
    if why_not:
        return f"No Pareto front is marked: {why_not}."
    lines = "Lines: Pareto front of each length" if several else "Line: Pareto front"
    return f"{lines}: {'; '.join(map(_name, front))}."


def _point(row: InferenceRow, factor: float, on_front: bool, with_tokens: bool) -> dict[str, Any]:
    assert row.energy is not None
    energy, half = row.energy.gross_j / factor, row.energy.gross_half_width_j / factor
    return {
        "way": row.name,
        "input": input_text(row),
        "label": f"{row.values['batch_size']}" + (f" x {row.values['tokens']}" if with_tokens else ""),
        "tokens": row.values["tokens"],
        "ms": float(f"{1000 * row.latency_s:.5g}"),
        "energy": float(f"{energy:.5g}"),
        "low": float(f"{energy - half:.5g}"),
        "high": float(f"{energy + half:.5g}"),
        "joules": labeled_text(row.energy.gross()),
        "time": with_prefix(row.latency_s, "s"),
        "front": on_front,
    }


def _layers(values: Sequence[dict[str, Any]], title: str, who: str = "Way") -> Any:
    domain, colors, shapes = label_scales([value["way"] for value in values])
    ticks = _ticks([value["ms"] for value in values])
    x = alt.X(
        "ms:Q",
        title="Median latency of a call (ms)",
        scale=alt.Scale(type="log", nice=False, padding=20, domain=[ticks[0], ticks[-1]]),
        axis=alt.Axis(values=ticks, format="~g"),
    )
    y = alt.Y("energy:Q", title=title, scale=alt.Scale(zero=True))
    base = alt.Chart(alt.Data(values=list(values)))
    solid = alt.Legend(symbolOpacity=1)  # otherwise it has the opacity of the faintest layer
    color = alt.Color("way:N", title=who, scale=alt.Scale(domain=domain, range=colors), legend=solid)
    shape = alt.Shape("way:N", title=who, scale=alt.Scale(domain=domain, range=shapes), legend=solid)
    line = base.transform_filter("datum.front").mark_line(strokeDash=[4, 3], opacity=0.6, color="#8A8F98")
    bars = base.mark_rule(strokeWidth=2, opacity=0.6).encode(x=x, y="low:Q", y2="high:Q", color=color)
    marks = base.mark_point(filled=True, size=90, opacity=1).encode(
        x=x, y=y, color=color, shape=shape, tooltip=["way:N", "input:N", "time:N", "joules:N"]
    )
    labels = base.mark_text(dx=10, dy=-8, align="left").encode(x=x, y=y, text="label:N")
    return alt.layer(line.encode(x=x, y=y, detail="tokens:N"), bars, marks, labels)


def _described(row: InferenceRow) -> str:
    joules = amount_text(row.energy.gross()) if row.energy else "missing"
    return f"{_name(row)}: {joules} in {with_prefix(row.latency_s, 's')}"


def _name(row: InferenceRow) -> str:
    return f"{input_text(row)}, {row.name}"
