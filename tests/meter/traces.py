"""Traces with exactly known energy, written as the recorder would write them."""

import json
from pathlib import Path

from joulelab.clock import NS

T0 = 1_000 * NS


def header(*devices, missing=(), interval_s=0.5):
    return {
        "kind": "header",
        "timestamp": "2026-01-01T00:00:00+00:00",
        "mono_ns": T0,
        "host": "here",
        "boot_id": "b",
        "pid": 1,
        "program_pid": 1,
        "interval_s": interval_s,
        "wall_minus_mono_s": 0.0,
        "devices": list(devices),
        "missing": list(missing),
    }


def device(name="gpu:A", component="gpu", **fields):
    plain = {"device": name, "component": component, "name": name, "counted": True, "wrap_j": None}
    return {**plain, "refresh_s": 0.1, "gain_error_rel": 0.05, "facts": {}, **fields}


def gpu_line(second, power_w, energy_j=None, name="gpu:A"):
    line = {"kind": "gpu", "mono_ns": T0 + round(second * NS), "device": name, "power_watts": power_w}
    return line if energy_j is None else {**line, "energy_counter_j": energy_j}


def write(path: Path, lines) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def at(second: float) -> int:
    return T0 + round(second * NS)
