"""Energy of windows from a trace: pure functions, so that a later version can recompute any old run.

There are two independent paths: the counter, which keeps counting between readings, and the integral of sampled power.
`curve.py` combines them into the reported figure; `both_paths` computes them separately with their disagreement, which
reveals a broken sensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulelab.clock import NS
from joulelab.meter.curve import EnergyCurve
from joulelab.meter.figures import COVERED, MACHINE_BASE, EnergyFigure, Method, combined_half_width_j, missing, total
from joulelab.meter.series import Array, DeviceSeries, Trace

COMPONENTS = ("gpu", "cpu", "dram", "cpu_estimate")
NO_READING = "the trace has no reading in this window"

Window = tuple[int, int]


@dataclass(frozen=True)
class TwoPaths:
    """The same windows by counter alone and by sampled power alone."""

    counter: EnergyFigure
    integrated: EnergyFigure

    @property
    def disagreement_rel(self) -> float | None:
        """Integral over counter, minus 1; None where one path is missing."""
        if not self.counter.energy_j or self.integrated.energy_j is None:
            return None
        return self.integrated.energy_j / self.counter.energy_j - 1


def component_energy(trace: Trace, component: str, windows: Sequence[Window]) -> EnergyFigure:
    """Energy of one component over disjoint windows: the sum over its counted devices."""
    devices = [series for series in trace.devices if series.component == component and series.counted]
    if devices:
        return total(device_energy(series, windows) for series in devices)
    for unavailable in trace.missing:
        if unavailable.component == component:
            return missing(unavailable.reason, unavailable.fix or None)
    # A device that is read but not counted (RAPL of a shared node) has joules of other users: printing them as this
    # run's would be worse than printing none.
    uncounted = [series for series in trace.devices if series.component == component]
    if uncounted:
        return missing(str(uncounted[0].facts.get("reason", "its sensor covers more than this job")))
    return missing("no sensor for it was found")


def node_energy(trace: Trace, windows: Sequence[Window]) -> EnergyFigure:
    """Energy by the node's or its modules' own meter, which contains all components; of several kinds the first."""
    meters = [series for series in trace.devices if series.component == "node"]
    if not meters:
        return missing("the node has no power meter that can be read")

    def kind(series: DeviceSeries) -> str:
        return series.device.rstrip("0123456789")  # a node has several modules, each with a number

    return total(device_energy(series, windows) for series in meters if kind(series) == kind(meters[0]))


def machine_energy(trace: Trace, windows: Sequence[Window]) -> EnergyFigure:
    """Estimate for the whole machine: sensors where they work, CPU time of all processes, and constant power.

    The constants are those of the recording. RAPL counts all users of a node, which is what is wanted here.
    """
    model = next((series for series in trace.devices if "base_w" in series.facts), None)
    if model is None:
        return missing("the whole machine was not estimated", "joulelab measure --scope machine")
    if not windows:
        return missing("the stage never ran")
    sensors = {
        component: [
            series
            for series in trace.devices
            if series.component == component and (series.counted or series.facts.get("node_wide"))
        ]
        for component in ("gpu", "cpu", "dram")
    }
    parts = [device_energy(series, windows) for devices in sensors.values() for series in devices]
    # A CPU counter already contains what the model estimates from CPU time; adding both would count the cores twice.
    if not sensors["cpu"]:
        parts.append(device_energy(model, windows))
    duration_s = sum(end - start for start, end in windows) / NS
    # The same for memory: the constant is used only where no DRAM domain is read.
    constants = ["base"] if sensors["dram"] else ["base", "memory"]
    for name in constants:
        energy_j, error_rel = model.facts[f"{name}_w"] * duration_s, model.facts[f"{name}_error_rel"]
        source = MACHINE_BASE if name == "base" else f"constant:{name}"
        parts.append(
            EnergyFigure(
                # A wrong constant is wrong by the same factor everywhere, so its error is a gain error and cancels in
                # ratios.
                energy_j=energy_j,
                method="estimated",
                half_width_j=0.0,
                gain_error_rel=error_rel,
                sources=(source,),
            )
        )
    # all constants belong to the same time, so coverage is that of the readings
    readings = parts[: -len(constants)]
    return total(parts).model_copy(update={"coverage": min(part.coverage for part in readings), "reason": None})


def device_energy(series: DeviceSeries, windows: Sequence[Window]) -> EnergyFigure:
    """The best figure for a device: the samples' shape at the counter's scale where there are both."""
    return _over_windows(series, series.best_path, series.method, windows)


def both_paths(trace: Trace, component: str, windows: Sequence[Window]) -> TwoPaths | None:
    """Counter and integral separately, summed over the component's devices; None if no device has both.

    Time in which a counter was set back cannot be compared and is left out of both.
    """
    counted = [series for series in trace.devices if series.component == component and series.counted]
    devices = [series for series in counted if series.counter_path and series.power_path]
    if not devices or not windows:
        return None
    counted_only = [(series, _without_faults(series, windows)) for series in devices]
    return TwoPaths(
        counter=total(_over_windows(series, series.counter_path, "counter", left) for series, left in counted_only),
        integrated=total(_over_windows(series, series.power_path, "integrated", left) for series, left in counted_only),
    )


def _without_faults(series: DeviceSeries, windows: Sequence[Window]) -> list[Window]:
    # A fault of the counter would appear as a disagreement of the two methods, which this comparison must not report.
    faults = [(begin, end) for begin, end, _ in series.counter_faults]
    return [part for window in windows for part in without(window, faults)]


def without(whole: Window, excluded: Sequence[Window]) -> list[Window]:
    """The parts of a window outside other, disjoint windows."""
    # sweep from the start: what lies between the end of one excluded window and the start of the next remains
    left, cursor = [], whole[0]
    for start, end in sorted(excluded):
        if cursor < min(start, whole[1]):
            left.append((cursor, min(start, whole[1])))
        cursor = max(cursor, end)
    if cursor < whole[1]:
        left.append((cursor, whole[1]))
    return left


def _over_windows(
    series: DeviceSeries, curve: EnergyCurve | None, method: Method, windows: Sequence[Window]
) -> EnergyFigure:
    if not windows:
        return missing("the stage never ran")
    if curve is None:
        return missing(NO_READING)
    # All windows at once: errors of adjacent windows are correlated (what one gains at a shared edge the other
    # loses), so half-widths of single windows must not be added.
    energy_j, errors, covered_s = curve.energy(windows)
    duration_s = sum(end - start for start, end in windows) / NS
    faults = _faults(series, windows)
    if covered_s <= 0 or duration_s <= 0:
        return missing("; ".join(faults) or NO_READING)
    reasons = [str(series.facts["reason"]), *faults] if series.facts.get("reason") else faults
    # Both are sums of rounded times, so the quotient may exceed 1 by rounding.
    coverage = min(1.0, covered_s / duration_s)
    # The errors of a total that another program stated are not known; 0 would claim that there are none.
    stated = bool(series.reported)
    return EnergyFigure(
        energy_j=energy_j,
        method=method,
        coverage=coverage,
        half_width_j=None if stated else combined_half_width_j(errors),
        errors=() if stated else errors,
        gain_error_rel=None if stated else series.gain_error_rel,
        sources=(series.device,),
        reason="; ".join(reasons) or None,
        # Time without data is not filled in: its energy is at least 0, so the figure becomes a lower bound.
        lower_bound=coverage < COVERED,
    )


def _faults(series: DeviceSeries, windows: Sequence[Window]) -> list[str]:
    """What happened to the counter during the windows."""
    return list(
        dict.fromkeys(
            reason
            for begin, end, reason in series.counter_faults
            if any(begin < window[1] and end > window[0] for window in windows)
        )
    )


def power_curve(series: DeviceSeries) -> tuple[Array, Array]:
    """Power over time at the best resolution of the trace: 20 ms samples, polled power, or the counter's slope."""
    if len(series.samples_ns) > 1:
        return series.samples_ns, series.samples_w
    if len(series.power_ns) > 1:
        return series.power_ns, series.power_w
    readings = series.readings
    if readings is None:
        return np.array([], dtype=np.int64), np.array([])
    # where a wrap may have been missed, the difference of the counter is not an energy
    steps_s, steps_j = np.maximum(np.diff(readings.at_ns) / NS, 1e-9), np.diff(readings.joules)
    # The slope between two readings is the mean power between them, so it belongs to the middle of the interval.
    middle = (readings.at_ns[1:] + readings.at_ns[:-1]) // 2
    return middle[readings.known], (steps_j / steps_s)[readings.known]


def _inside(begin_ns: int, end_ns: int, windows: Sequence[Window]) -> bool:
    return any(window[0] < end_ns and begin_ns < window[1] for window in windows)


def peak_power_w(trace: Trace, component: str, windows: Sequence[Window]) -> float | None:
    """Sum of the devices' own peaks within the windows: an upper bound of the component's peak."""
    peaks = []
    for series in trace.devices:
        if series.component != component or not series.counted:
            continue
        stated = [cell.peak_w for cell in series.reported if _inside(cell.begin_ns, cell.end_ns, windows)]
        if any(stated):
            peaks.append(max(peak for peak in stated if peak is not None))
            continue
        times, watts = power_curve(series)
        inside = np.zeros(len(times), dtype=bool)
        for start, end in windows:
            inside |= (times >= start) & (times <= end)
        if inside.any():
            peaks.append(float(watts[inside].max()))
    # devices need not peak at the same time
    return sum(peaks) if peaks else None
