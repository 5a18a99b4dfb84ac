"""Joules of a foreign log, per device and by each way the file allows: trapezoid over power, difference of the counter.

The two are shown side by side. Polled power misses what happens between two readings; the counter does not, but not
every file has it. A hole in the readings is left out of the trapezoid and said, for nobody knows what was drawn then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from joulelab.meter.foreign.power_log import Array, DeviceLog

# Readings further apart than this many usual steps have a hole between them.
HOLE_FACTOR = 3.0


@dataclass(frozen=True)
class DeviceEnergy:
    device: str
    name: str
    component: str
    counted: bool
    samples: int
    first_s: float
    last_s: float
    interval_s: float | None
    """The usual time between readings."""
    mean_w: float | None
    max_w: float | None
    trapezoid_j: float | None
    seen_s: float
    """The part of the duration the trapezoid covers: all but the holes."""
    counter_j: float | None
    counter_restarts: int
    holes: tuple[tuple[float, float], ...]

    @property
    def duration_s(self) -> float:
        return self.last_s - self.first_s

    @property
    def best_j(self) -> float | None:
        return self.counter_j if self.counter_j is not None else self.trapezoid_j


def device_energy(log: DeviceLog) -> DeviceEnergy:
    times, watts = log.series("power_watts")
    steps = np.diff(times)
    usual_s = float(np.median(steps)) if len(steps) else None
    seen = steps <= HOLE_FACTOR * usual_s if usual_s else np.array([], dtype=bool)
    seen_s = float(steps[seen].sum())
    trapezoid_j = float(((watts[1:] + watts[:-1]) / 2 * steps)[seen].sum()) if len(steps) else None
    counter_times, counter = log.series("energy_counter_j")
    counter_j, restarts = counter_rise(counter, log.source.wrap_j)
    span_s = float(counter_times[-1] - counter_times[0]) if len(counter_times) > 1 else 0.0
    _, curve_w = log.power()
    mean_w = trapezoid_j / seen_s if trapezoid_j is not None and seen_s else None
    if mean_w is None and counter_j is not None and span_s:
        mean_w = counter_j / span_s
    return DeviceEnergy(
        device=log.source.device,
        name=log.source.name,
        component=log.source.component,
        counted=log.source.counted,
        samples=len(times) or len(counter_times) or len(log.times_s),
        first_s=float(log.times_s[0]),
        last_s=float(log.times_s[-1]),
        interval_s=usual_s,
        mean_w=mean_w,
        max_w=float(curve_w.max()) if len(curve_w) else None,
        trapezoid_j=trapezoid_j,
        seen_s=seen_s,
        counter_j=counter_j,
        counter_restarts=restarts,
        holes=tuple((float(times[i]), float(times[i + 1])) for i in np.flatnonzero(~seen)),
    )


def counter_rise(counter_j: Array, wrap_j: float | None) -> tuple[float | None, int]:
    """How far a counter rose. A fall is one wrap where its range is known, else a restart from 0 (driver reloaded)."""
    if len(counter_j) < 2:
        return None, 0
    rises = np.diff(counter_j)
    falls = rises < 0
    if wrap_j:
        return float(rises.sum() + wrap_j * falls.sum()), 0
    return float(np.where(falls, counter_j[1:], rises).sum()), int(falls.sum())
