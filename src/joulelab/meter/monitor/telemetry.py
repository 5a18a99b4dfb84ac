"""Telemetry from inside a training loop: one CSV row per GPU whenever the loop asks (`distill_power.csv`).

It is independent of the recorder, for scripts that want a small table next to their checkpoints. Its deadlines are
training steps; the sensors are read as in every other recording (sampling.py), but only by calls that take
microseconds. Each row is on the disk before `log_once()` returns. Without a GPU the rows keep the CPU column and leave
the GPU columns empty, so a plot of CPU load still works and an integral over `power_watts` adds nothing. No failure
here ends a training.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType

from joulelab import clock, lookup
from joulelab.errors import UsageError
from joulelab.meter.config import EnergyConfig
from joulelab.meter.sampling import Reading, SamplingLoop, SensorReader
from joulelab.meter.sensors import SensorUnavailable

GPU_COLUMNS = (
    "gpu_index",
    "gpu_name",
    "power_watts",
    "memory_used_MB",
    "memory_total_MB",
    "gpu_utilization_percent",
    "memory_utilization_percent",
    "temperature_C",
)
CPU_COLUMN = "cpu_utilization_percent"
COLUMNS = ("timestamp", "elapsed_sec", *GPU_COLUMNS, CPU_COLUMN)
FILE_NAME = "distill_power.csv"
log = logging.getLogger("joulelab")

Row = dict[str, object]


class Telemetry:
    """Logs at the start, every `every` steps through `step()`, and whenever `log_once()` is called."""

    def __init__(self, path: str | Path = FILE_NAME, every: int = 0, gpus: str = "auto") -> None:
        if every < 0:
            raise UsageError(f"every={every}: expected 0 (only `log_once()`) or a number of steps")
        self.path = Path(path)
        self.every = every
        self._gpus_wanted = gpus
        self._loop = SamplingLoop(self._write_rows)
        self._file = -1
        self._began_s = 0.0
        self._warned: set[str] = set()

    def __enter__(self) -> Telemetry:
        self._file = _open_table(self.path)
        self._began_s = time.monotonic() - _age_s(self.path)
        for name in ("host", "nvml"):
            self._attempt(f"no {name} telemetry", partial(self._open_sensor, name))
        self.log_once()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._loop.close()

    def step(self, number: int) -> None:
        """Call after every step; logs where the step's number is a multiple of `every`."""
        if self.every and number % self.every == 0:
            self.log_once()

    def log_once(self) -> None:
        """One row per GPU now, durable when this returns; outside `with` it does nothing."""
        if self._file >= 0:
            self._attempt(f"{self.path} was not written", lambda: self._write_rows(self._loop.read_all("read_quick")))

    def _open_sensor(self, name: str) -> None:
        config = EnergyConfig(gpus=self._gpus_wanted)
        reader = SensorReader(name, partial(lookup.SENSORS.resolve(name), config, os.getpid()))
        try:
            reader.open()
        except SensorUnavailable:  # no GPU is not a failure: the columns are empty
            return
        self._loop.readers.append(reader)

    def _write_rows(self, readings: list[Reading]) -> None:
        lines = [line for reading in readings for line in reading.lines]
        for line in lines:
            if line["kind"] == "gap":
                self._warn(f"{line['device']} cannot be read", line["reason"])
        shared: Row = {
            "timestamp": clock.iso(time.time()),
            "elapsed_sec": round(time.monotonic() - self._began_s, 3),
            "cpu_utilization_percent": next((line.get(CPU_COLUMN) for line in lines if line["kind"] == "host"), None),
        }
        gpus = [{name: line.get(name) for name in GPU_COLUMNS} for line in lines if line["kind"] == "gpu"]
        _write(self._file, _text([{**shared, **gpu} for gpu in gpus] or [shared]))

    def _attempt(self, complaint: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._warn(complaint, f"{type(error).__name__}: {error}")

    def _warn(self, complaint: str, reason: str) -> None:
        """Once for each complaint, however often it comes up."""
        if complaint not in self._warned:
            self._warned.add(complaint)
            log.warning("%s: %s", complaint, reason)


telemetry = Telemetry


def _open_table(path: Path) -> int:
    """Open a new table, or the same one after a resume; a different file of that name is refused."""
    header = _text([dict(zip(COLUMNS, COLUMNS, strict=True))])
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else b""
    if before and not before.startswith(header):
        raise UsageError(f"{path} is not a telemetry table: its first line differs", "give another path")
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    if not before:
        _write(file, header)
    elif not before.endswith(b"\n"):
        _write(file, b"\n")  # a row truncated by a kill stays one broken row
    return file


def _age_s(path: Path) -> float:
    """Seconds since the table's first row, so that elapsed time continues when a table is appended to."""
    with path.open(encoding="utf-8", newline="") as file:
        first = next(csv.DictReader(file), {})
    try:
        return max(0.0, time.time() - datetime.fromisoformat(first.get("timestamp") or "").timestamp())
    except ValueError:  # no row yet, or one that a kill truncated
        return 0.0


def _text(rows: list[Row]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
    os.fsync(file)
