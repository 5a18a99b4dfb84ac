"""Energy of a running run: up to where every device has reported, so that the last half second is no missing data."""

import json

import pytest

from joulelab.clock import NS
from joulelab.meter.figures import amount_text
from joulelab.runs.assemble import assemble
from joulelab.runs.paths import RunPaths, write_json
from joulelab.runs.record import RunRecord

BEGIN_NS = 1_000 * NS
GPU_W, CPU_W = 300.0, 50.0


def made_run(folder, gpu_s, cpu_s):
    """A GPU and a package; the last reading of each is at its own time."""
    paths = RunPaths(folder)
    facts = {"counted": True, "wrap_j": None, "refresh_s": 0.1, "gain_error_rel": 0.05, "facts": {}}
    devices = [
        {"device": "gpu:0", "component": "gpu", "name": "H200", **facts},
        {"device": "rapl:package-0", "component": "cpu", "name": "package-0", **facts},
    ]
    stamp = {"timestamp": "2026-01-01T00:00:00+00:00"}
    header = {"kind": "header", **stamp, "mono_ns": BEGIN_NS, "host": "node", "boot_id": "made", "interval_s": 0.5}
    lines = [{**header, "wall_minus_mono_s": 0.0, "devices": devices, "missing": []}]
    for tick in range(10 * max(gpu_s, cpu_s) + 1):
        at = {**stamp, "mono_ns": BEGIN_NS + tick * NS // 10}
        if tick <= 10 * gpu_s:
            reading = {"power_watts": GPU_W, "energy_counter_j": GPU_W * tick / 10}
            lines.append({"kind": "gpu", **at, "device": "gpu:0", **reading})
        if tick <= 10 * cpu_s:
            lines.append({"kind": "rapl", **at, "device": "host", "rapl": {"package-0": CPU_W * tick / 10}})
    begin = {"kind": "stage", "edge": "begin", "stage": "student.train", "mono_ns": BEGIN_NS}
    for path, content in (
        (paths.trace("node", 1), lines),
        (paths.events("node", 0, 1), [{"kind": "run", "edge": "begin", "mono_ns": BEGIN_NS}, begin]),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in content))
    opened = {"run_id": paths.run_id, "name": "run", "label": "run", "status": "running", "spec": {"energy": {}}}
    write_json(paths.record, RunRecord(**opened, created_at=stamp["timestamp"]))
    return paths


def test_a_reading_that_is_still_to_come_is_no_missing_energy(tmp_path):
    paths = made_run(tmp_path / "run", gpu_s=10, cpu_s=12)
    running = assemble(paths, "running")
    assert running.totals.duration_s == pytest.approx(9.9), "a refresh of 0.1 s before the last reading"
    assert running.best_energy.energy_j == pytest.approx((GPU_W + CPU_W) * 9.9)
    assert "±" in amount_text(running.best_energy) and "≥" not in amount_text(running.best_energy)
    killed = assemble(paths, "truncated")
    assert killed.totals.duration_s == pytest.approx(12)
    assert killed.best_energy.is_lower_bound, "nothing more will come: those two seconds of the GPU are unknown"


def test_a_device_that_stopped_reporting_does_not_hold_up_the_others(tmp_path):
    running = assemble(made_run(tmp_path / "run", gpu_s=10, cpu_s=30), "running")
    assert running.totals.duration_s == pytest.approx(29.9)
    assert running.best_energy.is_lower_bound
