"""A trace as arrays: per device the counter, the polled power and the 20 ms samples, on the monotonic clock.

Counters are checked here, interval by interval: a counter may wrap, be set back, jump, or not be read for so long that
a wrap may be missed. Intervals over which it cannot be trusted are not used; the others keep their joules.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from joulelab.clock import NS
from joulelab.meter.alignment import Lag, estimate_lag, lag_log_likelihood
from joulelab.meter.curve import (
    Cells,
    EnergyCurve,
    Readings,
    counter_curve,
    joined_curve,
    polled_curve,
    sample_cells,
    sample_curve,
    stated_curve,
)
from joulelab.meter.figures import Method
from joulelab.meter.sensors import counter_rise, largest_rise_w
from joulelab.meter.trace import SUFFIX, Chunks, read_lines, read_rare_lines, read_readings, where_now

Array = NDArray[Any]
SET_BACK = "the energy counter was set back"
JUMPED = "the energy counter jumped by more than the device can draw"
# The time of a reading that took longer is unknown; the next reading replaces it.
SLOW_READ_S = 0.05
# A gap in which a wrap could be missed is still used if the wrap would need this many times the highest power seen.
HIDDEN_WRAP_FACTOR = 5.0


class ReportedCell(NamedTuple):
    begin_ns: int
    end_ns: int
    energy_j: float
    peak_w: float | None


@dataclass(frozen=True, eq=False)
class DeviceSeries:
    """All readings of one device; times are monotonic nanoseconds, ascending.

    Its energy curves are computed once and cached: each stage of a run uses them.
    """

    device: str
    component: str
    name: str
    counted: bool
    refresh_s: float
    gain_error_rel: float
    counter_ns: Array
    counter_j: Array
    """Unwrapped, so it decreases only where the counter was set back."""
    power_ns: Array
    power_w: Array
    samples_ns: Array
    samples_w: Array
    facts: dict[str, Any] = field(default_factory=dict)
    counter_read_s: Array | None = None
    """How long each reading of the counter took; None in traces without it."""
    reported: tuple[ReportedCell, ...] = ()
    """Energy of whole stages as another program stated it; such a device has no readings."""
    driver: SharedLag | None = None
    """Shared by all devices that the same driver samples; None for a single device."""

    @property
    def last_ns(self) -> int | None:
        """Time of the last reading of any kind; samples and power reach further than a slow counter."""
        return max(
            (int(times[-1]) for times in (self.counter_ns, self.power_ns, self.samples_ns) if len(times)), default=None
        )

    @cached_property
    def readings(self) -> Readings | None:
        """The counter as far as it can be used; None with fewer than two readings."""
        usable = np.ones(len(self.counter_ns), dtype=bool)
        if self.counter_read_s is not None:
            # A reading is stamped in the middle of its call; a call of 50 ms on a card at 700 W is
            # uncertain by 35 J, more than the interpolation between its neighbors.
            usable = self.counter_read_s <= SLOW_READ_S
        # Two slow readings still bound the energy between them, which is better than no figure.
        if usable.sum() < 2:
            usable[:] = True
        chosen = slice(None) if usable.all() else usable  # a slice copies nothing
        at_ns, joules = self.counter_ns[chosen], self.counter_j[chosen]
        if len(at_ns) < 2:
            return None
        call_s = np.zeros(len(at_ns)) if self.counter_read_s is None else self.counter_read_s[chosen]
        return Readings(at_ns, joules, self._known(at_ns, joules), call_s, self.refresh_s)

    def _known(self, at_ns: Array, joules: Array) -> Array:
        """Per interval between two readings: whether the counter can be trusted over it."""
        steps_s, steps_j = np.maximum(np.diff(at_ns) / NS, 1e-9), np.diff(joules)
        known: Array = (steps_j >= 0) & ~self._jumped(steps_s, steps_j)
        if max_gap_s := self.facts.get("max_gap_s"):
            # `max_gap_s` is half a wrap at the most power a package can draw: within twice that, none can hide
            followed = known & (steps_s <= 2 * max_gap_s)
            # In a longer gap a wrap shows as a rise that is too small by `wrap_j`. It cannot have
            # happened if even the highest power of the followed intervals, with a margin, needs
            # longer than the gap for one range of the counter.
            highest_w = float((steps_j / steps_s)[followed].max(initial=0.0))
            wrap_j = self.facts.get("wrap_j", 0.0)
            known &= followed | ((wrap_j / steps_s > HIDDEN_WRAP_FACTOR * max(highest_w, 1.0)) & followed.any())
        return known

    def _jumped(self, steps_s: Array, steps_j: Array) -> Array:
        """A rise that the device cannot have drawn. The estimate has no counter that could jump."""
        # Plus one refresh: two readings 10 ms apart may be on both sides of a refresh, and differ
        # by the energy of 100 ms.
        most_j = largest_rise_w(self.limit_w) * (steps_s + self.refresh_s)
        jumped: Array = (steps_j > most_j) & (self.component != "cpu_estimate")
        return jumped

    @property
    def limit_w(self) -> float | None:
        """The highest sustained power of the device; None if it does not report it."""
        limit: float | None = self.facts.get("power_limit_w")
        return limit

    @cached_property
    def counter_path(self) -> EnergyCurve | None:
        # CPU time comes in whole clock ticks, however little of it there is
        tick_j = self.refresh_s * self.facts["w_per_thread"] if self.component == "cpu_estimate" else 0.0
        return None if self.readings is None else counter_curve(self.readings, self.limit_w, tick_j)

    @cached_property
    def power_path(self) -> EnergyCurve | None:
        if len(self.samples_ns) > 2:
            return sample_curve(self._cells, self.lag, self.limit_w)
        if len(self.power_ns) < 2:
            return None
        return polled_curve(self.power_ns, self.power_w, self.limit_w, bool(self.facts.get("interpolate_gaps")))

    @cached_property
    def best_path(self) -> EnergyCurve | None:
        """The samples' shape at the counter's scale where there are both, else what there is."""
        if self.reported:
            return stated_curve([(cell.begin_ns, cell.end_ns, cell.energy_j) for cell in self.reported])
        if self.readings is not None and len(self.samples_ns) > 2:
            return joined_curve(self._cells, self.readings, self.lag, self.limit_w)
        return self.counter_path or self.power_path

    @cached_property
    def _cells(self) -> Cells:
        return sample_cells(self.samples_ns, self.samples_w)

    @property
    def lag(self) -> Lag:
        return self.driver.lag if self.driver is not None else estimate_lag([self.lag_likelihood])

    @cached_property
    def lag_likelihood(self) -> Array:
        """What this device's samples and counter say about the lag of the driver's samples."""
        if self.readings is None or len(self.samples_ns) <= 2:
            return np.zeros(1)
        return lag_log_likelihood(self.readings.compared_with(self._cells))

    @cached_property
    def counter_faults(self) -> list[tuple[int, int, str]]:
        """Between which moments the counter was set back or jumped; readings are of half a refresh before them."""
        if self.readings is None:
            return []
        # The value of a counter that refreshes every r seconds is between 0 and r old, r / 2 on
        # average.
        at_ns, steps_j = self.readings.at_ns - round(self.refresh_s / 2 * NS), np.diff(self.readings.joules)
        places = np.flatnonzero((steps_j < 0) | self._jumped(np.diff(at_ns) / NS, steps_j))
        return [(int(at_ns[k]), int(at_ns[k + 1]), SET_BACK if steps_j[k] < 0 else JUMPED) for k in places]

    @property
    def method(self) -> Method:
        if self.component == "cpu_estimate":
            return "estimated"
        if self.reported:
            stated: Method = self.facts["method"]
            return stated
        return "counter" if len(self.counter_ns) > 1 else "integrated"


class SharedLag:
    """The lag of one driver's samples, estimated from all its devices together when it is first needed."""

    def __init__(self) -> None:
        self.devices: list[DeviceSeries] = []

    @cached_property
    def lag(self) -> Lag:
        return estimate_lag([series.lag_likelihood for series in self.devices])


