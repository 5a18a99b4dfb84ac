"""A foreign log as a trace of ours, so that whatever reads a run's trace reads it as well.

Only what the file holds is written. Times become monotonic ones counted from the log's start; the header says that, and
where the log came from.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from joulelab import clock
from joulelab.errors import UsageError
from joulelab.meter.foreign.energy import DeviceEnergy, device_energy
from joulelab.meter.foreign.power_log import DeviceLog, PowerLog
from joulelab.meter.trace import LineFile, header

# Monotonic time 0 means "no time" to the trace's readers, so the log begins one second after it.
START_S = 1.0
NVIDIA_GAIN_ERROR_REL = 0.05
_BATCH = 1000


def write_trace(log: PowerLog, source: Path, out: Path) -> None:
    if out.exists():
        raise UsageError(f"{out} exists already", "a trace is never written over; name another file")
    devices = [device for device in log.devices if device.source.component in ("gpu", "cpu", "dram")]
    energies = [device_energy(device) for device in devices]
    try:
        file = LineFile(out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from None
    file.append(_header(log, source, devices, energies))
    lines = sorted(_lines(log, devices, energies), key=lambda line: line["mono_ns"])
    for start in range(0, len(lines), _BATCH):
        file.append(*lines[start : start + _BATCH])
    last_ns = lines[-1]["mono_ns"] if lines else round(START_S * clock.NS)
    closing = {"kind": "end", **_stamp(log, last_ns), "reason": "end of the imported log"}
    file.append(closing, sync=True)
    file.close()


def _mono_ns(log: PowerLog, seconds: float) -> int:
    return round((seconds - log.first_s + START_S) * clock.NS)


def _stamp(log: PowerLog, mono_ns: int) -> dict[str, Any]:
    stamp: dict[str, Any] = {"mono_ns": mono_ns}
    if log.has_wall:
        stamp["timestamp"] = clock.iso(log.first_s - START_S + mono_ns / clock.NS)
    return stamp


def _header(log: PowerLog, source: Path, devices: list[DeviceLog], energies: list[DeviceEnergy]) -> dict[str, Any]:
    intervals = [energy.interval_s for energy in energies if energy.interval_s]
    return {
        **header(
            imported={
                "file": str(source.absolute()),
                "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
                "format": log.format,
                "clock": log.clock,
                "has_wall": log.has_wall,
                "notes": list(log.notes),
            },
            interval_s=min(intervals, default=1.0),
            wall_minus_mono_s=log.first_s - START_S if log.has_wall else 0.0,
            devices=[_device(device) for device in devices],
            missing=[],
            units={"power_watts": "W", "energy_counter_j": "J", "memory_used_MB": "MiB"},
        ),
        **_stamp(log, round(START_S * clock.NS)),
        "boot_id": "imported",
        "clocks": {"mono_ns": "seconds since the log's first reading + 1, in nanoseconds", "timestamp": log.clock},
    }


def _device(device: DeviceLog) -> dict[str, Any]:
    source = device.source
    return {
        "device": source.device,
        "component": source.component,
        "name": source.name,
        "counted": source.counted,
        "wrap_j": source.wrap_j,
        "refresh_s": 0.1,
        "gain_error_rel": NVIDIA_GAIN_ERROR_REL,
        "facts": {"gpu_index": source.index} if source.index is not None else {},
    }


def _lines(log: PowerLog, devices: list[DeviceLog], energies: list[DeviceEnergy]) -> Iterator[dict[str, Any]]:
    for device, energy in zip(devices, energies, strict=True):
        yield from _rapl(log, device) if device.source.device.startswith("rapl:") else _gpu(log, device)
        for begin, end in energy.holes:
            reason = f"no reading for {end - begin:.1f} s in the imported log"
            yield {"kind": "gap", **_stamp(log, _mono_ns(log, begin)), "device": device.source.device, "reason": reason}


def _rapl(log: PowerLog, device: DeviceLog) -> Iterator[dict[str, Any]]:
    domain = device.source.device.removeprefix("rapl:")
    for seconds, energy_j in zip(*device.series("energy_counter_j"), strict=True):
        stamp = _stamp(log, _mono_ns(log, float(seconds)))
        yield {"kind": "rapl", **stamp, "device": "host", "rapl": {domain: float(energy_j)}}


def _gpu(log: PowerLog, device: DeviceLog) -> Iterator[dict[str, Any]]:
    """A line for each reading of power; a counter read at another moment rides on the next one, with its own time."""
    source = device.source
    identity: dict[str, Any] = {"device": source.device, "gpu_name": source.name}
    if source.index is not None:
        identity |= {"gpu_index": source.index}
    counter: dict[str, Any] = {}
    for position, seconds in enumerate(device.times_s):
        read_at = {name: float(column[position]) for name, column in device.columns.items()}
        values = {name: value for name, value in read_at.items() if not math.isnan(value)}
        mono_ns = _mono_ns(log, float(seconds))
        if "energy_counter_j" in values:
            counter = {"energy_counter_j": values.pop("energy_counter_j"), "counter_mono_ns": mono_ns}
        if "power_watts" in values:
            yield {"kind": "gpu", **_stamp(log, mono_ns), **identity, **values, **counter}
            counter = {}
