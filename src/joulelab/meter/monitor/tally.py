"""Energy and the latest readings since the monitor started, as the live view and the Prometheus page show them.

Energy of a GPU is the difference of its counter where it has one, else the trapezoid over polled power; the two are
never mixed. RAPL domains are unwrapped one by one, each with its own range.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from joulelab.clock import NS
from joulelab.meter.figures import EnergyFigure, Method, missing
from joulelab.meter.sensors import Device, Line

HISTORY = 60
_BARS = "▁▂▃▄▅▆▇█"


@dataclass
class Joules:
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
    def told(self) -> bool:
        """Whether its sensor has said anything at all."""
        return self._counter is not None or self._polled is not None

    @property
    def figure(self) -> EnergyFigure:
        """Energy so far; the interval of measured energy comes from the whole trace, which is not read here."""
        if not self.told:
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
            rise_j = counter_j - self._counter[1]
            if rise_j < 0:  # wrapped where the range is known, restarted from 0 with the driver where it is not
                rise_j = rise_j + self.device.wrap_j if self.device.wrap_j else counter_j
            self.energy_j += rise_j
            span_s = (mono_ns - self._counter[0]) / NS
            if self.device.component != "gpu" and span_s > 0:
                self._show(rise_j / span_s)
        self._counter = (mono_ns, counter_j)

    def take_power(self, mono_ns: int, power_w: float) -> None:
        if self._counter is None and self._polled is not None:
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
    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = {device.device: Joules(device) for device in devices}
        self.host: Line = {}
        self.process: dict[str, Any] | None = None
        self.ticks = 0
        self.errors: dict[str, int] = {}
        self.wall_s = 0.0

    def take(self, records: Sequence[Line], wall_s: float) -> None:
        """The records of one tick."""
        self.ticks += 1
        self.wall_s = wall_s
        for record in records:
            if record["kind"] == "gpu" and record["device"] in self.devices:
                self._take_gpu(self.devices[record["device"]], record)
            if "rapl" in record:
                self.take_rapl(record)
            if record["kind"] in ("gpu", "host", "rapl"):
                self.host = record
                self.process = record.get("process", self.process)

    def take_rapl(self, record: Line) -> None:
        """RAPL counters read between two ticks, because one of them wrapped."""
        for domain, counter_j in record["rapl"].items():
            self._joules_of(f"rapl:{domain}").take_counter(record["mono_ns"], counter_j)

    def _take_gpu(self, joules: Joules, record: Line) -> None:
        joules.latest = record
        if record.get("energy_counter_j") is not None:
            joules.take_counter(record.get("counter_mono_ns") or record["mono_ns"], record["energy_counter_j"])
        if record.get("power_watts") is not None:
            joules.take_power(record["mono_ns"], record["power_watts"])

    def fail(self, sensor: str, devices: Sequence[str]) -> None:
        """A reading of these devices failed: their last one must not pass for a new one."""
        self.errors[sensor] = self.errors.get(sensor, 0) + 1
        for name in devices:
            if name in self.devices:
                self.devices[name].fail()

    def _joules_of(self, device: str) -> Joules:
        if device not in self.devices:
            self.devices[device] = Joules(Device(device=device, component="cpu", name=device, counted=False))
        return self.devices[device]


def sparkline(values: Sequence[float]) -> str:
    """From 0 to the highest, so that a flat line at the top is a steady load and not noise made large."""
    top = max(values, default=0.0)
    if top <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(len(_BARS) - 1, int(max(0.0, value) / top * len(_BARS)))] for value in values)
