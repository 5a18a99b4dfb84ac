"""Time and memory of a report over a day of eight GPUs sampled ten times a second.

The trace is simulated and written as Parquet, as a closed run leaves it; one reading in it is a peak that lasts a
tenth of a second. The report is written in a separate process, timed from start to exit.

python benchmarks/report_scale.py --hours 24 --gpus 8 --hz 10
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from joulelab.meter.figures import EnergyFigure, missing
from joulelab.meter.trace import MISFIT, header, write_parquet
from joulelab.runs.paths import RunPaths, write_json
from joulelab.runs.record import Attempt, EnergyByComponent, RunRecord, Segment, StageRecord, Totals

NS = 1_000_000_000
FIRST_NS = 1_000 * NS
HOST = "simulated"
PEAK_W = 987.0
_CHUNK_ROWS = 400_000


def power_w(seconds: np.ndarray, gpu: int) -> np.ndarray:
    """Steps of a training loop with an evaluation every ten minutes, a little different on each card."""
    evaluating = (seconds % 600) > 540
    steps = 520 + 60 * np.sin(2 * np.pi * seconds / 7.3 + gpu)
    return np.where(evaluating, 260 + 10 * np.sin(seconds), steps) + 3 * gpu


def write_trace(path: Path, hours: float, gpus: int, hz: float) -> int:
    """Rows in the order of time, as a recorder writes them; returns how many."""
    path.parent.mkdir(parents=True)
    devices = [
        {"device": f"gpu:{n}", "component": "gpu", "name": "Simulated GPU", "counted": True, "refresh_s": 0.1}
        | {"gain_error_rel": 0.05, "wrap_j": None, "facts": {}}
        for n in range(gpus)
    ]
    facts = {"interval_s": 1 / hz, "wall_minus_mono_s": 0.0, "devices": devices, "missing": [], "mono_ns": FIRST_NS}
    write_parquet(path, [header(**facts)])
    first = pq.read_table(path)
    ticks = int(hours * 3600 * hz)
    per_chunk = _CHUNK_ROWS // gpus
    counter_j = np.zeros(gpus)
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        writer.write_table(first)
        for begin in range(0, ticks, per_chunk):
            tick = np.arange(begin, min(ticks, begin + per_chunk))
            watts = np.stack([power_w(tick / hz, gpu) for gpu in range(gpus)], axis=1)
            if begin <= ticks // 2 < begin + per_chunk:
                watts[ticks // 2 - begin, 0] = PEAK_W
            energy = counter_j + np.cumsum(watts, axis=0) / hz
            counter_j = energy[-1]
            writer.write_table(_chunk(first.schema, tick, watts, energy, hz))
    return ticks * gpus


def _chunk(schema: Any, tick: np.ndarray, watts: np.ndarray, energy: np.ndarray, hz: float) -> Any:
    gpus, rows = watts.shape[1], watts.size
    mono_ns = np.repeat(FIRST_NS + (tick * (NS / hz)).astype(np.int64), gpus)
    names = pa.array([f"gpu:{n}" for n in range(gpus)])
    known = {
        "kind": pa.array(["gpu"]).take(pa.array(np.zeros(rows, dtype=np.int64))),
        "device": names.take(pa.array(np.tile(np.arange(gpus), len(tick)))),
        "mono_ns": pa.array(mono_ns),
        "counter_mono_ns": pa.array(mono_ns),
        "power_watts": pa.array(watts.ravel()),
        "energy_counter_j": pa.array(energy.ravel()),
        "throttle_reasons": pa.array(np.where(watts.ravel() > 590, 4, 0)),
        MISFIT: pa.array(np.zeros(rows, dtype=bool)),
    }
    return pa.table([known.get(name, pa.nulls(rows, schema.field(name).type)) for name in schema.names], schema=schema)


def write_run(store: Path, hours: float, gpus: int) -> RunPaths:
    """A record with a stage for every ten minutes of training and one for all evaluations."""
    paths = RunPaths(store / "simulated-20260101T000000Z-0000")
    gone = missing("not simulated")
    figure = EnergyFigure(energy_j=500.0 * gpus * hours * 3600, method="counter", half_width_j=1.0, sources=("gpu:0",))
    energy = EnergyByComponent(gpu=figure, cpu=gone, dram=gone, cpu_estimate=gone)
    pieces = int(hours * 6)

    def segments(start_s: float, length_s: float) -> tuple[Segment, ...]:
        starts = [FIRST_NS + int((600 * piece + start_s) * NS) for piece in range(pieces)]
        facts = {"attempt": 1, "host": HOST, "started_at": "", "duration_s": length_s}
        return tuple(Segment(start_ns=at, end_ns=at + int(length_s * NS), **facts) for at in starts)

    stages = [
        StageRecord(
            name=f"model.{activity}",
            role="student",
            activity=activity,
            number=number,
            status="done",
            segments=parts,
            duration_s=sum(part.duration_s for part in parts),
            energy=energy,
            energy_j=figure.energy_j,
            best=figure,
            above_idle_j=None,
            mean_power_w=500.0 * gpus,
            peak_power_w=PEAK_W,
        )
        for number, (activity, parts) in enumerate((("train", segments(0, 540)), ("evaluate", segments(540, 60))), 1)
    ]
    whole_s = hours * 3600
    totals = Totals(
        policy="measured",
        energy_j=figure.energy_j,
        figure=figure,
        best=figure,
        duration_s=whole_s,
        idle_power_w=100.0 * gpus,
        above_idle_j=None,
        **{name: getattr(energy, name) for name in EnergyByComponent.model_fields},
    )
    attempt = Attempt(number=1, host=HOST, boot_id="b", started_at="", duration_s=whole_s, closed=True, energy=energy)
    record = RunRecord(
        run_id=paths.run_id,
        name="simulated",
        label="simulated",
        status="done",
        created_at="2026-01-01T00:00:00+00:00",
        spec={"seed": 0},
        attempts=(attempt,),
        stages=tuple(stages),
        totals=totals,
    )
    write_json(paths.record, record)
    return paths


def timed_report(folder: Path) -> tuple[float, float, float]:
    """Seconds, the most memory (MiB) and the CPU seconds of the command, from its start to its end."""
    began = time.monotonic()
    child = subprocess.Popen([sys.executable, "-m", "joulelab", "report", str(folder)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"the report failed with {os.waitstatus_to_exitcode(status)}")
    return time.monotonic() - began, usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--hz", type=float, default=10.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = write_run(Path(folder), options.hours, options.gpus)
        trace = paths.trace(HOST, 1).with_suffix(".parquet")
        rows = write_trace(trace, options.hours, options.gpus, options.hz)
        seconds, memory_mib, cpu_s = timed_report(paths.folder)
        page = paths.report.read_text(encoding="utf-8")
        found = {
            "rows": rows,
            "trace_mb": trace.stat().st_size / 1e6,
            "seconds": seconds,
            "cpu_s": cpu_s,
            "memory_mib": memory_mib,
            "page_mb": len(page.encode()) / 1e6,
            "peak_kept": bool(re.search(rf'"w": ?{PEAK_W}', page)),
        }
    print(f"{options.hours:g} h, {options.gpus} GPUs, {options.hz:g} Hz: {rows:,} readings, {found['trace_mb']:.0f} MB")
    print(
        f"report in {seconds:.1f} s ({cpu_s:.1f} s of CPU) and {memory_mib:.0f} MiB, page of {found['page_mb']:.2f} MB",
        end="; ",
    )
    print(f"the one peak of {PEAK_W:g} W is {'in it' if found['peak_kept'] else 'LOST'}")
    print(json.dumps({"benchmark": "report_scale", "results": found}))


if __name__ == "__main__":
    main()
