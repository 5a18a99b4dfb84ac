"""The rules of the first release (method version 1), frozen, to recompute its records exactly for `unpack --verify`.

Do not improve anything here. A record of the first release is genuine if it equals the result of these rules for its
trace and marks, errors included; the result of current rules is shown as `newer method: X to Y`. The archives in
`tests/runs/first_release` test these rules. Only differences are here: the energy curve of a device, and how figures,
rates and grades follow from it. The rest is `assemble`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from joulelab.clock import NS
from joulelab.meter.curve import Bools, Floats, Readings, Stamps, cumulative
from joulelab.meter.figures import EnergyFigure, ErrorComponent, total
from joulelab.meter.grids import Co2e, co2e_of_range
from joulelab.meter.integrate import COMPONENTS, Window, device_energy
from joulelab.meter.series import Array, DeviceSeries
from joulelab.runs.artifacts import Ancestor
from joulelab.runs.assemble import OVERHEAD, Parts, assemble, peaks_w, stage_energy
from joulelab.runs.attempt_data import AttemptData, idle_baselines, load_attempts, seconds
from joulelab.runs.environment import read_snapshot
from joulelab.runs.measure.result import conclude
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import (
    Attempt,
    EnergyByComponent,
    Note,
    RunRecord,
    StageRecord,
    Totals,
    Validity,
    policy_components,
)
from joulelab.runs.validity import Evidence, check_interval, gather, grade, with_answer

SAMPLE_S = 0.02
SAMPLE_LAG_S = 0.01
SAMPLE_LAG_ERROR_S = 0.01
SAMPLE_SCALE = 0.99
SAMPLE_SCALE_ERROR = 0.02
SAMPLES_HOLE_S = 0.05
TREND_S = 5.0
HOLE_FACTOR = 3.0
NEIGHBORS = 3


def recompute(paths: RunPaths, record: RunRecord, resolve_energy: Callable[[Ancestor], Ancestor]) -> RunRecord:
    """The record as the first release computed it from the same trace and marks."""
    attempts: list[AttemptData] = [_Attempt.of(attempt) for attempt in load_attempts(paths)]
    assembled = assemble(paths, record.status, record.error, resolve_energy, attempts)
    environment = read_snapshot(paths)
    if assembled.totals is not None:
        assembled = _by_first_rules(assembled, assembled.totals, attempts, environment)
    return conclude(assembled, paths) if record.spec.get("pipeline") == "measure" else assembled


@dataclass(frozen=True, eq=False)
class _Curve:
    """A sequence of cells with constant power in each."""

    edges_s: Floats
    cell_j: Floats
    known: Bools
    origin_ns: int
    edge_error_j: Floats
    """Per cell: 95 % half-width of an edge in the middle of it."""
    even_error_j: Floats
    """Per cell: additional half-width that does not decrease toward the borders of the cell."""
    noise_j: float = 0.0
    """For windows of at least `TREND_S`; shorter ones get a proportional part."""
    scale_error_rel: float = 0.0

    def energy(self, windows: Sequence[Window]) -> tuple[float, tuple[ErrorComponent, ...], float]:
        """Energy, error and covered seconds; errors of several windows count as independent."""
        rows = [row for window in windows if (row := self._window(*window))[2] > 0]
        error = ErrorComponent(name="unspecified", joules=(math.hypot(*(row[1] for row in rows)),))
        return sum(row[0] for row in rows), (error,), sum(row[2] for row in rows)

    def _window(self, start_ns: int, end_ns: int) -> tuple[float, float, float]:
        start, end = ((stamp - self.origin_ns) / NS for stamp in (start_ns, end_ns))
        energy_j = float(np.diff(np.interp([start, end], self.edges_s, self._energy_j))[0])
        seen_s = float(np.diff(np.interp([start, end], self.edges_s, self._known_s))[0])
        trend_j = self.noise_j * min(1.0, (end - start) / TREND_S)
        scale_j = self.scale_error_rel * energy_j
        return energy_j, math.hypot(self._edge_j(start), self._edge_j(end), trend_j, scale_j), min(seen_s, end - start)

    @cached_property
    def _energy_j(self) -> Floats:
        return cumulative(self.cell_j)

    @cached_property
    def _known_s(self) -> Floats:
        return cumulative(np.where(self.known, np.diff(self.edges_s), 0.0))

    def _edge_j(self, moment_s: float) -> float:
        if not self.edges_s[0] < moment_s < self.edges_s[-1]:
            return 0.0
        cell = int(np.searchsorted(self.edges_s, moment_s, side="right")) - 1
        fraction = (moment_s - self.edges_s[cell]) / (self.edges_s[cell + 1] - self.edges_s[cell])
        middle_j = 2 * min(fraction, 1 - fraction) * float(self.edge_error_j[cell])
        return math.hypot(middle_j, float(self.even_error_j[cell]))


class _Series(DeviceSeries):
    """A device with the energy curves of the first release, which did not detect jumps of a counter."""

    @cached_property
    def readings(self) -> Readings | None:
        if len(self.counter_ns) < 2:
            return None
        rising = np.diff(self.counter_j) >= 0
        return Readings(self.counter_ns, self.counter_j, rising, np.zeros(len(rising) + 1), self.refresh_s)

    def _jumped(self, steps_s: Array, steps_j: Array) -> Array:
        return np.zeros(len(steps_j), dtype=bool)

    @cached_property
    def counter_path(self) -> _Curve | None:  # type: ignore[override]  # callers use `energy` only
        if len(self.counter_ns) < 2:
            return None
        edges = (self.counter_ns - self.counter_ns[0]) / NS - self.refresh_s / 2
        steps_s, steps_j = np.diff(edges), np.diff(self.counter_j)
        known = (steps_s <= (self.facts.get("max_gap_s") or math.inf)) & (steps_j >= 0)
        cell_j = np.where(known, steps_j, 0.0)
        latch_j = 1.96 * self.refresh_s / math.sqrt(12) * cell_j / np.maximum(steps_s, 1e-9)
        tick_j = self.refresh_s * self.facts["w_per_thread"] if self.component == "cpu_estimate" else 0.0
        return _Curve(edges, cell_j, known, int(self.counter_ns[0]), cell_j / 2, np.hypot(latch_j, tick_j))

    @cached_property
    def power_path(self) -> _Curve | None:  # type: ignore[override]
        if len(self.samples_ns) > 2:
            return _sampled(*_sample_cells(self.samples_ns, self.samples_w), int(self.samples_ns[0]))
        if len(self.power_ns) < 2:
            return None
        edges = (self.power_ns - self.power_ns[0]) / NS
        steps_s = np.diff(edges)
        usual_s = float(np.median(steps_s))
        known = steps_s <= HOLE_FACTOR * usual_s
        cell_j = np.where(known, (self.power_w[1:] + self.power_w[:-1]) / 2 * steps_s, 0.0)
        spread_j = 1.96 * float(np.std(self.power_w)) * math.sqrt(usual_s * TREND_S)
        return _Curve(edges, cell_j, known, int(self.power_ns[0]), cell_j / 2, np.zeros_like(cell_j), spread_j)

    @cached_property
    def best_path(self) -> _Curve | None:  # type: ignore[override]
        if self.counter_path is None or len(self.samples_ns) <= 2:
            return self.counter_path or self.power_path
        origin = int(self.samples_ns[0])
        edges, cell_j, known = _sample_cells(self.samples_ns, self.samples_w)
        read_s, counter_j = (self.counter_ns - origin) / NS - self.refresh_s / 2, self.counter_j
        edges, cell_j, known = _fill_holes(edges, cell_j, known, read_s, counter_j)
        inside = (read_s >= edges[0]) & (read_s <= edges[-1])
        read_s, counter_j = read_s[inside], counter_j[inside]
        if len(read_s) < 2:
            return _sampled(edges, cell_j, known, origin)
        scale, scale_error = _scale(edges, cell_j, read_s, counter_j, self.refresh_s)
        cell_j = cell_j * scale
        correction_j, noise_j = _slow_correction(edges, cell_j, read_s, counter_j)
        rising = np.concatenate([[False], np.diff(counter_j) >= 0, [False]])
        seen = known | rising[np.searchsorted(read_s, (edges[1:] + edges[:-1]) / 2)]
        cell_j = np.where(seen, cell_j + np.diff(correction_j), 0.0)
        return _sampled(edges, cell_j, seen, origin, noise_j, scale_error)


def _sample_cells(samples_ns: Stamps, samples_w: Floats) -> tuple[Floats, Floats, Bools]:
    """One cell per sample, and one for every gap between samples."""
    ends = (samples_ns - samples_ns[0]) / NS - SAMPLE_LAG_S
    gaps = np.diff(ends)
    holes = gaps > SAMPLES_HOLE_S
    widths = np.concatenate([[SAMPLE_S], np.where(holes, SAMPLE_S, gaps)])
    places = np.flatnonzero(holes) + 1
    edges = np.concatenate([[ends[0] - SAMPLE_S], np.insert(ends, places, ends[places] - SAMPLE_S)])
    cell_j = np.insert(samples_w * widths, places, 0.0)
    return edges, cell_j, np.insert(np.ones(len(ends), dtype=bool), places, False)


def _fill_holes(
    edges: Floats, cell_j: Floats, known: Bools, read_s: Floats, counter_j: Floats
) -> tuple[Floats, Floats, Bools]:
    if known.all() or len(read_s) < 2:
        return edges, cell_j, known
    place = np.clip(np.searchsorted(edges, read_s) - 1, 0, len(known) - 1)
    cuts = read_s[~known[place] & (read_s > edges[0]) & (read_s < edges[-1])]
    finer = np.unique(np.concatenate([edges, cuts]))
    old = np.clip(np.searchsorted(edges, (finer[1:] + finer[:-1]) / 2) - 1, 0, len(known) - 1)
    rises_j = np.maximum(np.diff(counter_j), 0.0)
    by_counter = np.diff(np.interp(finer, read_s, cumulative(rises_j))) / SAMPLE_SCALE
    return finer, np.where(known[old], cell_j[old], by_counter), known[old]


def _scale(edges: Floats, cell_j: Floats, read_s: Floats, counter_j: Floats, refresh_s: float) -> tuple[float, float]:
    """Ratio of counter to samples over the trace, shrunk to the typical ratio for short traces; and its error."""
    rises_j = np.diff(counter_j)
    rising = rises_j >= 0
    by_samples = float(_between(edges, cell_j, read_s)[rising].sum())
    by_counter = float(rises_j[rising].sum())
    length_s = max(float(np.diff(read_s)[rising].sum()), 1e-9)
    if by_samples <= 0 or by_counter <= 0:
        return SAMPLE_SCALE, 2 * SAMPLE_SCALE_ERROR
    error = refresh_s * math.sqrt((1 + int((~rising).sum())) / 6) / length_s
    weight = SAMPLE_SCALE_ERROR**2 / (SAMPLE_SCALE_ERROR**2 + error**2)
    scale = weight * by_counter / by_samples + (1 - weight) * SAMPLE_SCALE
    return scale, 1.96 * math.sqrt(1 - weight) * SAMPLE_SCALE_ERROR if length_s < TREND_S else 0.0


def _between(edges: Floats, cell_j: Floats, read_s: Floats) -> Floats:
    """Energy of the samples between successive readings of the counter."""
    return np.diff(np.interp(read_s, edges, cumulative(cell_j)))


def _slow_correction(edges: Floats, cell_j: Floats, read_s: Floats, counter_j: Floats) -> tuple[Floats, float]:
    """Counter minus samples, averaged over `TREND_S`, and its half-width."""
    rises_j, sampled_j = np.diff(counter_j), _between(edges, cell_j, read_s)
    rest = cumulative(np.where(rises_j >= 0, rises_j - sampled_j, 0.0))
    bins = max(1, round(float(read_s[-1] - read_s[0]) / TREND_S))
    number = np.minimum(((read_s - read_s[0]) / (read_s[-1] - read_s[0]) * bins).astype(int), bins - 1)
    filled = np.bincount(number, minlength=bins) > 0
    counts = np.maximum(np.bincount(number, minlength=bins), 1)
    centers = (np.bincount(number, read_s, bins) / counts)[filled]
    means = (np.bincount(number, rest, bins) / counts)[filled]
    jitter_j = float(np.std(rest - np.interp(read_s, centers, means))) if len(rest) > 2 else 0.0
    latch_j = 1.96 * math.sqrt(2) * jitter_j / math.sqrt(float(np.median(counts[filled])))
    drift_j = 1.96 * float(np.std(np.diff(means))) / math.sqrt(2) if len(means) > 2 else 0.0
    return np.interp(edges, centers, means), math.hypot(latch_j, drift_j)


def _sampled(
    edges: Floats,
    cell_j: Floats,
    known: Bools,
    origin_ns: int,
    noise_j: float = 0.0,
    scale_error: float = 2 * SAMPLE_SCALE_ERROR,
) -> _Curve:
    """An edge is uncertain by half a sample, and by the error of the lag times the change of power near it."""
    steps_s = np.diff(edges)
    watts = cell_j / np.maximum(steps_s, 1e-9)
    around = np.lib.stride_tricks.sliding_window_view(np.pad(watts, NEIGHBORS, mode="edge"), 2 * NEIGHBORS + 1)
    lag_j = SAMPLE_LAG_ERROR_S * (around.max(axis=1) - around.min(axis=1))
    half_j = np.minimum(np.abs(cell_j), SAMPLE_S * np.abs(watts)) / 2
    edge_error_j = np.where(steps_s > SAMPLES_HOLE_S, np.abs(cell_j) / 2, 0.0)
    return _Curve(edges, cell_j, known, origin_ns, edge_error_j, np.hypot(half_j, lag_j), noise_j, scale_error)


class _Attempt(AttemptData):
    @classmethod
    def of(cls, attempt: AttemptData) -> _Attempt:
        devices = tuple(_Series(**_fields(series)) for series in attempt.trace.devices)
        return cls(**{**_fields(attempt), "trace": replace(attempt.trace, devices=devices)})

    def energy(self, windows: list[Window]) -> EnergyByComponent:
        energy, figures = super().energy(windows), {}
        for name in COMPONENTS:
            devices = [series for series in self.trace.devices if series.component == name and series.counted]
            if devices:
                figure = _total([_device_figure(series, windows) for series in devices])
                figures[name] = figure.model_copy(update={"cpu_contention": getattr(energy, name).cpu_contention})
        return energy.model_copy(update=figures)


def _fields(value: Any) -> dict[str, Any]:
    return {item.name: getattr(value, item.name) for item in fields(value)}


def _device_figure(series: DeviceSeries, windows: Sequence[Window]) -> EnergyFigure:
    if not windows:
        return device_energy(series, windows)
    durations_s = [(end - start) / NS for start, end in windows]
    return _total([device_energy(series, [window]) for window in windows], durations_s)


def _total(figures: Sequence[EnergyFigure], weights: Sequence[float] | None = None) -> EnergyFigure:
    """Without durations all parts have the same weight in the coverage."""
    return _plain_figure(total(figures, weights or [1.0] * len(figures)))


def _plain_figure(figure: EnergyFigure) -> EnergyFigure:
    """Without error components and lower bounds, which were added later."""
    return figure.model_copy(update={"errors": (), "lower_bound": False})


def _plain(energy: EnergyByComponent) -> EnergyByComponent:
    names = EnergyByComponent.model_fields
    return energy.model_copy(update={name: _plain_figure(getattr(energy, name)) for name in names})


def _under_policy(energy: EnergyByComponent, policy: str) -> EnergyFigure:
    measured = [figure for name in policy_components(policy) if (figure := getattr(energy, name)).measured]
    return energy.under_policy(policy) if policy == "codecarbon" or not measured else _total(measured)


def _best(energy: EnergyByComponent, policy: str) -> EnergyFigure:
    figure, estimate = _under_policy(energy, policy), energy.cpu_estimate
    return figure if figure.energy_j is not None or estimate.energy_j is None else estimate


def _by_first_rules(record: RunRecord, totals: Totals, attempts: list[AttemptData], facts: dict[str, Any]) -> RunRecord:
    """Figures, rates and grades of an assembled record whose components have the first release's energy."""
    policy = record.policy
    baselines = idle_baselines(attempts, policy, lambda figure, whole_s: _ratio(figure.energy_j, whole_s))
    idle = tuple(baseline.model_copy(update={"before_load": True}) for baseline in baselines)
    idle_s = sum(baseline.duration_s for baseline in idle)
    idle_w = sum(baseline.power_w * baseline.duration_s for baseline in idle) / idle_s if idle_s else None

    def above_idle(figure: EnergyFigure, parts: Parts) -> dict[str, Any]:
        whole_s = sum(seconds(windows) for _, windows in parts)
        left_j = None if figure.energy_j is None or idle_w is None else figure.energy_j - idle_w * whole_s
        return {"above_idle": None, "above_idle_j": left_j}

    def by_stage(stage: StageRecord) -> StageRecord:
        parts = [(attempt, attempt.windows[stage.name]) for attempt in attempts if stage.name in attempt.windows]
        if stage.name == OVERHEAD:
            parts = [(attempt, attempt.overhead_windows) for attempt in attempts]
        energy = _plain(stage.energy)
        figure, best = _under_policy(energy, policy), _best(energy, policy)
        mean_w = _ratio(best.energy_j, stage.duration_s)
        counts = [attempt.events.counts.get(stage.name, {}) for attempt, _ in parts]
        samples, tokens = (
            max((count[what] for count in counts if count.get(what) is not None), default=None)
            for what in ("samples", "tokens")
        )
        changes = {
            "energy": energy,
            "best": best,
            "energy_j": figure.energy_j,
            **above_idle(figure, parts),
            "mean_power_w": mean_w,
            "peak_power_w": max((w for w in (*peaks_w(parts, best), mean_w) if w is not None), default=None),
            "samples": samples,
            "tokens": tokens,
            "item_energy": None,
            "j_per_sample": _ratio(best.energy_j, samples),
            "j_per_token": _ratio(best.energy_j, tokens),
            "samples_per_s": _ratio(samples, stage.duration_s),
            "tokens_per_s": _ratio(tokens, stage.duration_s),
            "co2e": _co2e(best, totals),
        }
        if record.status != "running":
            changes["validity"] = _grade(gather(stage.name, parts, best, policy, idle, facts))
        return stage.model_copy(update=changes)

    stages = tuple(map(by_stage, record.stages))

    def by_artifact(ancestor: Ancestor) -> Ancestor:
        if ancestor.key not in record.made:
            return ancestor
        energy = stage_energy([stage for stage in stages if stage.name in ancestor.stages])
        plain = {name: _plain_figure(figure) for name, figure in energy.items()}
        return ancestor.model_copy(
            update={"energy": plain, "work": {}, "setup": {}, "repeated": {}, "roles": (), "activities": ()}
        )

    def by_attempt(stated: Attempt, attempt: AttemptData) -> Attempt:
        figures = [_device_figure(one, attempt.billed_windows) for one in attempt.trace.devices if one.counted]
        pairs = zip(stated.devices, figures, strict=True)
        return stated.model_copy(
            update={"devices": tuple(device.model_copy(update={"figure": figure}) for device, figure in pairs)}
        )

    parts = [(attempt, attempt.billed_windows) for attempt in attempts]
    energy = _plain(totals.components)
    figure, best = _under_policy(energy, policy), _best(energy, policy)
    validity = record.validity
    if record.status != "running":
        repeats = [stage.best.energy_j for stage in stages if stage.repeat is not None and stage.status == "done"]
        evidence = gather(None, parts, best, policy, idle, facts)
        known = tuple(joules for joules in repeats if joules is not None)
        validity = _grade(replace(evidence, repeats_j=known), validity.notes)
    summed = {
        **{name: getattr(energy, name) for name in EnergyByComponent.model_fields},
        "energy_j": figure.energy_j,
        "figure": figure,
        "best": best,
        "idle": idle,
        "idle_power_w": idle_w,
        **above_idle(figure, parts),
        "co2e": _co2e(best, totals),
    }
    changes = {
        "method_version": 1,
        "attempts": tuple(map(by_attempt, record.attempts, attempts)),
        "stages": stages,
        "lineage": tuple(map(by_artifact, record.lineage)),
        "totals": totals.model_copy(update=summed),
        "validity": validity,
    }
    return record.model_copy(update=changes)


def _co2e(best: EnergyFigure, totals: Totals) -> Co2e | None:
    """Random interval and gain error were multiplied, both at their ends."""
    if best.energy_j is None:
        return None
    random_j, gain = best.half_width_j or 0.0, best.gain_error_rel or 0.0
    low, high = max(0.0, best.energy_j - random_j) * max(0.0, 1 - gain), (best.energy_j + random_j) * (1 + gain)
    return co2e_of_range((low, high), best.method, totals.grid, totals.pue)


def _grade(evidence: Evidence, notes: Sequence[Note] = ()) -> Validity:
    """The interval of a figure with missing time was graded by its width like any other."""
    covered = evidence.figure.model_copy(update={"coverage": 1.0})
    return with_answer(grade(evidence, notes), "interval", check_interval(replace(evidence, figure=covered)))


def _ratio(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None