@dataclass(frozen=True)
class MissingComponent:
    component: str
    reason: str
    fix: str


@dataclass(frozen=True)
class Gap:
    device: str
    mono_ns: int
    reason: str


@dataclass(frozen=True)
class Trace:
    header: dict[str, Any]
    devices: tuple[DeviceSeries, ...]
    missing: tuple[MissingComponent, ...]
    gaps: tuple[Gap, ...]
    first_ns: int
    last_ns: int
    ended: bool
    """Whether the recorder wrote its closing line."""
    interval_s: float
    offset_s: float
    """Wall time minus monotonic time at the header, to convert monotonic stamps to wall times."""

    @property
    def reported_until_ns(self) -> int:
        """The latest time up to which the readings of every device that still reports are about.

        A reading may be as old as the refresh of its sensor. A device without a reading for ten intervals has failed;
        its gap is not left out.
        """
        silent_ns = 10 * self.interval_s * NS
        counted = [series for series in self.devices if series.counted]
        last = [one.last_ns - int(one.refresh_s * NS) for one in counted if one.last_ns is not None]
        return min((at_ns for at_ns in last if at_ns >= self.last_ns - silent_ns), default=self.last_ns)


def load_trace(path: Path) -> Trace:
    """Read a trace, JSONL or Parquet; Parquet is read column by column, which is much faster."""
    collector = _Collector()
    path = where_now(path)
    readings = read_readings(path) if path.suffix == SUFFIX else None
    if readings is None or readings.misfit:
        for line in read_lines(path):
            collector.take(line)
        return collector.trace()
    for line in read_rare_lines(path):
        collector.take(line)
    collector.pieces = {
        "counters": readings.counters,
        "powers": readings.powers,
        "samples": readings.samples,
        "read_times": readings.read_times,
    }
    collector.stamps += readings.stamps
    return collector.trace()


