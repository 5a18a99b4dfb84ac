"""Cost of a run on many nodes after it ended: merging its traces, and its size in the store.

    python benchmarks/merge_scale.py --nodes 1000 --minutes 10

Writes a run as that many recorders would have written it (8 GPUs each, a reading every `--interval` seconds with the
energy counter in it, one rank a GPU whose phases are drained every 10 s), then assembles its record from the files and
prints sizes and times for people and as one line of JSON. `--minutes` is short by default: time and bytes grow with it
in proportion, which two lengths show.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from joulelab.clock import NS, iso
from joulelab.runs.assemble import assemble
from joulelab.runs.paths import RunPaths, write_json
from joulelab.runs.record import RunRecord

PHASES_S = 10.0
STAGE = "student.train"
POWER_W = 600.0


def device(host: str, gpu: int) -> dict[str, Any]:
    return {
        "device": f"gpu:GPU-{host}-{gpu}", "component": "gpu", "name": "NVIDIA H200", "counted": True, "wrap_j": None,
        "refresh_s": 0.1, "gain_error_rel": 0.05, "facts": {},
    }  # fmt: skip


def trace_lines(
    host: str, gpus: int, seconds: float, interval_s: float, power_w: float = POWER_W
) -> Iterator[dict[str, Any]]:
    devices = [device(host, gpu) for gpu in range(gpus)]
    yield {
        "kind": "header", "timestamp": iso(1.7e9), "mono_ns": NS, "schema_version": 1, "host": host, "boot_id": host,
        "pid": 1, "program_pid": 1, "interval_s": interval_s, "wall_minus_mono_s": 1.7e9, "devices": devices,
        "missing": [{"component": "cpu", "reason": "simulated", "fix": ""}],
    }  # fmt: skip
    for tick in range(round(seconds / interval_s) + 1):
        second = tick * interval_s
        for one in devices:
            line = {
                "kind": "gpu", "timestamp": iso(1.7e9 + second), "mono_ns": round((1 + second) * NS),
                "device": one["device"], "gpu_uuid": one["device"][4:], "gpu_index": 0, "gpu_name": "NVIDIA H200",
                "power_watts": POWER_W, "memory_used_MB": 70_000.0, "gpu_utilization_percent": 98,
                "memory_utilization_percent": 60, "temperature_C": 60, "sm_clock_MHz": 1980, "throttle_reasons": 0,
            }  # fmt: skip
            yield {**line, "energy_counter_j": POWER_W * second, "counter_mono_ns": round((1 + second) * NS)}
    yield {"kind": "end", "timestamp": iso(1.7e9 + seconds), "mono_ns": round((1 + seconds) * NS), "reason": "stop"}


def event_lines(seconds: float) -> Iterator[dict[str, Any]]:
    def at(second: float) -> dict[str, Any]:
        return {"timestamp": iso(1.7e9 + second), "mono_ns": round((1 + second) * NS)}

    yield {"kind": "run", "edge": "begin", **at(0)}
    yield {"kind": "name", "of": "stage", "number": 1, "name": STAGE, **at(0)}
    for number, name in enumerate(("step", "input", "forward", "backward", "optimizer_step"), 1):
        yield {"kind": "name", "of": "phase", "number": number, "name": name, **at(0)}
    yield {"kind": "stage", "edge": "begin", "stage": STAGE, **at(1)}
    rows = [
        {"stage": 1, "phase": phase, "count": 50, "sum_s": 5.0, "max_s": 0.12, "bins": {"-20": 30, "-19": 20}}
        for phase in range(1, 6)
    ]
    for number in range(int(seconds / PHASES_S)):
        yield {"kind": "phases", "marks_read": 250 * number, "marks_lost": 0, "rows": rows, **at(PHASES_S * number)}
    yield {"kind": "stage", "edge": "end", "stage": STAGE, **at(seconds - 1)}
    yield {"kind": "stage_closed", "stage": STAGE, "status": "done", **at(seconds - 1)}
    yield {"kind": "run", "edge": "end", **at(seconds)}


def write_run(folder: Path, nodes: int, gpus: int, seconds: float, interval_s: float) -> RunPaths:
    """Every host's lines are the same but for its name: one text is made, and written under each name."""
    paths = RunPaths(folder)
    mark = "node-NNNNN"
    trace = "".join(
        json.dumps(line, separators=(",", ":")) + "\n" for line in trace_lines(mark, gpus, seconds, interval_s)
    )
    events = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in event_lines(seconds))
    paths.trace("x", 1).parent.mkdir(parents=True)
    paths.events("x", 0, 1).parent.mkdir(parents=True)
    for node in range(nodes):
        host = f"node-{node:05d}"
        paths.trace(host, 1).write_text(trace.replace(mark, host))
        for gpu in range(gpus):
            paths.events(host, node * gpus + gpu, 1).write_text(events)
    names = {"run_id": paths.run_id, "name": "scale", "label": "scale"}
    spec = {"energy": {"total_energy_policy": "gpu_only"}}
    write_json(paths.record, RunRecord(**names, status="running", created_at=iso(1.7e9), spec=spec))
    return paths


def _text(lines: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def measured(nodes: int, gpus: int, minutes: float, interval_s: float) -> dict[str, Any]:
    root = Path(tempfile.mkdtemp(prefix="joulelab-scale-"))
    try:
        started = time.perf_counter()
        paths = write_run(root / "run", nodes, gpus, 60 * minutes, interval_s)
        written = time.perf_counter()
        files = [path for path in paths.folder.rglob("*") if path.is_file()]
        started_cpu = time.process_time()
        record = assemble(paths, "done")
        assembled, merge_cpu_s = time.perf_counter(), time.process_time() - started_cpu
        write_json(paths.record, record)
        opened = time.perf_counter()
        RunRecord.model_validate_json(paths.record.read_text())
        read = time.perf_counter()
        assert record.totals is not None and record.totals.energy_j is not None
        expected_j = nodes * gpus * POWER_W * 60 * minutes
        return {
            "nodes": nodes, "gpus": gpus, "minutes": minutes, "interval_s": interval_s, "files": len(files),
            "trace_mb": round(sum(path.stat().st_size for path in paths.trace("x", 1).parent.iterdir()) / 1e6, 1),
            "events_mb": round(sum(path.stat().st_size for path in paths.events("x", 0, 1).parent.iterdir()) / 1e6, 1),
            "write_s": round(written - started, 2), "merge_s": round(assembled - written, 2),
            "merge_cpu_s": round(merge_cpu_s, 2),
            "record_mb": round(paths.record.stat().st_size / 1e6, 2), "read_record_s": round(read - opened, 3),
            "error_rel": round(record.totals.energy_j / expected_j - 1, 6),
            "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        }  # fmt: skip
    finally:
        shutil.rmtree(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--interval", type=float, default=0.5)
    requested = parser.parse_args()
    for nodes in requested.nodes:
        row = measured(nodes, requested.gpus, requested.minutes, requested.interval)
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        print(json.dumps(row))


if __name__ == "__main__":
    main()
