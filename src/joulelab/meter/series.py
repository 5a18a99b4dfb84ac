"""A trace as arrays: per device the counter, the polled power and the 20 ms samples, on the monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joulelab.clock import NS
from joulelab.meter.curve import EnergyCurve, counter_curve, polled_curve, sample_curve, shaped_curve
from joulelab.meter.figures import Method
from joulelab.meter.trace import read_lines, where_now
from joulelab.meter.trace_columns import Pieces, read_rare_lines, read_readings
from joulelab.meter.trace_parquet import SUFFIX

Array = NDArray[Any]
# A wrapping counter that fell is taken as wrapped unless that needed this many times the power `max_gap_s` stands for.
WRAP_MARGIN = 100.0
SET_BACK = "the energy counter was set back"


@dataclass(frozen=True, eq=False)
class DeviceSeries:
    """Everything the trace says about one device; times are monotonic nanoseconds, ascending.

    Its paths to energy are built once and kept: a trace is asked once for each stage.
    """

    device: str
    component: str
    name: str
    counted: bool
    refresh_s: float
    gain_error_rel: float
    counter_ns: Array
    counter_j: Array
    """Wraps are taken out, so it falls only where the counter was set back."""
    power_ns: Array
    power_w: Array
    samples_ns: Array
    samples_w: Array
    facts: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def counter_path(self) -> EnergyCurve | None:
        if len(self.counter_ns) < 2:
            return None
        # CPU time comes in whole clock ticks, however little of it there is
        tick_j = self.refresh_s * self.facts["w_per_thread"] if self.component == "cpu_estimate" else 0.0
        return counter_curve(self.counter_ns, self.counter_j, self.refresh_s, self.facts.get("max_gap_s"), tick_j)

    @cached_property
    def power_path(self) -> EnergyCurve | None:
        if len(self.samples_ns) > 2:
            return sample_curve(self.samples_ns, self.samples_w)
        return polled_curve(self.power_ns, self.power_w) if len(self.power_ns) > 1 else None

    @cached_property
    def best_path(self) -> EnergyCurve | None:
        """The samples' shape at the counter's scale where there are both, else what there is."""
        if self.counter_path and len(self.samples_ns) > 2:
            return shaped_curve(self.samples_ns, self.samples_w, self.counter_ns, self.counter_j, self.refresh_s)
        return self.counter_path or self.power_path

    @cached_property
    def set_back_windows(self) -> list[tuple[int, int]]:
        """Between which readings the counter was set back; readings tell of half a refresh before them."""
        late_ns = round(self.refresh_s / 2 * NS)
        places = np.flatnonzero(np.diff(self.counter_j) < 0)
        return [(int(self.counter_ns[k]) - late_ns, int(self.counter_ns[k + 1]) - late_ns) for k in places]

    @property
    def method(self) -> Method:
        if self.component == "cpu_estimate":
            return "estimated"
        return "counter" if len(self.counter_ns) > 1 else "integrated"


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
    """wall time - monotonic time at the header, to turn monotonic stamps into times of day."""


def load_trace(path: Path) -> Trace:
    """A trace of either kind; Parquet gives its arrays column by column, which is much quicker."""
    collector = _Collector()
    path = where_now(path)
    readings = read_readings(path) if path.suffix == SUFFIX else None
    if readings is None or readings.misfit:
        for line in read_lines(path):
            collector.take(line)
        return collector.trace()
    for line in read_rare_lines(path):
        collector.take(line)
    collector.pieces = {"counters": readings.counters, "powers": readings.powers, "samples": readings.samples}
    collector.stamps += readings.stamps
    return collector.trace()


class _Collector:
    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self.counters: dict[str, list[tuple[int, float]]] = {}
        self.powers: dict[str, list[tuple[int, float]]] = {}
        self.samples: dict[str, list[tuple[int, float]]] = {}
        self.pieces: dict[str, Pieces] = {}
        """The same three as arrays, where the trace has columns."""
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
        elif kind == "samples":
            self._take_samples(line)
        elif kind == "rapl":
            for domain, energy_j in line["rapl"].items():
                self.counters.setdefault(f"rapl:{domain}", []).append((mono_ns, energy_j))
        elif kind == "counters":
            for device, energy_j in line["counters_j"].items():
                self.counters.setdefault(device, []).append((mono_ns, energy_j))
        elif kind == "estimate":
            self.counters.setdefault(line["device"], []).append((mono_ns, line["busy_thread_s"]))
        elif kind == "devices":
            self._add_devices(line["devices"])
        elif kind == "gap":
            self.gaps.append(Gap(line["device"], mono_ns, line["reason"]))
        elif kind == "end":
            self.ended = True

    def _take_header(self, line: dict[str, Any], mono_ns: int) -> None:
        """A second header is a recorder that took over; what the first one saw and the new one sees belong together."""
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
            rows.append((line["wall_us_mono_ns"] - (line["wall_us"] - stamp_us) * 1000, power_mw / 1000))

    def trace(self) -> Trace:
        head = self.header
        devices = tuple(self._note_set_backs(self._series(device)) for device in head.get("devices", ()))
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

    def _note_set_backs(self, series: DeviceSeries) -> DeviceSeries:
        """What a counter had counted before it was set back (a driver reload, say) is a gap like any other."""
        for place in np.flatnonzero(np.diff(series.counter_j) < 0):
            self.gaps.append(Gap(series.device, int(series.counter_ns[place + 1]), SET_BACK))
        return series

    def _series(self, device: dict[str, Any]) -> DeviceSeries:
        name = device["device"]
        counter_ns, counter_j = self._readings("counters", name)
        if device["component"] == "cpu_estimate":
            counter_j = counter_j * device["facts"]["w_per_thread"]
        elif device.get("wrap_j"):
            counter_j = unwrap(counter_ns, counter_j, device["wrap_j"], device.get("facts", {}).get("max_gap_s"))
        power_ns, power_w = self._readings("powers", name)
        samples_ns, samples_w = self._readings("samples", name)
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
            facts=device.get("facts", {}),
        )

    def _readings(self, what: str, device: str) -> tuple[Array, Array]:
        if pieces := self.pieces.get(what, {}).get(device):
            return np.concatenate([times for times, _ in pieces]), np.concatenate([values for _, values in pieces])
        return _arrays(getattr(self, what).get(device, []))


def _arrays(rows: list[tuple[int, float]]) -> tuple[Array, Array]:
    times = np.array([row[0] for row in rows], dtype=np.int64)
    values = np.array([row[1] for row in rows], dtype=float)
    return times, values


def unwrap(counter_ns: Array, counter_j: Array, wrap_j: float, max_gap_s: float | None = None) -> Array:
    """A counter that falls has wrapped once: it is read far more often than it can go round.

    Within `max_gap_s` it can go round by half at most. A fall that would be a far higher rise is no wrap: the counter
    was set back, and stays fallen here.
    """
    steps_s, steps_j = np.diff(counter_ns) / NS, np.diff(counter_j)
    most_j = WRAP_MARGIN * steps_s * wrap_j / 2 / max_gap_s if max_gap_s else wrap_j
    wrapped = (steps_j < 0) & (steps_j + wrap_j <= most_j)
    wraps_j: Array = np.zeros(len(counter_j))
    wraps_j[1:] = np.cumsum(np.where(wrapped, wrap_j, 0.0))
    unwrapped: Array = counter_j + wraps_j
    return unwrapped
