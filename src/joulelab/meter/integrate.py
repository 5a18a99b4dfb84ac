"""Joules of a window from the trace: pure functions, so any old run can be recomputed by a later version.

A counter gives the energy of a window as the difference of two interpolated readings. It goes on counting while nobody
reads it, so only the two edges are uncertain: where an edge falls between two readings, the 20 ms samples tell how the
energy between them was spread; without samples it is taken as even, and the interval says how wrong that can be. Where
there is no counter, power is integrated by the trapezoid rule and every hole in it lowers the coverage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulelab.clock import NS
from joulelab.meter.figures import EnergyFigure, missing, total
from joulelab.meter.series import Array, DeviceSeries, Trace
from joulelab.stats import Z95

# The 20 ms samples lag the truth by 20 to 40 ms (measured on an H200): an edge placed by them is that uncertain.
SAMPLE_LAG_S = 0.04
# Polled power further apart than this many usual steps has a hole in it.
HOLE_FACTOR = 3.0
COMPONENTS = ("gpu", "cpu", "dram", "cpu_estimate")

Window = tuple[int, int]


@dataclass(frozen=True)
class PowerSummary:
    mean_w: float | None
    peak_w: float | None


def component_energy(trace: Trace, component: str, windows: Sequence[Window]) -> EnergyFigure:
    """One component's joules over disjoint windows: the sum over its counted devices."""
    devices = [series for series in trace.devices if series.component == component and series.counted]
    if devices:
        return total(device_energy(series, windows) for series in devices)
    for gone in trace.missing:
        if gone.component == component:
            return missing(gone.reason, gone.fix or None)
    return missing("no sensor for it was found", None)


def device_energy(series: DeviceSeries, windows: Sequence[Window]) -> EnergyFigure:
    if not windows:
        return missing("the stage never ran")
    durations = [(end - start) / NS for start, end in windows]
    return total((window_energy(series, window) for window in windows), durations)


def window_energy(series: DeviceSeries, window: Window) -> EnergyFigure:
    if len(series.counter_ns) >= 2:
        return counter_energy(series, window)
    return integrated_energy(series, window)


def counter_energy(series: DeviceSeries, window: Window) -> EnergyFigure:
    start, end = window
    inside = (max(start, int(series.counter_ns[0])), min(end, int(series.counter_ns[-1])))
    if inside[1] <= inside[0]:
        return missing("the trace has no reading in this window")
    edges = [_energy_at(series, stamp) for stamp in inside]
    latch_j = series.refresh_s / math.sqrt(6) * _mean_power(series, inside)
    return EnergyFigure(
        energy_j=edges[1][0] - edges[0][0],
        method="estimated" if series.component == "cpu_estimate" else "counter",
        coverage=min(1.0, (inside[1] - inside[0]) / (end - start)),
        half_width_j=math.sqrt(edges[0][1] ** 2 + edges[1][1] ** 2 + (Z95 * latch_j) ** 2),
        gain_error_rel=series.gain_error_rel,
        sources=(series.device,),
    )


def _mean_power(series: DeviceSeries, window: Window) -> float:
    energy = np.interp(np.array(window, dtype=float), series.counter_ns.astype(float), series.counter_j)
    return float(energy[1] - energy[0]) / max((window[1] - window[0]) / NS, 1e-9)


def _energy_at(series: DeviceSeries, stamp: int) -> tuple[float, float]:
    """The counter's value at a moment between two readings, and the 95 % half-width of that placement."""
    right = int(np.clip(np.searchsorted(series.counter_ns, stamp), 1, len(series.counter_ns) - 1))
    before, after = int(series.counter_ns[right - 1]), int(series.counter_ns[right])
    base, step = float(series.counter_j[right - 1]), float(series.counter_j[right] - series.counter_j[right - 1])
    if stamp in (before, after) or after <= before:
        return (base + step if stamp >= after else base), 0.0
    shape = _share_by_samples(series, before, after, stamp)
    if shape is not None:
        share, local_w = shape
        return base + share * step, local_w * SAMPLE_LAG_S
    share = (stamp - before) / (after - before)
    return base + share * step, min(share, 1 - share) * step


def _share_by_samples(series: DeviceSeries, before: int, after: int, stamp: int) -> tuple[float, float] | None:
    """Which share of the energy between two readings lay before `stamp`, by the 20 ms samples; None without them."""
    first, last = np.searchsorted(series.samples_ns, [before, after])
    if last - first < 3 or (after - before) / (last - first) > 0.1 * NS:
        return None
    times = np.concatenate([[before], series.samples_ns[first:last], [after]]).astype(float)
    watts = np.concatenate([[series.samples_w[first]], series.samples_w[first:last], [series.samples_w[last - 1]]])
    cumulative = np.concatenate([[0.0], np.cumsum((watts[1:] + watts[:-1]) / 2 * np.diff(times))])
    if cumulative[-1] <= 0:
        return None
    share = float(np.interp(float(stamp), times, cumulative) / cumulative[-1])
    return share, float(np.interp(float(stamp), times, watts))


def integrated_energy(series: DeviceSeries, window: Window) -> EnergyFigure:
    times, watts = (
        (series.samples_ns, series.samples_w) if len(series.samples_ns) > 1 else (series.power_ns, series.power_w)
    )
    start, end = window
    if len(times) < 2 or end <= times[0] or start >= times[-1]:
        return missing("the trace has no reading in this window")
    inner = (times > max(start, int(times[0]))) & (times < min(end, int(times[-1])))
    edges = np.clip(np.array([start, end]), times[0], times[-1])
    t = np.concatenate([edges[:1], times[inner], edges[1:]]).astype(float) / NS
    w = np.interp(t, times.astype(float) / NS, watts)
    steps = np.diff(t)
    seen = steps <= HOLE_FACTOR * float(np.median(np.diff(times))) / NS
    energy_j = float(((w[1:] + w[:-1]) / 2 * steps)[seen].sum())
    seen_s = float(steps[seen].sum())
    spread_w = float(watts[inner].std(ddof=1)) if inner.sum() > 1 else float(abs(w[-1] - w[0]))
    return EnergyFigure(
        energy_j=energy_j,
        method="integrated",
        coverage=min(1.0, seen_s / ((end - start) / NS)),
        half_width_j=Z95 * spread_w * seen_s / math.sqrt(max(1, int(inner.sum()))),
        gain_error_rel=series.gain_error_rel,
        sources=(series.device,),
    )


def power_curve(series: DeviceSeries) -> tuple[Array, Array]:
    """Power over time as finely as the trace knows it: 20 ms samples, polled power, or the counter's slope."""
    if len(series.samples_ns) > 1:
        return series.samples_ns, series.samples_w
    if len(series.power_ns) > 1:
        return series.power_ns, series.power_w
    if len(series.counter_ns) < 2:
        return np.array([], dtype=np.int64), np.array([])
    steps_s = np.maximum(np.diff(series.counter_ns) / NS, 1e-9)
    middle = (series.counter_ns[1:] + series.counter_ns[:-1]) // 2
    return middle, np.diff(series.counter_j) / steps_s


def peak_power_w(trace: Trace, component: str, windows: Sequence[Window]) -> float | None:
    """Sum of the devices' own peaks within the windows: an upper bound of the component's peak."""
    peaks = []
    for series in trace.devices:
        if series.component != component or not series.counted:
            continue
        times, watts = power_curve(series)
        inside = np.zeros(len(times), dtype=bool)
        for start, end in windows:
            inside |= (times >= start) & (times <= end)
        if inside.any():
            peaks.append(float(watts[inside].max()))
    return sum(peaks) if peaks else None
