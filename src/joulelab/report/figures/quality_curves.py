"""Quality against the energy used so far, from a run's metrics and trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from joulelab.meter.trace import read_lines
from joulelab.report.compare.comparison import Comparison
from joulelab.report.compare.method_rows import last_training
from joulelab.report.energy_sums import run_energy
from joulelab.report.figures.chart_base import Figure, energy_unit, finish, label_scales, moving, value_scale
from joulelab.report.figures.power_figures import AttemptTrace
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import MEASURED_COMPONENTS, RunRecord, Segment, StageRole
from joulelab.units import energy_text

_MOST_POINTS = 200
_HELD_OUT = "held_out_loss"
_ROLES: tuple[StageRole, ...] = ("student", "teacher")

Point = dict[str, Any]


def curve_points(record: RunRecord, folder: Path, traces: Sequence[AttemptTrace]) -> list[Point]:
    """A point per line of metrics: energy so far, and every number of the line.

    Energy counts from the first stage that is not an idle baseline. It includes inherited energy and excludes setup,
    repeated work and the teacher's work, which one of several seeds did for all. Runs on several hosts have no points,
    because metrics do not state the host of their clock; neither have runs that would add estimates to measurements.
    """
    if len({placed.host for placed in traces}) != 1 or not RunPaths(folder).metrics.exists():
        return []
    if run_energy(record).mixed_without:
        return []
    lines = [line for line in read_lines(RunPaths(folder).metrics) if "mono_ns" in line and "stage" in line]
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
            points.append({"joules": joules, "run": record.run_id, **_numbers(line), "kind": kind})
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
        inherited = run_energy(record).inherited_but_teacher
        self._inherited_j = (inherited.energy_j or 0.0) if inherited else 0.0
        self._teacher_stages = {stage.name for stage in record.stages if stage.role == "teacher"}
        stages = [stage for stage in record.stages if not stage.outside_totals]
        self._apart = [segment for stage in stages if not stage.is_method_work for segment in stage.segments]
        teaching = [stage for stage in stages if stage.is_method_work and stage.role == "teacher"]
        self._teaching = [segment for stage in teaching for segment in stage.segments]
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
        attempt = int(line.get("attempt", 1))
        if attempt not in self._starts or attempt not in self._traces:
            return None
        until_ns = int(line["mono_ns"])
        so_far_j = self._before[attempt] + self._since_start(attempt, until_ns)
        so_far_j -= self._spent_in(self._apart, attempt, until_ns)
        if line["stage"] not in self._teacher_stages:
            so_far_j += self._inherited_j - self._spent_in(self._teaching, attempt, until_ns)
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
        return sum(path.energy([(start_ns, end_ns)])[0] for path in paths)


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
        caption="Energy up to that point, with inherited energy and without the teacher's work. "
        "Compare vertically for equal energy, horizontally for equal quality.",
        height=280,
        name="quality-over-joules",
        log_axis="x",
    )


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
