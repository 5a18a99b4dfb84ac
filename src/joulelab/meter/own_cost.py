"""What measuring itself costs here: the recorder's share of a core, a durable write, a look at the clock."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import psutil

from joulelab.meter.calibrate import CallCost, call_cost
from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors.cpu_estimate import cpu_seconds
from joulelab.meter.sensors.process_tree import is_recorder
from joulelab.meter.session import Meter


def fsync_cost(folder: Path, writes: int = 20) -> CallCost | None:
    """One line written and synced, where runs are kept: what a durable mark costs. None where it cannot be written."""
    line = b"x" * 200 + b"\n"
    durations = []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".joulelab-fsync-") as file:
            for _ in range(writes):
                before = time.perf_counter()
                os.write(file.fileno(), line)
                os.fsync(file.fileno())
                durations.append(time.perf_counter() - before)
    except OSError:
        return None
    return call_cost(durations)


def clock_cost(calls: int = 2000) -> CallCost | None:
    durations = []
    for _ in range(calls):
        before = time.perf_counter()
        time.monotonic_ns()
        durations.append(time.perf_counter() - before)
    return call_cost(durations)


def recorder_cpu_share(config: EnergyConfig, seconds: float = 3.0) -> float | None:
    """CPU time of a recorder at work over wall time, start-up left out; None where it cannot be seen."""
    with tempfile.TemporaryDirectory(prefix="joulelab-doctor-") as folder:
        meter = Meter(Path(folder) / "trace.jsonl", Path(folder) / "events.jsonl", config)
        meter.start()
        try:
            time.sleep(0.5)
            before = _recorder_seconds()
            started = time.monotonic()
            time.sleep(seconds)
            after, elapsed = _recorder_seconds(), time.monotonic() - started
        finally:
            meter.stop()
    return None if before is None or after is None else (after - before) / elapsed


def _recorder_seconds() -> float | None:
    children = psutil.Process().children(recursive=True)
    return next((cpu_seconds(child) for child in children if is_recorder(child)), None)
