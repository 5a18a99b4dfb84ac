"""Energy so far and the latest readings, per device: for the live view, the Prometheus page, budgets and trackers.

Energy of a GPU is the difference of its counter where it has one, else the trapezoid over polled power; the two are
never mixed. `sensors.counter_rise` handles wraps and counters that were set back.

A budget asks every second for hours, so a trace is read from its tail. Counters are read about once a second;
`LiveEnergy.read_now` fills the time since at the last power. The record of a run is computed afterwards, from the whole
trace.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from joulelab.clock import NS
from joulelab.meter.figures import EnergyFigure, Method, missing
from joulelab.meter.sensors import Device, Line, counter_rise, largest_rise_w
from joulelab.meter.trace import NewLines

HISTORY = 60
_BARS = "▁▂▃▄▅▆▇█"


@dataclass
class DeviceTally:
    """Energy of one device since its first reading."""

    device: Device
    method: Method = "integrated"
    energy_j: float = 0.0
    power_w: float | None = None
    latest: Line = field(default_factory=dict)
    """The last record; empty while its sensor fails, so that no old value passes for a new one."""
    history_w: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    _counter: tuple[int, float] | None = None
    _polled: tuple[int, float] | None = None

    @property
    def has_reading(self) -> bool:
        return self._counter is not None or self._polled is not None

    @property
    def figure(self) -> EnergyFigure:
        """Energy so far; the interval of measured energy comes from the whole trace, which is not read here."""
        if not self.has_reading:
            return missing("no reading yet")
        estimated = self.device.component == "cpu_estimate"
        return EnergyFigure(
            energy_j=self.energy_j,
            method="estimated" if estimated else self.method,
            half_width_j=0.0 if estimated else None,
            gain_error_rel=self.device.gain_error_rel,
            sources=(self.device.device,),
        )

    def take_counter(self, mono_ns: int, counter_j: float) -> None:
        self.method = "counter"
        if self._counter is not None:
            span_s = (mono_ns - self._counter[0]) / NS
            rise_j = self._rise(counter_j, span_s)
            self.energy_j += rise_j
            # a GPU reports its power; other devices only count, and their mean power since the last reading is shown
            if self.device.component != "gpu" and span_s > 0:
                self._show(rise_j / span_s)
        self._counter = (mono_ns, counter_j)

    def _rise(self, counter_j: float, span_s: float) -> float:
        """Energy since the last reading; at the last known power if the counter jumped."""
        assert self._counter is not None
        facts = self.device.facts
        rise_j = counter_rise(self._counter[1], counter_j, span_s, self.device.wrap_j, facts.get("max_gap_s"))
        if rise_j is None:
            rise_j = counter_j  # set back: it counts from 0 since then
        most_j = largest_rise_w(facts.get("power_limit_w")) * (span_s + (self.device.refresh_s or 0.1))
        if rise_j > most_j and self.device.component != "cpu_estimate":
            # A live figure must not jump by kilojoules because a counter did; the record is computed from the trace
            # later and treats the interval as a gap.
            return (self.power_w or 0.0) * span_s
        return rise_j

    def take_power(self, mono_ns: int, power_w: float) -> None:
        if self._counter is None and self._polled is not None:
            # trapezoidal rule, only while there is no counter: adding both would count the energy twice
            self.energy_j += (power_w + self._polled[1]) / 2 * (mono_ns - self._polled[0]) / NS
        self._polled = (mono_ns, power_w)
        self._show(power_w)

    def energy_at(self, mono_ns: int) -> float:
        """Energy up to a moment near the last reading, at the last known power: a counter may be a second old."""
        last = self._counter or self._polled
        if last is None or self.power_w is None:
            return self.energy_j
        return self.energy_j + self.power_w * (mono_ns - last[0]) / NS

    def _show(self, power_w: float) -> None:
        self.power_w = power_w
        self.history_w.append(power_w)

    def fail(self) -> None:
        self.latest, self.power_w = {}, None


class Tally:
    """Energy and latest readings of all devices, from the monitor's records or from the lines of a trace."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = {device.device: DeviceTally(device) for device in devices}
        self.host: Line = {}
        self.cores: Line = {}
        self.process: dict[str, Any] | None = None
        self.ticks = 0
        self.errors: dict[str, int] = {}
        self.wall_s = 0.0
        self.run_id = ""
        """The run whose trace is recorded; empty for the monitor."""

    def take(self, records: Sequence[Line], wall_s: float) -> None:
        """The records of one tick."""
        self.ticks += 1
        self.wall_s = wall_s
        for record in records:
            if record["kind"] == "gpu" and record["device"] in self.devices:
                self.devices[record["device"]].latest = record
            for domain in record.get("rapl", {}):
                # a domain that is not in the header is shown, and its energy is not added to others
                uncounted = Device(device=f"rapl:{domain}", component="cpu", name=f"rapl:{domain}", counted=False)
                self.devices.setdefault(uncounted.device, DeviceTally(uncounted))
            self.take_line(record)
            if record["kind"] in ("gpu", "host", "rapl"):
                self.host = record
                self.process = record.get("process", self.process)

    def take_reading(self, line: Line) -> None:
        """One line of a trace, with the latest value of each field: a trace has slow fields in some lines only."""
        if line.get("kind") == "gpu" and (gpu := self.devices.get(line["device"])) is not None:
            gpu.latest = {**gpu.latest, **{name: value for name, value in line.items() if value is not None}}
        elif line.get("kind") == "host":
            self.host = line
        elif line.get("kind") == "cores":
            self.cores = line
        self.take_line(line)

    def take_line(self, line: Line) -> None:
        """Add the energy of one record, or of one line of a trace, for the devices that are known."""
        kind, mono_ns = line.get("kind"), line.get("mono_ns", 0)
        if kind == "gpu" and (gpu := self.devices.get(line["device"])) is not None:
            if line.get("energy_counter_j") is not None:
                gpu.take_counter(line.get("counter_mono_ns") or mono_ns, line["energy_counter_j"])
            if line.get("power_watts") is not None:
                gpu.take_power(mono_ns, line["power_watts"])
        for name, power_w in line.get("powers_w", {}).items():
            if name in self.devices:
                self.devices[name].take_power(mono_ns, power_w)
        counters_j = {f"rapl:{domain}": energy_j for domain, energy_j in line.get("rapl", {}).items()}
        counters_j |= line.get("counters_j", {})
        if kind == "estimate" and line["device"] in self.devices:
            watts = self.devices[line["device"]].device.facts["w_per_thread"]
            counters_j[line["device"]] = line["busy_thread_s"] * watts
        for name, energy_j in counters_j.items():
            if name in self.devices:
                self.devices[name].take_counter(mono_ns, energy_j)

    def fail(self, sensor: str, devices: Sequence[str]) -> None:
        """A reading of these devices failed: their last one must not pass for a new one."""
        self.errors[sensor] = self.errors.get(sensor, 0) + 1
        for name in devices:
            if name in self.devices:
                self.devices[name].fail()


