"""Vega-Lite figures of a comparison: what quality costs, and where the joules went.

Specs are plain dicts, drawn as wide as the box they stand in.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from joulelab.meter.figures import EnergyFigure
from joulelab.report.compare import ComparedRun, Comparison, Row
from joulelab.report.losses import LOSS_TITLE
from joulelab.report.palette import label_scales, stage_scale
from joulelab.runs.record import RunRecord
from joulelab.units import energy_text

Spec = dict[str, Any]
# Above this spread a linear axis presses the cheap runs against its zero.
_LOG_ABOVE = 30.0
_UNITS = ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"))
_BAR_HEIGHT = 52


@dataclass(frozen=True)
class Figure:
    """A figure for the page: its spec, what it shows in words, and the height its place is kept at."""

    title: str
    spec: Spec
    description: str
    caption: str
    height: int


def finish(chart: Any, height: int) -> Spec:
    """As wide as the box it stands in; the height is fixed, so that the page does not jump while it draws."""
    spec: Spec = chart.properties(
        width="container", height=height, autosize=alt.AutoSizeParams(type="fit-x", contains="padding")
    ).to_dict()
    # the page brings one version of the library along: a version in the spec could only cause a complaint
    spec.pop("$schema", None)
    return spec


def energy_unit(energies_j: Iterable[float]) -> tuple[float, str]:
    top = max(energies_j, default=0.0)
    return next(((factor, unit) for factor, unit in _UNITS if top >= factor), (1.0, "J"))


def energy_title(opening: str, unit: str, figures: Iterable[EnergyFigure]) -> str:
    """An axis that shows an estimate says so."""
    methods = {figure.method for figure in figures if figure.energy_j is not None}
    word = ", estimated" if methods == {"estimated"} else ", partly estimated" if "estimated" in methods else ""
    return f"{opening} ({unit}{word})"


def quality_against_energy(comparison: Comparison) -> Figure | None:
    runs = [(row, run) for row in comparison.rows for run in row.runs if run.joules.with_teacher.energy_j]
    if not runs:
        return None
    figures = [run.joules.with_teacher for _, run in runs]
    energies = [figure.energy_j or 0.0 for figure in figures]
    factor, unit = energy_unit(energies)
    loss = comparison.is_about_loss
    values = [_point(row, run, factor, 1 if loss else 100) for row, run in runs]
    quality = LOSS_TITLE if loss else "Test accuracy (%)"
    chart = _quality_layers(
        values, energy_title("Energy per run", unit, figures), quality, [row.label for row in comparison.rows]
    )
    described = [
        f"{row.label}: {f'{row.accuracy:.3f} nats' if loss else f'{100 * row.accuracy:.1f} %'} "
        f"for {energy_text(row.with_teacher.energy_j)}"
        for row, _ in runs
    ]
    return Figure(
        title="Quality against energy",
        spec=finish(chart, 320),
        description=f"{'Validation loss' if loss else 'Test accuracy'} against joules, teacher included. "
        + "; ".join(dict.fromkeys(described))
        + ".",
        caption="One mark per run. Filled: teacher included; hollow: the run's own stages; the thin line between "
        f"them is what it inherited.{'' if loss else ' Bars: 95 % interval on the test set.'}",
        height=320,
    )


def _point(row: Row, run: ComparedRun, factor: float, times: int) -> dict[str, Any]:
    interval = run.interval
    share = run.accuracy.value
    return {
        "method": row.label,
        "run": f"{row.label}, seed {run.seed}",
        "accuracy": round(times * share, 3),
        "low": round(times * (interval.low if interval else share), 3),
        "high": round(times * (interval.high if interval else share), 3),
        "own": _scaled(run.joules.own, factor),
        "total": _scaled(run.joules.with_teacher, factor),
        "own energy": energy_text(run.joules.own.energy_j),
        "teacher included": energy_text(run.joules.with_teacher.energy_j),
    }


def _scaled(figure: EnergyFigure, factor: float) -> float:
    return float(f"{(figure.energy_j or 0.0) / factor:.5g}")


def _quality_layers(values: list[dict[str, Any]], title: str, quality: str, labels: list[str]) -> Any:
    domain, colours, shapes = label_scales(labels)
    spread = [value[key] for value in values for key in ("own", "total") if value[key] > 0]
    log = max(spread) > _LOG_ABOVE * min(spread)
    scale = alt.Scale(type="log", nice=False, padding=16) if log else alt.Scale(zero=True, nice=True)
    y_scale = alt.Scale(zero=False, padding=8)
    # the faintest layer would otherwise lend its opacity to the legend
    solid = alt.Legend(symbolOpacity=1)
    base = alt.Chart(alt.Data(values=values)).encode(
        y=alt.Y("accuracy:Q", title=quality, scale=y_scale),
        color=alt.Color("method:N", title="Method", scale=alt.Scale(domain=domain, range=colours), legend=solid),
        tooltip=["run:N", "accuracy:Q", "own energy:N", "teacher included:N"],
    )
    shape = alt.Shape("method:N", title="Method", scale=alt.Scale(domain=domain, range=shapes), legend=solid)
    x = alt.X("total:Q", title=title, scale=scale)
    inherited = base.mark_rule(opacity=0.35, strokeWidth=1).encode(x=x, x2="own:Q")
    interval = base.mark_rule(opacity=0.55, strokeWidth=2).encode(x=x, y="low:Q", y2="high:Q")
    own = base.mark_point(filled=False, size=70, strokeWidth=1.5).encode(x=alt.X("own:Q", title=title), shape=shape)
    full = base.mark_point(filled=True, size=110, opacity=1).encode(x=x, shape=shape)
    return alt.layer(inherited, interval, own, full)


def stages_by_method(comparison: Comparison, stages: Sequence[str]) -> Figure | None:
    parts = [(row, stage.name, stage.inherited, stage.figure) for row in comparison.rows for stage in row.stages]
    known = [part for part in parts if part[3].energy_j is not None]
    if not known:
        return None
    factor, unit = energy_unit([row.with_teacher.energy_j or 0.0 for row in comparison.rows])
    values = [_bar(row.label, name, inherited, figure, factor) for row, name, inherited, figure in known]
    title = energy_title("Mean energy per run", unit, [figure for *_, figure in known])
    height = _BAR_HEIGHT * len(comparison.rows)
    described = [f"{row.label} {energy_text(row.with_teacher.energy_j)}" for row in comparison.rows]
    return Figure(
        title="Where the joules went",
        spec=finish(_stacked(values, title, stages), height),
        description="Joules by stage, stacked for each method: " + "; ".join(described) + ".",
        caption="Muted parts with a dashed edge were inherited: another run paid for them, "
        "and each method's bill has them once.",
        height=height,
    )


def stages_of_run(record: RunRecord, stages: Sequence[str]) -> Figure | None:
    """The same bars for a single run: one bar for each stage."""
    known = [stage for stage in record.stages if stage.best.energy_j is not None and not stage.outside_totals]
    if not known:
        return None
    figures = [stage.best for stage in known]
    factor, unit = energy_unit([figure.energy_j or 0.0 for figure in figures])
    values = [_bar(stage.name, stage.name, False, stage.best, factor) for stage in known]
    height = 34 * len(known) + 20
    described = [f"{stage.name} {energy_text(stage.best.energy_j)}" for stage in known]
    chart = _stacked(values, energy_title("Energy", unit, figures), stages, legend=False)
    return Figure(
        "Where the joules went", finish(chart, height), "Joules by stage: " + "; ".join(described), "", height
    )


def _bar(row: str, stage: str, inherited: bool, figure: EnergyFigure, factor: float) -> dict[str, Any]:
    return {
        "row": "\n".join(textwrap.wrap(row, 16)),
        "method": row,
        "stage": stage,
        "paid": "inherited" if inherited else "own",
        "energy": _scaled(figure, factor),
        "joules": energy_text(figure.energy_j),
    }


def _stacked(values: list[dict[str, Any]], title: str, stages: Sequence[str], legend: bool = True) -> Any:
    domain, colours = stage_scale([*stages, *(value["stage"] for value in values)])
    used = {value["stage"] for value in values}
    pairs = [(stage, colour) for stage, colour in zip(domain, colours, strict=True) if stage in used]
    order = {stage: place for place, (stage, _) in enumerate(pairs)}
    rows = list(dict.fromkeys(value["row"] for value in values))
    values = [
        {**value, "place": order[value["stage"]] + (0 if value["paid"] == "inherited" else 100)} for value in values
    ]
    inherited = "datum.paid == 'inherited'"
    shown = alt.Legend() if legend else None
    scale = alt.Scale(domain=[stage for stage, _ in pairs], range=[colour for _, colour in pairs])
    return (
        alt.Chart(alt.Data(values=values))
        .mark_bar(cornerRadius=1)
        .encode(
            y=alt.Y("row:N", title=None, sort=rows, axis=alt.Axis(labelExpr="split(datum.label, '\\n')", ticks=False)),
            x=alt.X("energy:Q", title=title, stack="zero"),
            fill=alt.Fill("stage:N", title="Stage", scale=scale, legend=shown),
            order=alt.Order("place:Q"),
            fillOpacity=alt.condition(inherited, alt.value(0.45), alt.value(1)),
            stroke=alt.Stroke("stage:N", title="Stage", scale=scale, legend=shown),
            strokeDash=alt.condition(inherited, alt.value([4, 3]), alt.value([1, 0])),
            tooltip=["method:N", "stage:N", "paid:N", "joules:N"],
        )
    )
