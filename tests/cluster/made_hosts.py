"""A run on several hosts whose joules and clocks are known exactly, written as recorders and ranks write it."""

import json
from pathlib import Path

from joulelab.clock import NS
from joulelab.runs.paths import RunPaths, write_json
from joulelab.runs.record import RunRecord

SECONDS = 40
IDLE_S, TRAIN_S = 10, 25
"""Idle from 0 to 10, training from 12 to 37, ten steps of which the ranks' own work is told apart."""


def write_lines(path: Path, lines) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def made_run(folder, powers_w, *, clocks_s=None, own_s=None, ranks_per_host=1, attempt=1):
    """One host per entry of `powers_w`; `clocks_s` are what their clocks are ahead, `own_s` a rank's work per step."""
    paths = RunPaths(folder)
    for number, power_w in enumerate(powers_w):
        host, boot_ns = f"node{number + 1:04d}", (1_000 + 77 * number) * NS  # hosts were booted at different times
        ahead_s = clocks_s[number] if clocks_s else 0.0
        write_lines(paths.trace(host, attempt), trace_lines(host, boot_ns, power_w, ahead_s))
        for local in range(ranks_per_host):
            rank = number * ranks_per_host + local
            work_s = own_s[rank] if own_s else 0.5
            write_lines(paths.events(host, rank, attempt), event_lines(boot_ns, work_s, first=rank == 0))
    write_json(paths.environment, {"host": "node0001", "gpus": [{"name": "H200"}]})
    spec = {"energy": {"total_energy_policy": "gpu_only"}}
    opened = RunRecord(
        run_id=paths.run_id,
        name="run",
        label="run",
        status="running",
        created_at="2026-01-01T00:00:00+00:00",
        spec=spec,
    )
    write_json(paths.record, opened)
    return paths


def trace_lines(host, boot_ns, power_w, ahead_s):
    device = {
        "device": f"gpu:GPU-{host}", "component": "gpu", "name": "H200", "counted": True, "wrap_j": None,
        "refresh_s": 0.1, "gain_error_rel": 0.05, "facts": {},
    }  # fmt: skip
    header = {
        "kind": "header", "timestamp": "2026-01-01T00:00:00+00:00", "mono_ns": boot_ns, "host": host, "boot_id": host,
        "interval_s": 0.5, "wall_minus_mono_s": 1.7e9 - boot_ns / NS + ahead_s, "devices": [device],
        "missing": [{"component": "cpu", "reason": "no RAPL", "fix": ""}],
    }  # fmt: skip
    readings = [
        {
            "kind": "gpu", "mono_ns": boot_ns + tick * NS // 2, "device": device["device"], "power_watts": power_w,
            "energy_counter_j": power_w * tick / 2,
        }
        for tick in range(2 * SECONDS + 1)
    ]  # fmt: skip
    return [header, *readings, {"kind": "end", "mono_ns": boot_ns + SECONDS * NS, "reason": "stop"}]


def event_lines(boot_ns, own_s, first):
    def at(second):
        return boot_ns + round(second * NS)

    def stage(name, begin, end):
        yield {"kind": "stage", "edge": "begin", "stage": name, "mono_ns": at(begin)}
        yield {"kind": "stage", "edge": "end", "stage": name, "mono_ns": at(end)}
        yield {"kind": "stage_closed", "stage": name, "status": "done"}

    def phase(number, mean_s):
        return {"stage": 1, "phase": number, "count": 10, "sum_s": 10 * mean_s, "max_s": mean_s, "bins": {"0": 10}}

    names = [
        {"kind": "name", "of": "stage", "number": 1, "name": "student.train"},
        *({"kind": "name", "of": "phase", "number": n, "name": name} for n, name in [(1, "step"), (2, "forward")]),
    ]
    yield {"kind": "run", "edge": "begin", "mono_ns": at(0)}
    yield from stage("idle.before", 0, IDLE_S)
    yield from names
    yield from stage("student.train", 12, 12 + TRAIN_S)
    yield {"kind": "progress", "stage": "student.train", "counts": {"samples": 1000, "tokens": 50_000}}
    if first:
        yield {"kind": "result", "name": "student.accuracy", "result": {"value": 0.9}}
    yield {"kind": "phases", "marks_read": 20, "marks_lost": 0, "rows": [phase(1, 2.5), phase(2, own_s)]}
    yield {"kind": "run", "edge": "end", "mono_ns": at(SECONDS)}
