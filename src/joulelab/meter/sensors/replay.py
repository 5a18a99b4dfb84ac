"""A recorded trace as a sensor: its devices, and its lines at their original cadence with times moved to now.

For demos of the live view, tests of readers, and to reproduce a bug without the original machine. Energy stays as it
was recorded; at a speed other than 1 power is multiplied by the speed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from joulelab import clock
from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import Device, Line, SensorUnavailable
from joulelab.meter.trace import read_lines

# Lines about the recorder, not about a device; the replaying recorder writes its own.
RECORDERS_OWN = ("header", "devices", "end")
SHORTEST_INTERVAL_S = 0.02


class ReplaySensor:
    def __init__(self, config: EnergyConfig, pid: int) -> None:
        self.interval_s = config.sample_interval_s
        self._path = Path(config.replay_trace)
        self._named = bool(config.replay_trace)
        self._speed = config.replay_speed
        self._lines: Iterator[Line] = iter(())
        self._next: Line | None = None
        self._recorded_start_ns = 0
        self._start_ns = 0

    def open(self) -> list[Device]:
        if not self._named or not self._path.is_file():
            reason = f"there is no trace at {self._path}" if self._named else "no trace to replay is named"
            raise SensorUnavailable("replay", reason, "energy.replay_trace=<folder of a run>/trace/<host>.0.jsonl")
        self._lines = read_lines(self._path)
        header = next(self._lines, {})
        if header.get("kind") != "header":
            raise SensorUnavailable("replay", f"{self._path} does not begin with a trace header", "")
        self.interval_s = max(SHORTEST_INTERVAL_S, min(self.interval_s, header.get("interval_s", 1.0) / self._speed))
        self._recorded_start_ns, self._start_ns = int(header["mono_ns"]), time.monotonic_ns()
        self._advance()
        return [self._device(device) for device in header.get("devices", ())]

    def _device(self, recorded: dict[str, Any]) -> Device:
        known = {field.name for field in fields(Device)}
        device = Device(**{name: value for name, value in recorded.items() if name in known})
        facts = {**device.facts, "replayed_from": str(self._path), "replay_speed": self._speed}
        return replace(device, facts=facts)

    def read(self) -> list[Line]:
        lines: list[Line] = []
        while self._next is not None and self._moved(self._next["mono_ns"]) <= time.monotonic_ns():
            lines.append(self._moved_line(self._next))
            self._advance()
        return lines

    def _advance(self) -> None:
        self._next = next((line for line in self._lines if line.get("kind") not in RECORDERS_OWN), None)

    def _moved(self, mono_ns: int) -> int:
        return self._start_ns + round((mono_ns - self._recorded_start_ns) / self._speed)

    def _moved_line(self, line: Line) -> Line:
        now = clock.now()
        moved = {**line, "mono_ns": self._moved(line["mono_ns"])}
        moved["timestamp"] = clock.iso(now.wall_s - (now.mono_ns - moved["mono_ns"]) / clock.NS)
        if "counter_mono_ns" in line:
            moved["counter_mono_ns"] = self._moved(line["counter_mono_ns"])
        if "power_watts" in line:
            moved["power_watts"] = line["power_watts"] * self._speed
        return moved | self._moved_samples(line, now) if line["kind"] == "samples" else moved

    def _moved_samples(self, line: Line, now: clock.Stamp) -> Line:
        wall_us = round(now.wall_s * 1e6)
        # stamps of samples are wall times: the recorded pair of clocks converts them to monotonic times, these are
        # moved, and the current pair converts them back
        recorded_ns = [line["wall_us_mono_ns"] - (line["wall_us"] - stamp) * 1000 for stamp in line["sample_us"]]
        return {
            "wall_us": wall_us,
            "wall_us_mono_ns": now.mono_ns,
            "sample_us": [wall_us + (self._moved(stamp_ns) - now.mono_ns) // 1000 for stamp_ns in recorded_ns],
            "sample_mw": [round(power * self._speed) for power in line["sample_mw"]],
        }

    def close(self) -> None:
        self._next = None
