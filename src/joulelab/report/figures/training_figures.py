"""Time and energy of a step by phase, a sweep's energy and speed, and quality against the energy used so far."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from joulelab.report.compare.comparison import Comparison, Row
from joulelab.report.compare.method_rows import last_training, training_stage, training_stage_name
from joulelab.report.energy_sums import parts_of, run_energy
from joulelab.report.figures.chart_base import (
    FOLDED_AXIS,
    HUES,
    Figure,
    bounds_caption,
    energy_unit,
    finish,
    folded,
    label_scales,
    moving,
    value_scale,
    with_bounds,
)
from joulelab.report.figures.power_figures import AttemptTrace
from joulelab.report.tables.sweep_table import Sweep, SweepRow, interval_text, item_energy_text
from joulelab.report.tables.training_table import phase_joules, phase_times
from joulelab.runs.paths import RunPaths, read_metrics
from joulelab.runs.record import MEASURED_COMPONENTS, RunRecord, Segment, StageRole
from joulelab.stats import Interval
from joulelab.units import energy_text, three_digits

_PHASES = ("input", "forward", "backward", "optimizer_step")
_ROW_HEIGHT = 44


def phase_figures(comparison: Comparison) -> tuple[Figure, ...]:
    found = (
        _figure(comparison, "Energy of a step by phase", "J per step", _joules, 1.0, "phases-joules"),
        _figure(comparison, "Time of a step by phase", "ms per step", _seconds, 1000.0, "phases-time"),
    )
    return tuple(figure for figure in found if figure)


def _joules(record: RunRecord) -> dict[str, float]:
    return {name: float(row["energy_j"]) for name, row in phase_joules(record, training_stage_name(record)).items()}


def _seconds(record: RunRecord) -> dict[str, float]:
    """From a tracker if there was one; else from the phase marks of the training loop."""
    found = phase_times(record, training_stage_name(record))
    if found:
        return found
    stage = training_stage(record)
    phases = stage.phases if stage else {}
    steps = phases["optimizer_step"].count if "optimizer_step" in phases else 0
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


_MOST_POINTS = 200
_HELD_OUT = "held_out_loss"
_ROLES: tuple[StageRole, ...] = ("student", "teacher")

Point = dict[str, Any]


def curve_points(record: RunRecord, folder: Path, traces: Sequence[AttemptTrace]) -> list[Point]:
    """A point per line of metrics: energy so far, and every number of the line.

    Energy counts from the first stage that is not an idle baseline. It includes inherited energy and excludes setup,
    repeated work and the teacher's work that students share, which one of several seeds did for all. Runs on several
    hosts have no points, because metrics do not state the host of their clock; neither have runs that would add
    estimates to measurements.
    """
    if len({placed.host for placed in traces}) != 1 or not RunPaths(folder).metrics.exists():
        return []
    if run_energy(record).mixed_without:
        return []
    lines = [line for line in read_metrics(RunPaths(folder).metrics) if line.get("mono_ns") and line.get("stage")]
    step = max(1, len(lines) // _MOST_POINTS)
    validations = {stage.name for stage in record.stages if stage.activity in ("validate", "evaluate")}
    trainings = {stage.name for role in _ROLES if (stage := last_training(record, role))}
    kept = [line for place, line in enumerate(lines) if place % step == 0 or line["stage"] in validations]
    so_far = _EnergySoFar(record, traces)
    points = []
    for line in kept:
        if (joules := so_far.at(line)) is not None:
            stage = line["stage"]
            kind = "validation" if stage in validations else "training" if stage in trainings else None
            points.append({"joules": joules, "run": record.run_id, **_numbers(line), "kind": kind, "stage": stage})
    return points


def _numbers(line: dict[str, Any]) -> Point:
    passed = ("mono_ns", "attempt", "timestamp")
    return {k: v for k, v in line.items() if k not in passed and isinstance(v, int | float)}


class _EnergySoFar:
    """Energy of a run up to a line of metrics, over its attempts."""

    def __init__(self, record: RunRecord, traces: Sequence[AttemptTrace]) -> None:
        estimated = record.totals is not None and record.totals.best.method == "estimated"
        self._components = ("cpu_estimate",) if estimated else MEASURED_COMPONENTS
        self._traces = {placed.attempt: placed for placed in traces}
        inherited = run_energy(record).inherited_unshared
        self._inherited_j = (inherited.energy_j or 0.0) if inherited else 0.0
        self._teacher_stages = {stage.name for stage in record.stages if stage.role == "teacher"}
        stages = [stage for stage in record.stages if not stage.outside_totals]
        self._apart = [segment for stage in stages if not stage.is_method_work for segment in stage.segments]
        shared = {part.stage for part in parts_of(record) if part.shared and not part.inherited}
        self._shared = [segment for stage in stages if stage.name in shared for segment in stage.segments]
        self._starts: dict[int, int] = {}
        for stage in record.stages:
            for segment in stage.segments if not stage.outside_totals else ():
                known = self._starts.get(segment.attempt, segment.start_ns)
                self._starts[segment.attempt] = min(known, segment.start_ns)
        self._before: dict[int, float] = {}
        spent_j = 0.0
        for attempt in sorted(self._starts):
            self._before[attempt] = spent_j
            if attempt in self._traces:
                spent_j += self._since_start(attempt, self._traces[attempt].trace.last_ns)

    def at(self, line: dict[str, Any]) -> float | None:
        attempt = int(line.get("attempt") or 1)
        if attempt not in self._starts or attempt not in self._traces:
            return None
        until_ns = int(line["mono_ns"])
        so_far_j = self._before[attempt] + self._since_start(attempt, until_ns)
        so_far_j -= self._spent_in(self._apart, attempt, until_ns)
        if line["stage"] not in self._teacher_stages:
            so_far_j += self._inherited_j - self._spent_in(self._shared, attempt, until_ns)
        return float(f"{so_far_j:.5g}")

    def _since_start(self, attempt: int, until_ns: int) -> float:
        return self._between(attempt, self._starts[attempt], until_ns)

    def _spent_in(self, segments: Sequence[Segment], attempt: int, until_ns: int) -> float:
        known = [segment for segment in segments if segment.attempt in self._traces]
        before = [s for s in known if s.attempt < attempt or (s.attempt == attempt and s.start_ns < until_ns)]
        ends = [min(s.end_ns, until_ns) if s.attempt == attempt else s.end_ns for s in before]
        return sum(self._between(s.attempt, s.start_ns, end_ns) for s, end_ns in zip(before, ends, strict=True))

    def _between(self, attempt: int, start_ns: int, end_ns: int) -> float:
        devices = [d for d in self._traces[attempt].trace.devices if d.component in self._components and d.counted]
        paths = [path for device in devices if (path := device.best_path)]
        return sum(path.joules([(start_ns, end_ns)]) for path in paths)


def quality_over_joules(comparison: Comparison, points: Sequence[Point]) -> Figure | None:
    """By validation during training if runs have it; else by training loss."""
    found = _chosen(comparison, points)
    if found is None:
        return None
    key, title, chosen = found
    labels = {run.record.run_id: (row.label, run.seed) for row in comparison.rows for run in row.runs}
    shown = [point for point in chosen if point["run"] in labels and point["joules"]]
    if len({point["joules"] for point in shown}) < 2:
        return None
    factor, unit = energy_unit([point["joules"] for point in shown])
    times = 100 if comparison.measure and comparison.measure.percent and key == comparison.measure.name else 1
    values = [
        {
            "method": labels[point["run"]][0],
            "run": f"{labels[point['run']][0]}, seed {labels[point['run']][1]}",
            "energy": float(f"{point['joules'] / factor:.5g}"),
            "value": float(f"{times * point[key]:.5g}"),
            "step": point.get("step"),
            "joules": energy_text(point["joules"]),
        }
        for point in shown
    ]
    domain, colors, shapes = label_scales([row.label for row in comparison.rows])
    base = (
        alt.Chart(alt.NamedData("evaluations"))
        .transform_filter("indexof(hidden, datum.method) < 0")
        .encode(
            x=alt.X("energy:Q", title=f"Energy so far ({unit})", scale=alt.Scale(type="linear", zero=True)),
            y=alt.Y("value:Q", title=title, scale=value_scale([times * point[key] for point in shown])),
            color=alt.Color("method:N", title="Method", scale=alt.Scale(domain=domain, range=colors)),
            detail="run:N",
            tooltip=["run:N", "step:Q", "joules:N", alt.Tooltip("value:Q", title=title)],
        )
    )
    marks = alt.Shape("method:N", title="Method", scale=alt.Scale(domain=domain, range=shapes))
    few = len(values) <= 40 * len({value["run"] for value in values})
    layers = [base.mark_line(strokeWidth=1.6, opacity=0.8)]
    if few:
        layers.append(base.mark_point(filled=True, size=45, opacity=0.9).encode(shape=marks))
    return Figure(
        title=f"{title} over energy",
        spec=finish(moving(alt.layer(*layers)), 280, evaluations=values),
        description=f"{title} against the energy that the run had used by then, one line per run of "
        + ", ".join(dict.fromkeys(labels[point["run"]][0] for point in shown))
        + ".",
        caption="Energy up to that point, with inherited energy and without the work that students share. "
        "Compare vertically for equal energy, horizontally for equal quality.",
        height=280,
        name="quality-over-joules",
        log_axis="x",
    )


def loss_of_run(record: RunRecord, folder: Path, points: Sequence[Point]) -> Figure | None:
    """Training and held-out loss of one run, also while it is running, against the energy used so far; against steps
    where that energy is not known (several hosts)."""
    by_energy = any(point["joules"] for point in points)
    lines = points if by_energy else _thinned_metrics(folder)
    factor, unit = energy_unit([point["joules"] for point in points]) if by_energy else (1.0, "")
    values = [
        {
            "x": float(f"{line['joules'] / factor:.5g}") if by_energy else line["step"],
            "loss": float(f"{line[key]:.5g}"),
            "line": f"{line['stage']}{', held out' if key == _HELD_OUT else ''}",
            "step": line.get("step"),
        }
        for line in lines
        for key in ("loss", _HELD_OUT)
        if isinstance(line.get(key), int | float) and math.isfinite(line[key])
    ]
    if len({value["x"] for value in values}) < 2:
        return None
    domain, colors, _ = label_scales(str(value["line"]) for value in values)
    x_title = f"Energy so far ({unit})" if by_energy else "Step"
    base = alt.Chart(alt.NamedData("losses")).encode(
        x=alt.X("x:Q", title=x_title, scale=alt.Scale(zero=by_energy)),
        y=alt.Y("loss:Q", title="Loss", scale=alt.Scale(zero=False)),
        color=alt.Color("line:N", title="Stage", scale=alt.Scale(domain=domain, range=colors)),
        tooltip=["line:N", "step:Q", alt.Tooltip("loss:Q", format=".4f"), alt.Tooltip("x:Q", title=x_title)],
    )
    chart = alt.layer(base.mark_line(strokeWidth=1.6), base.mark_point(filled=True, size=25))
    return Figure(
        title="Loss over energy" if by_energy else "Loss over steps",
        spec=finish(chart, 240, losses=values),
        description=f"Loss of {record.label}: {values[-1]['loss']:.4g} in the last of {len(values)} points.",
        caption="Energy up to that point, with inherited energy; a student's without the work that students share."
        if by_energy
        else "",
        height=240,
        name="loss",
    )


def _thinned_metrics(folder: Path) -> list[Point]:
    path = RunPaths(folder).metrics
    lines = [line for line in read_metrics(path) if line.get("stage") and line.get("step") is not None]
    return lines[:: max(1, len(lines) // _MOST_POINTS)]


def _chosen(comparison: Comparison, points: Sequence[Point]) -> tuple[str, str, list[Point]] | None:
    validated = [point for point in points if point["kind"] == "validation"]
    measure = comparison.measure
    if measure and (shown := [point for point in validated if measure.name in point]):
        return measure.name, f"Validation: {measure.axis}", shown
    if shown := [point for point in validated if _HELD_OUT in point]:
        return _HELD_OUT, "Held-out loss", shown
    trained = [point for point in points if point["kind"] == "training" and "loss" in point]
    if not trained:
        return None
    # if objectives differ, only their common part can be compared
    shared = all("loss.ce" in point or "loss.kl" not in point for point in trained)
    if any("loss.ce" in point for point in trained) and shared:
        shown = [{**point, "loss.ce": point.get("loss.ce", point["loss"])} for point in trained]
        return "loss.ce", "Training loss on the labels", shown
    return "loss", "Training loss", trained