class _Collector:
    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self.counters: dict[str, list[tuple[int, float]]] = {}
        self.powers: dict[str, list[tuple[int, float]]] = {}
        self.samples: dict[str, list[tuple[int, float]]] = {}
        self.read_times: dict[str, list[tuple[int, float]]] = {}
        self.pieces: dict[str, Chunks] = {}
        """The same three as arrays, where the trace has columns."""
        self.reported: dict[str, list[ReportedCell]] = {}
        self.gaps: list[Gap] = []
        self.stamps: list[int] = []
        self.ended = False

    def take(self, line: dict[str, Any]) -> None:
        kind = line.get("kind")
        mono_ns = int(line.get("mono_ns", 0))
        if mono_ns:
            self.stamps.append(mono_ns)
        if kind == "header":
            self._take_header(line, mono_ns)
        elif kind == "gpu":
            if line.get("power_watts") is not None:
                self.powers.setdefault(line["device"], []).append((mono_ns, line["power_watts"]))
            if line.get("energy_counter_j") is not None:
                stamp = line.get("counter_mono_ns", mono_ns)
                self.counters.setdefault(line["device"], []).append((stamp, line["energy_counter_j"]))
                self.read_times.setdefault(line["device"], []).append((stamp, line.get("counter_read_s", 0.0)))
        elif kind == "samples":
            self._take_samples(line)
        elif kind == "rapl":
            for domain, energy_j in line["rapl"].items():
                self.counters.setdefault(f"rapl:{domain}", []).append((mono_ns, energy_j))
        elif kind == "counters":
            for device, energy_j in line["counters_j"].items():
                self.counters.setdefault(device, []).append((mono_ns, energy_j))
        elif kind == "power":
            for device, power_w in line["powers_w"].items():
                self.powers.setdefault(device, []).append((mono_ns, power_w))
        elif kind == "estimate":
            self.counters.setdefault(line["device"], []).append((mono_ns, line["busy_thread_s"]))
        elif kind == "devices":
            self._add_devices(line["devices"])
        elif kind == "reported":
            cell = ReportedCell(line["begin_ns"], mono_ns, line["energy_j"], line.get("peak_w"))
            self.reported.setdefault(line["device"], []).append(cell)
        elif kind == "gap":
            self.gaps.append(Gap(line["device"], mono_ns, line["reason"]))
        elif kind == "end":
            self.ended = True

    def _take_header(self, line: dict[str, Any], mono_ns: int) -> None:
        """A second header is a recorder that took over; the devices of both belong to the trace."""
        if self.header:
            if not self.ended:
                self.gaps.append(Gap("recorder", mono_ns, "the recorder was killed; another one took over"))
            self._add_devices(line["devices"])
        else:
            self.header = line
        self.ended = False

    def _add_devices(self, devices: list[dict[str, Any]]) -> None:
        known = {device["device"] for device in self.header["devices"]}
        added = [device for device in devices if device["device"] not in known]
        self.header = {**self.header, "devices": [*self.header["devices"], *added]}

    def _take_samples(self, line: dict[str, Any]) -> None:
        rows = self.samples.setdefault(line["device"], [])
        for stamp_us, power_mw in zip(line["sample_us"], line["sample_mw"], strict=True):
            # The driver stamps samples with the wall clock in microseconds. Each batch carries one
            # pair of wall and monotonic time taken together, so that a later change of the wall
            # clock cannot move samples that were read before it.
            rows.append((line["wall_us_mono_ns"] - (line["wall_us"] - stamp_us) * 1000, power_mw / 1000))

    def trace(self) -> Trace:
        head = self.header
        driver = SharedLag()
        devices = tuple(replace(self._series(device), driver=driver) for device in head.get("devices", ()))
        # One driver samples all cards with one timer, so their lag is one number, and eight cards
        # estimate it from eight times the data.
        driver.devices += [series for series in devices if series.component == "gpu"]
        for series in devices:
            self._note_faults(series)
        return Trace(
            header=head,
            devices=devices,
            missing=tuple(MissingComponent(m["component"], m["reason"], m["fix"]) for m in head.get("missing", ())),
            gaps=tuple(self.gaps),
            first_ns=min(self.stamps, default=0),
            last_ns=max(self.stamps, default=0),
            ended=self.ended,
            interval_s=head.get("interval_s", 1.0),
            offset_s=head.get("wall_minus_mono_s", 0.0),
        )

    def _note_faults(self, series: DeviceSeries) -> None:
        """Record a gap where a counter was set back (by a driver reload, for example) or jumped."""
        for _, end_ns, reason in series.counter_faults:
            self.gaps.append(Gap(series.device, end_ns + round(series.refresh_s / 2 * NS), reason))

    def _series(self, device: dict[str, Any]) -> DeviceSeries:
        name = device["device"]
        counter_ns, counter_j = self._readings("counters", name)
        if device["component"] == "cpu_estimate":
            counter_j = counter_j * device["facts"]["w_per_thread"]
            counter_j = within_power(counter_ns, counter_j, device["facts"].get("power_limit_w"))
        elif device.get("wrap_j"):
            counter_j = unwrap(counter_ns, counter_j, device["wrap_j"], device.get("facts", {}).get("max_gap_s"))
        power_ns, power_w = self._readings("powers", name)
        samples_ns, samples_w = self._readings("samples", name)
        _, read_times = self._readings("read_times", name)
        # A recorder that took over may append samples out of order. Equal stamps are ordered by power, so
        # that the result does not depend on the order of the lines.
        order = np.lexsort((samples_w, samples_ns))
        samples_ns, samples_w = samples_ns[order], samples_w[order]
        return DeviceSeries(
            device=name,
            component=device["component"],
            name=device["name"],
            counted=device["counted"],
            refresh_s=device.get("refresh_s") or 0.1,
            gain_error_rel=device.get("gain_error_rel") or 0.0,
            counter_ns=counter_ns,
            counter_j=counter_j,
            power_ns=power_ns,
            power_w=power_w,
            samples_ns=samples_ns,
            samples_w=samples_w,
            facts=device.get("facts", {}) | ({"wrap_j": device["wrap_j"]} if device.get("wrap_j") else {}),
            counter_read_s=read_times if len(read_times) == len(counter_ns) else None,
            reported=tuple(self.reported.get(name, ())),
        )

    def _readings(self, what: str, device: str) -> tuple[Array, Array]:
        # Taken out, so that pieces and whole arrays of a day's trace are not in memory together.
        if pieces := self.pieces.get(what, {}).pop(device, None):
            return np.concatenate([times for times, _ in pieces]), np.concatenate([values for _, values in pieces])
        return _arrays(getattr(self, what).get(device, []))


