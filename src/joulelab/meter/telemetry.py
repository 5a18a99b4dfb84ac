"""Telemetry from inside a training loop: one CSV row per GPU whenever the loop asks (`distill_power.csv`).

Beside the recorder, for scripts that want a small table next to their checkpoints. Only NVML's cheap calls are made
(microseconds; never the energy counter, which takes milliseconds), and each row is on the disk before `log_once()`
returns. Without a GPU the rows keep the CPU column and leave the GPU columns empty, so a plot of CPU load still works
and an integral over `power_watts` has nothing to add up. Nothing that goes wrong here ends a training.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from joulelab import clock, lookup
from joulelab.errors import UsageError
from joulelab.meter.sensors.nvml_card import power_field, power_w
from joulelab.units import BYTES_PER_MB

COLUMNS = (
    "timestamp",
    "elapsed_sec",
    "gpu_index",
    "gpu_name",
    "power_watts",
    "memory_used_MB",
    "memory_total_MB",
    "gpu_utilization_percent",
    "memory_utilization_percent",
    "temperature_C",
    "cpu_utilization_percent",
)
FILE_NAME = "distill_power.csv"
log = logging.getLogger("joulelab")

Row = dict[str, object]


class Telemetry:
    """Logs at the start, every `every` steps through `step()`, and whenever `log_once()` is called."""

    def __init__(self, path: str | Path = FILE_NAME, every: int = 0, gpus: str = "auto") -> None:
        if every < 0:
            raise UsageError(f"every={every}: expected 0 (only when asked) or a number of steps")
        self.path = Path(path)
        self.every = every
        self._gpus_wanted = gpus
        self._gpus: list[_Gpu] = []
        self._file = -1
        self._began_s = 0.0
        self._complained: set[str] = set()

    def __enter__(self) -> Telemetry:
        self._file = _open_table(self.path)
        self._began_s = time.monotonic() - _age_s(self.path)
        self._attempt("no GPU telemetry", self._open_gpus)
        self._attempt("no CPU telemetry", _cpu_percent)  # the first call only sets the start of the next interval
        self.log_once()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._gpus:
            self._gpus = []
            self._attempt("NVML did not close", _nvml().nvmlShutdown)

    def step(self, number: int) -> None:
        """Call after every step; logs where the step's number is a multiple of `every`."""
        if self.every and number % self.every == 0:
            self.log_once()

    def log_once(self) -> None:
        """One row per GPU now, durable when this returns; outside `with` it does nothing."""
        if self._file < 0:
            return
        shared: Row = {
            "timestamp": clock.iso(time.time()),
            "elapsed_sec": round(time.monotonic() - self._began_s, 3),
            "cpu_utilization_percent": self._attempt("no CPU reading", _cpu_percent),
        }
        rows = [{**shared, **gpu.read(self._attempt)} for gpu in self._gpus] or [shared]
        self._attempt(f"{self.path} was not written", lambda: _append(self._file, rows))

    def _open_gpus(self) -> None:
        from joulelab.meter.config import EnergyConfig
        from joulelab.meter.sensors import SensorUnavailable

        sensor = lookup.SENSORS.resolve("nvml")(EnergyConfig(gpus=self._gpus_wanted), os.getpid())
        try:
            devices = sensor.open()
        except SensorUnavailable:  # no GPU is no mishap: the rows say so by their empty columns
            return
        try:
            _nvml().nvmlInit()
            self._gpus = [_Gpu(int(device.facts["gpu_index"]), device.name) for device in devices]
        finally:
            sensor.close()

    def _attempt(self, complaint: str, call: Callable[[], Any]) -> Any:
        """The call's answer, or None and one warning per kind of trouble: telemetry must not end a training."""
        try:
            return call()
        except Exception as error:
            if complaint not in self._complained:
                self._complained.add(complaint)
                log.warning("%s: %s: %s", complaint, type(error).__name__, error)
            return None


telemetry = Telemetry


class _Gpu:
    def __init__(self, index: int, name: str) -> None:
        self._index = index
        self._name = name
        self._handle = _nvml().nvmlDeviceGetHandleByIndex(index)
        self._field = power_field(_nvml(), self._handle)

    def read(self, attempt: Callable[[str, Callable[[], Any]], Any]) -> Row:
        """Each value by itself: a card that has lost one sensor still shows the others."""
        nvml, handle, where = _nvml(), self._handle, f"GPU {self._index}"
        memory = attempt(f"{where}: no memory reading", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        use = attempt(f"{where}: no utilisation", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        return {
            "gpu_index": self._index,
            "gpu_name": self._name,
            "power_watts": attempt(f"{where}: no power reading", lambda: power_w(nvml, handle, self._field)),
            "memory_used_MB": None if memory is None else round(memory.used / BYTES_PER_MB, 1),
            "memory_total_MB": None if memory is None else round(memory.total / BYTES_PER_MB, 1),
            "gpu_utilization_percent": None if use is None else use.gpu,
            "memory_utilization_percent": None if use is None else use.memory,
            "temperature_C": attempt(
                f"{where}: no temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
        }


def _nvml() -> Any:
    import pynvml

    return pynvml


def _cpu_percent() -> float:
    import psutil

    return float(psutil.cpu_percent(None))


def _open_table(path: Path) -> int:
    """A new table, or the same table again after a resume; another file of that name is left alone."""
    header = _text([dict(zip(COLUMNS, COLUMNS, strict=True))])
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else b""
    if before and not before.startswith(header):
        raise UsageError(f"{path} is another table: its first line is not that of telemetry", "give another path")
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    if not before:
        _write(file, header)
    elif not before.endswith(b"\n"):
        _write(file, b"\n")  # a row cut off by a kill stays one broken row
    return file


def _age_s(path: Path) -> float:
    """Seconds since the table's first row: whoever goes on in it counts from there, so that time never falls back."""
    with path.open(encoding="utf-8", newline="") as file:
        first = next(csv.DictReader(file), {})
    try:
        return max(0.0, time.time() - datetime.fromisoformat(first.get("timestamp") or "").timestamp())
    except ValueError:  # no row yet, or one that a kill cut off
        return 0.0


def _append(file: int, rows: list[Row]) -> None:
    _write(file, _text(rows))


def _text(rows: list[Row]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
    os.fsync(file)
