"""Joules while they are being spent, from the trace's tail: each new line is read once.

A budget asks every second for hours; reading the whole trace each time would cost more and more. The figure is the sum
of the devices' counters (or of polled power where a card has none) and lags by a second or so, which `read_now` fills
with the last power; what ends up in the record is computed afterwards, from everything.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from joulelab.meter.monitoring.tally import Joules
from joulelab.meter.sensors import Device


class LiveJoules:
    def __init__(self, trace: Path) -> None:
        self._trace = trace
        self._offset = 0
        self._devices: dict[str, Joules] = {}

    def read(self, estimates: bool = False) -> float | None:
        """Joules of all counted devices since the trace began; None where no sensor told any."""
        self._take_new_lines()
        chosen = self._chosen(estimates)
        return sum(joules.energy_j for joules in chosen) if chosen else None

    def read_now(self, estimates: bool = False) -> float | None:
        """The same up to this moment: what the sensors have not reported yet is counted at their last power."""
        self._take_new_lines()
        now_ns = time.monotonic_ns()
        chosen = self._chosen(estimates)
        return sum(joules.energy_at(now_ns) for joules in chosen) if chosen else None

    def power_w(self, estimates: bool = False) -> float | None:
        """The latest power of the same devices, as far as the lines were read."""
        found = [joules.power_w for joules in self._chosen(estimates) if joules.power_w is not None]
        return sum(found) if found else None

    def _chosen(self, estimates: bool) -> list[Joules]:
        return [
            joules
            for joules in self._devices.values()
            if joules.device.counted and joules.told and (estimates or joules.device.component != "cpu_estimate")
        ]

    def _take_new_lines(self) -> None:
        if not self._trace.exists():
            return
        with self._trace.open("rb") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return  # still being written: read again next time
                self._offset += len(raw)
                self._take(raw)

    def _take(self, raw: bytes) -> None:
        try:
            line = json.loads(raw)
        except ValueError:  # cut off by a full disk
            return
        kind = line.get("kind")
        if kind in ("header", "devices"):
            self._take_devices(line)
        elif kind == "gpu":
            self._take_gpu(line)
        elif kind == "rapl":
            for domain, energy_j in line["rapl"].items():
                self._count(f"rapl:{domain}", line["mono_ns"], energy_j)
        elif kind == "counters":
            for device, energy_j in line["counters_j"].items():
                self._count(device, line["mono_ns"], energy_j)
        elif kind == "estimate" and line["device"] in self._devices:
            watts = self._devices[line["device"]].device.facts["w_per_thread"]
            self._count(line["device"], line["mono_ns"], line["busy_thread_s"] * watts)

    def _take_devices(self, line: dict[str, Any]) -> None:
        for device in line["devices"]:
            self._devices.setdefault(device["device"], Joules(Device(**device)))

    def _take_gpu(self, line: dict[str, Any]) -> None:
        joules = self._devices.get(line["device"])
        if joules is None:
            return
        if line.get("energy_counter_j") is not None:
            joules.take_counter(line.get("counter_mono_ns") or line["mono_ns"], line["energy_counter_j"])
        if line.get("power_watts") is not None:
            joules.take_power(line["mono_ns"], line["power_watts"])

    def _count(self, device: str, mono_ns: int, energy_j: float) -> None:
        if device in self._devices:
            self._devices[device].take_counter(mono_ns, energy_j)
