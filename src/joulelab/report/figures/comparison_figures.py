"""Figures of a comparison: quality against energy, energy by stage, repeats, break-even."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from joulelab.meter.figures import amount_text
from joulelab.report.compare.break_even_report import RowBreakEven, break_even_rows, student_parts
from joulelab.report.compare.comparison import Comparison, Row
from joulelab.report.compare.pareto import why_no_front
from joulelab.report.compare.quality import Measure
from joulelab.report.compare.verdict import break_even_sentence
from joulelab.report.figures.chart_base import (
    FOLDED_AXIS,
    GRAY,
    Figure,
    bounds_caption,
    color_scale,
    comparison_unit,
    energy_title,
    energy_unit,
    finish,
    folded,
    label_scales,
    methods_chart,
    moving,
    parts_chart,
    stage_colors,
    value_scale,
    with_bounds,
)
from joulelab.report.wording import listed

# Above this ratio of energies the axis is logarithmic.
_LOG_ABOVE = 30.0
_INHERITED = "Muted parts with a dashed edge are inherited from other runs, each counted once per method."
_BAR_HEIGHT = 52
# A legend higher than its figure would be clipped.
_LEGEND_LINE = 15


def quality_against_energy(comparison: Comparison) -> Figure | None:
    """One mark per run, and the Pareto front over the methods' means if it can be determined."""
    factor, unit, figures = comparison_unit(comparison)
    measure = comparison.measure
    rows = [row for row in comparison.rows if row.quality is not None and row.with_teacher.energy_j]
    if measure is None or not rows:
        return None
    title = energy_title("Energy per student", unit, figures)
    energies = [value for row in rows for value in (row.without_teacher.energy_j, row.with_teacher.energy_j) if value]
    log = max(energies) > _LOG_ABOVE * min(energies)
    scale = alt.Scale(type="log", nice=False, padding=16) if log else alt.Scale(type="linear", zero=True, nice=True)
    x, labels = alt.X("total:Q", title=title, scale=scale), [row.label for row in comparison.rows]
    no_front = why_no_front(comparison)
    bounds = any(row.with_teacher.is_lower_bound for row in rows)
    chart = _tradeoff(measure, x, _quality_scale(comparison, measure), factor, labels, not no_front, bounds)
    described = [f"{row.label}: {measure.text(row.quality or 0.0)} for {_energy(row)}" for row in rows]
    bars = " Bars: 95 % interval on the test set." if comparison.about_items else ""
    lower_bounds = [row.label for row in rows if row.with_teacher.is_lower_bound]
    unmetered = f" {listed(lower_bounds)}: a lower bound, so not on the front." if lower_bounds else ""
    front = "Dashed: Pareto front over the methods' means; a method off the front is dominated by another method."
    if len(rows) == 1:
        front = ""
    return Figure(
        title="Quality against energy",
        spec=finish(moving(chart), 340),
        description=f"{measure.axis} against energy, teacher included. {'; '.join(described)}.",
        caption="One mark per run. Filled: teacher included; hollow: without it; the thin line between them is the "
        f"teacher's work.{bars} {no_front or (front + unmetered).strip()}{bounds_caption(bounds)}",
        height=340,
        name="quality-against-energy",
        log_axis="x",
    )


def _quality_scale(comparison: Comparison, measure: Measure) -> alt.Scale:
    qualities = [run.quality for row in comparison.rows for run in row.runs if run.quality]
    times = 100.0 if measure.percent else 1.0
    ends = [(one.interval.low, one.interval.high) if one.interval else (one.result.value,) for one in qualities]
    return value_scale([times * end for found in ends for end in found], 100.0 if measure.percent else math.inf)