def _arrays(rows: list[tuple[int, float]]) -> tuple[Array, Array]:
    times = np.array([row[0] for row in rows], dtype=np.int64)
    values = np.array([row[1] for row in rows], dtype=float)
    return times, values


def within_power(counter_ns: Array, counter_j: Array, limit_w: float | None) -> Array:
    """CPU time that was seen late, spread backward: all threads together cannot rise faster than `limit_w`.

    The time of a child that no reading saw is added when its parent reaps it, all at once. What was used by then was
    used at most `limit_w` x interval after the reading before, so that reading was too low by the rest.
    """
    if not limit_w or len(counter_ns) < 2:
        return counter_j
    possible_j = limit_w * (counter_ns - counter_ns[0]) / NS
    excess_j = counter_j - possible_j
    later_j: Array = np.maximum.accumulate(excess_j[::-1])[::-1]
    spread: Array = np.where(later_j > excess_j, possible_j + later_j, counter_j)
    return spread


def unwrap(counter_ns: Array, counter_j: Array, wrap_j: float, max_gap_s: float | None = None) -> Array:
    """The counter without wraps; where it was set back, the decrease stays."""
    steps_s = np.diff(counter_ns) / NS
    wraps_j: Array = np.zeros(len(counter_j))
    for k in np.flatnonzero(np.diff(counter_j) < 0):
        if counter_rise(counter_j[k], counter_j[k + 1], steps_s[k], wrap_j, max_gap_s) is not None:
            wraps_j[k + 1] = wrap_j
    unwrapped: Array = counter_j + np.cumsum(wraps_j)
    return unwrapped