class LiveEnergy:
    """Energy while it is being used, from the tail of a trace: each new line is read once."""

    def __init__(self, trace: Path) -> None:
        self._lines = NewLines(trace)
        self._tally = Tally(())

    def read(self, estimates: bool = False) -> float | None:
        """Joules of all counted devices since the trace began; None if no sensor has a reading."""
        self._take_new_lines()
        chosen = self._chosen(estimates)
        return sum(device.energy_j for device in chosen) if chosen else None

    def read_now(self, estimates: bool = False) -> float | None:
        """The same up to this moment: what the sensors have not reported yet is counted at their last power."""
        self._take_new_lines()
        now_ns = time.monotonic_ns()
        chosen = self._chosen(estimates)
        return sum(device.energy_at(now_ns) for device in chosen) if chosen else None

    def power_w(self, estimates: bool = False) -> float | None:
        """The latest power of the same devices, as far as the lines were read."""
        found = [device.power_w for device in self._chosen(estimates) if device.power_w is not None]
        return sum(found) if found else None

    def devices(self, estimates: bool = False) -> list[DeviceTally]:
        """The counted devices with a reading, and their latest values, as far as the lines were read."""
        return self._chosen(estimates)

    @property
    def cores(self) -> Line:
        """The latest use of the CPU cores; empty if it is not recorded."""
        return self._tally.cores

    def _chosen(self, estimates: bool) -> list[DeviceTally]:
        return [
            tally
            for tally in self._tally.devices.values()
            if tally.device.counted and tally.has_reading and (estimates or tally.device.component != "cpu_estimate")
        ]

    def _take_new_lines(self) -> None:
        for line in self._lines.read():
            self._take(line)

    def _take(self, line: Line) -> None:
        if line.get("kind") in ("header", "devices"):
            for device in line["devices"]:
                self._tally.devices.setdefault(device["device"], DeviceTally(Device(**device)))
        else:
            self._tally.take_reading(line)


@dataclass(frozen=True)
class LiveReading:
    energy_j: float | None
    power_w: float | None
    estimated: bool = False
    """No sensor has a reading, so this is the CPU estimate."""


class LiveTraces:
    """Energy and power of an active run over all its hosts; each call reads only what was written since the last."""

    def __init__(self) -> None:
        self._traces: dict[Path, LiveEnergy] = {}

    def read(self, traces: Iterable[Path]) -> LiveReading:
        for path in traces:
            self._traces.setdefault(path, LiveEnergy(path))
        for estimates in (False, True):
            energies_j = [live.read(estimates) for live in self._traces.values()]
            known_j = [energy_j for energy_j in energies_j if energy_j is not None]
            if known_j:
                powers_w = [live.power_w(estimates) for live in self._traces.values()]
                known_w = [power_w for power_w in powers_w if power_w is not None]
                return LiveReading(sum(known_j), sum(known_w) if known_w else None, estimates)
        return LiveReading(None, None)

    def trace(self, path: Path) -> LiveEnergy:
        """One of the traces, as far as `read` has read it."""
        return self._traces[path]


def sparkline(values: Sequence[float]) -> str:
    """From 0 to the highest, so that a flat line at the top is a steady load and not noise made large."""
    top = max(values, default=0.0)
    if top <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(len(_BARS) - 1, int(max(0.0, value) / top * len(_BARS)))] for value in values)