def _tradeoff(
    measure: Measure, x: Any, y_scale: Any, factor: float, labels: Sequence[str], with_front: bool, bounds: bool
) -> Any:
    domain, colors, shapes = label_scales(labels)
    solid = alt.Legend(symbolOpacity=1)  # otherwise the legend has the opacity of the faintest layer
    runs = (
        parts_chart(factor)
        .transform_calculate(student_energy="datum.teachers ? 0 : datum.energy")
        .transform_aggregate(total="sum(energy)", without="sum(student_energy)", groupby=["run", "method"])
        .transform_lookup(
            "run",
            from_=_run_facts("quality", "low", "high", "lower_bound"),
        )
        .transform_filter("isValid(datum.quality)")
    )
    color = alt.Color("method:N", title="Method", scale=alt.Scale(domain=domain, range=colors), legend=solid)
    shape = alt.Shape("method:N", title="Method", scale=alt.Scale(domain=domain, range=shapes), legend=solid)
    tooltip = [
        alt.Tooltip("run:N"),
        alt.Tooltip("quality:Q", title=measure.title, format=".4g"),
        alt.Tooltip("without:Q", title="without teacher", format=".3g"),
        alt.Tooltip("total:Q", title="teacher included", format=".3g"),
    ]
    y_title = f"{measure.axis}, less is better" if measure.lower_is_better else measure.axis
    base = runs.encode(y=alt.Y("quality:Q", title=y_title, scale=y_scale), color=color, tooltip=tooltip)
    teacher = base.mark_rule(opacity=0.35, strokeWidth=1).encode(x=x, x2="without:Q")
    interval = base.mark_rule(opacity=0.55, strokeWidth=2).encode(x=x, y=alt.Y("low:Q", title=y_title), y2="high:Q")
    without = base.mark_point(filled=False, size=70, strokeWidth=1.5).encode(
        x=alt.X("without:Q", title=x.to_dict()["title"]), shape=shape
    )
    full = base.mark_point(filled=True, size=110, opacity=1).encode(x=x, shape=shape)
    marks = [teacher, interval, without, with_bounds(full, base, bounds, x=x)]
    if not with_front:
        return alt.layer(*marks)
    front = (
        methods_chart(factor)
        .transform_filter("datum.front")
        .transform_calculate(total="datum.mean")
        .mark_line(interpolate="step-after", strokeDash=[5, 4], strokeWidth=1.2, opacity=0.8, color=GRAY)
        .encode(x=x, y=alt.Y("quality:Q", title=y_title, scale=y_scale))
    )
    return alt.layer(front, *marks)


def _by_run(row: Row) -> str:
    return f"{row.label} {', '.join(amount_text(run.joules.with_teacher) for run in row.runs)}"


def _energy(row: Row) -> str:
    return amount_text(row.with_teacher)


def stages_by_method(comparison: Comparison) -> Figure | None:
    factor, unit, figures = comparison_unit(comparison)
    parts = [part for row in comparison.rows for run in row.runs for part in run.parts]
    used = {part.stage for part in parts if part.figure.energy_j is not None}
    if not used:
        return None
    scale = color_scale(used, stage_colors(comparison.records))
    places = json.dumps(scale.domain)
    # runs without energy are in no mean, as in the table
    energies = {row.label: [run.joules.with_teacher.energy_j for run in row.runs] for row in comparison.rows}
    counts = {label: len(found) - found.count(None) for label, found in energies.items()}
    inherited = "datum.paid == 'inherited'"
    y = alt.Y("row:N", title=None, sort=[folded(label) for label in counts], axis=alt.Axis(**FOLDED_AXIS))
    has_inherited = any(part.inherited for part in parts)
    title = energy_title("Mean energy per run", unit, figures)
    means = (
        parts_chart(factor)
        .transform_lookup("method", from_=_folded_methods(counts))
        .transform_calculate(mean="datum.energy / datum.repeats")
    )
    bars = (
        means.transform_aggregate(energy="sum(mean)", groupby=["row", "method", "stage", "paid"])
        .transform_calculate(place=f"indexof({places}, datum.stage) + (datum.paid == 'inherited' ? 0 : 100)")
        .mark_bar(cornerRadius=1)
        .encode(
            y=y,
            x=alt.X("energy:Q", title=title, stack="zero"),
            fill=alt.Fill("stage:N", title="Stage", scale=scale, legend=alt.Legend()),
            order=alt.Order("place:Q"),
            fillOpacity=alt.condition(inherited, alt.value(0.45), alt.value(1)),
            stroke=alt.Stroke("stage:N", title="Stage", scale=scale, legend=alt.Legend()),
            strokeDash=alt.condition(inherited, alt.value([4, 3]), alt.value([1, 0])),
            tooltip=["method:N", "stage:N", "paid:N", alt.Tooltip("energy:Q", title=unit, format=".3g")],
        )
    )
    bounds = any(row.with_teacher.is_lower_bound for row in comparison.rows)
    whole = means.transform_lookup("run", from_=_run_facts("lower_bound")).transform_aggregate(
        energy="sum(mean)", lower_bound="max(lower_bound)", groupby=["row"]
    )
    chart = with_bounds(bars, whole, bounds, y=y, x=alt.X("energy:Q", title=title))
    height = max(_BAR_HEIGHT * len(comparison.rows), _LEGEND_LINE * len(used))
    described = [f"{row.label} {_energy(row)}" for row in comparison.rows]
    return Figure(
        title="Energy by stage",
        spec=finish(moving(chart), height),
        description="Energy by stage, stacked for each method: " + "; ".join(described) + ".",
        caption=(_INHERITED if has_inherited else "") + bounds_caption(bounds),
        height=height,
        name="stages",
    )


def _run_facts(*fields: str) -> Any:
    return alt.LookupData(data=alt.NamedData("runs"), key="run", fields=list(fields))


def _folded_methods(counts: dict[str, int]) -> Any:
    values = [{"method": label, "row": folded(label), "repeats": count} for label, count in counts.items()]
    return alt.LookupData(data=alt.Data(values=values), key="method", fields=["row", "repeats"])


def repeats(comparison: Comparison) -> Figure | None:
    """Energy of every run, with mean and t interval per method."""
    factor, unit, figures = comparison_unit(comparison)
    if not figures or all(len(row.runs) < 2 for row in comparison.rows):
        return None
    counts = {row.label: len(row.runs) for row in comparison.rows}
    title = energy_title("Energy per run, teacher included", unit, figures)
    x = alt.X("total:Q", title=title, scale=alt.Scale(type="linear", zero=False, nice=True))
    y = alt.Y("row:N", title=None, sort=[folded(label) for label in counts], axis=alt.Axis(**FOLDED_AXIS))
    runs = (
        parts_chart(factor)
        .transform_aggregate(total="sum(energy)", groupby=["run", "method"])
        .transform_lookup("run", from_=_run_facts("seed", "incomplete"))
        .transform_calculate(lower_bound="datum.incomplete")
        .transform_lookup("method", from_=_folded_methods(counts))
    )
    means = methods_chart(factor).transform_lookup("method", from_=_folded_methods(counts))
    spread = means.mark_rule(strokeWidth=2, opacity=0.6, color=GRAY).encode(
        y=y, x=alt.X("low:Q", title=title), x2="high:Q"
    )
    ticks = means.mark_tick(thickness=2, size=22, color=GRAY).encode(y=y, x=alt.X("mean:Q", title=title))
    domain, colors, _ = label_scales(counts)
    color = alt.Color("method:N", scale=alt.Scale(domain=domain, range=colors), legend=None)
    tooltip = ["run:N", alt.Tooltip("total:Q", title=unit, format=".4g")]
    points = runs.mark_point(filled=True, size=60, opacity=0.85).encode(y=y, x=x, color=color, tooltip=tooltip)
    bounds = any(row.with_teacher.is_lower_bound for row in comparison.rows)
    height = 40 * len(comparison.rows) + 20
    return Figure(
        title="Repeats",
        spec=finish(moving(alt.layer(spread, ticks, with_bounds(points, runs, bounds, y=y, x=x))), height),
        description=f"Energy of every run: {'; '.join(map(_by_run, comparison.rows))}.",
        caption="A mark per run; tick and bar: mean with Student's 95 % interval, limited to values above 0."
        + bounds_caption(bounds),
        height=height,
        name="repeats",
        log_axis="x",
    )


_MOST_STUDENTS = 1_000
_LARGEST = 1_000_000


def break_even_curve(comparison: Comparison) -> Figure | None:
    """Net energy per student, `spent / n - saved` of the table's figures, so that a curve is 0 at the table's count."""
    answers = [one for one in break_even_rows(comparison) if one.each == "student" and one.found]
    drawn = [(one, one.found) for one in answers if one.found and one.costs and one.costs.reach_equal_quality]
    if not drawn:
        return None
    counts = [found.count for _, found in drawn if found.count]
    most = min(max([_MOST_STUDENTS, *(2 * count for count in counts)]), _LARGEST)
    steps = sorted({round(10 ** (k / 12)) for k in range(1 + math.ceil(12 * math.log10(most)))})
    factor, unit = energy_unit([max(abs(found.spent.value), abs(found.saved.value)) for _, found in drawn])
    curves = [
        {
            "method": one.label,
            "n": n,
            "net": (found.spent.value / n - found.saved.value) / factor,
            "breaks_even": found.breaks_even,
        }
        for one, found in drawn
        for n in steps
    ]
    marks = [{"method": one.label, "n": found.count, "net": 0.0} for one, found in drawn if found.count]
    runs = [run for row in comparison.rows for run in row.runs]
    figures = [part.figure for run in runs for part in student_parts(run)]
    title = energy_title(f"Energy per student minus {comparison.baseline}", unit, figures)
    return Figure(
        title="Break-even",
        spec=finish(
            moving(_chart(comparison, {one.label for one, _ in drawn}, title)),
            300,
            # with an invisible point each: a layer whose methods are all hidden would have no extent
            curves=[{"method": "", "n": 1, "net": 0.0, "breaks_even": True}, *curves],
            marks=[{"method": "", "n": 1, "net": 0.0}, *marks],
        ),
        description="Energy per student relative to the baseline against the number of students that share a teacher. "
        + " ".join(break_even_sentence(one) for one in answers),
        caption=_caption(comparison, answers),
        height=300,
        name="break-even",
    )


def _caption(comparison: Comparison, answers: list[RowBreakEven]) -> str:
    even = [f"{one.label} ({one.answer})" for one in answers if one.found and one.found.breaks_even]
    never = [one for one in answers if one.found and not one.found.breaks_even]
    dashed = [one.label for one in never if one.costs and one.costs.reach_equal_quality]
    worse = [one.label for one in never if one.label not in dashed]
    parts = [
        f"Energy of the student stages at equal quality, minus that of {comparison.baseline}, plus the teacher's "
        "energy divided by the students that share it, as the runs count energy."
    ]
    if even:
        parts.append(f"Break-even where a solid curve reaches 0, marked by a point: {listed(even)}.")
    if dashed:
        parts.append(f"Dashed, does not break even: {listed(dashed)}.")
    if worse:
        parts.append(f"Not drawn, because its students never reach the baseline's quality: {listed(worse)}.")
    return " ".join([*parts, "The vertical line is the number of students selected above."])


def _chart(comparison: Comparison, labels: set[str], title: str) -> Any:
    every, hues, _ = label_scales([row.label for row in comparison.rows])
    pairs = [(label, hue) for label, hue in zip(every, hues, strict=True) if label in labels]
    scale = alt.Scale(domain=[label for label, _ in pairs], range=[hue for _, hue in pairs])
    color = alt.Color("method:N", title="Method", scale=scale)
    x = alt.X("n:Q", title="Students that share the teacher", scale=alt.Scale(type="log", nice=False))
    y = alt.Y("net:Q", title=title)
    shown = "indexof(hidden, datum.method) < 0"
    lines = (
        alt.Chart(alt.NamedData("curves"))
        .transform_filter(shown)
        .mark_line(strokeWidth=2, interpolate="monotone")
        .encode(
            x=x,
            y=y,
            color=color,
            strokeDash=alt.condition("datum.breaks_even", alt.value([1, 0]), alt.value([6, 4])),
            tooltip=["method:N", alt.Tooltip("n:Q", title="students"), alt.Tooltip("net:Q", format=".3g")],
        )
    )
    points = (
        alt.Chart(alt.NamedData("marks")).transform_filter(shown).mark_point(filled=True, size=90)
        .encode(
            x="n:Q",
            y="net:Q",
            color=color,
            opacity=alt.condition("datum.method == ''", alt.value(0), alt.value(1)),
            tooltip=["method:N", alt.Tooltip("n:Q", format=".3g")],
        )
    )  # fmt: skip
    zero = alt.Chart(alt.Data(values=[{"net": 0}])).mark_rule(color=GRAY).encode(y="net:Q")
    chosen = (
        alt.Chart(alt.Data(values=[{"most": _MOST_STUDENTS}]))
        .transform_calculate(n="min(students, datum.most)")
        .mark_rule(strokeDash=[2, 3])
        .encode(x="n:Q")
    )
    return alt.layer(zero, lines, points, chosen)
