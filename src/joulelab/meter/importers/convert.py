"""Detect the format of a power log by its content, read it, and write it as a trace.

File names and extensions do not matter. A trace made from a log contains only what the file has. Times become monotonic
ones counted from the log's start; the header states that, and where the log came from.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from joulelab import clock
from joulelab.errors import NotFoundError, UsageError
from joulelab.meter.importers import dmon, emissions_csv, joulelab_jsonl, smi_csv
from joulelab.meter.importers.emissions_csv import CodeCarbonLog
from joulelab.meter.importers.log_energy import DeviceEnergy, device_energy
from joulelab.meter.importers.power_log import DeviceLog, PowerLog, TimeRule, UnknownFormat, UnusableLog
from joulelab.meter.trace import SUFFIX, LineFile, header

_SUPPORTED = (
    "supported: JSONL with power_watts (joulelab monitor and earlier monitors), a run's trace, "
    "CSV with the same field names, `nvidia-smi dmon` text (# gpu pwr ...), "
    "`nvidia-smi --query-gpu=...,power.draw --format=csv` with its header, "
    "CodeCarbon's emissions.csv"
)
# The format is decided by this many lines: a dmon header repeats, and JSONL may start with lines of other programs.
_DECIDING_LINES = 50


def read_log(path: Path, rule: TimeRule) -> PowerLog | CodeCarbonLog:
    path = _trace_in(path) if path.is_dir() else path
    lines = [line for line in _text(path).splitlines() if line.strip()]
    if not lines:
        raise UnknownFormat(f"{path} is empty", _SUPPORTED)
    log = _read(path, lines, rule)
    if not (log.runs if isinstance(log, CodeCarbonLog) else log.devices):
        notes = f" ({'; '.join(log.notes)})" if log.notes else ""
        raise UnusableLog(f"{path} ({log.format}) contains no reading{notes}", "record it again, or give another file")
    return log


def read_power_log(path: Path, rule: TimeRule, purpose: str) -> PowerLog:
    """Read a log with readings over time; one with only totals of whole runs is an error."""
    log = read_log(path, rule)
    if isinstance(log, CodeCarbonLog):
        raise UnusableLog(
            f"{path} contains CodeCarbon's totals of whole runs; {purpose} needs power over time",
            "`joulelab import FILE` prints the totals; record power with `joulelab monitor` or nvidia-smi",
        )
    return log


def _read(path: Path, lines: list[str], rule: TimeRule) -> PowerLog | CodeCarbonLog:
    opening = lines[:_DECIDING_LINES]
    if joulelab_jsonl.looks_like(opening):
        return joulelab_jsonl.read(lines, rule)
    if dmon.looks_like(opening):
        return dmon.read(lines, rule)
    if emissions_csv.looks_like(opening):
        return emissions_csv.read(lines, rule.zone)
    if joulelab_jsonl.csv_looks_like(opening):
        return joulelab_jsonl.read_csv(lines, rule)
    if smi_csv.looks_like(opening):
        return smi_csv.read(lines, rule)
    raise UnknownFormat(f"{path}: unknown log format; the file begins with {opening[0][:60]!r}", _SUPPORTED)


def _trace_in(folder: Path) -> Path:
    """The only trace of a run directory; with several (hosts, attempts) the user has to name one."""
    recorded = {path.stem: path for kind in (SUFFIX, ".jsonl") for path in sorted((folder / "trace").glob(f"*{kind}"))}
    if len(recorded) == 1:
        return next(iter(recorded.values()))
    if recorded:
        raise UsageError(
            f"{folder} is a run with {len(recorded)} traces, one for each host and attempt",
            f"name one of them: {', '.join(str(path) for path in recorded.values())}",
        )
    raise UsageError(f"{folder} is a folder, and no run with a trace", "name a log, or a run's folder")


def _text(path: Path) -> str:
    if path.suffix == SUFFIX and path.is_file():
        return joulelab_jsonl.jsonl_text(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"no such file: {path}", "give a log file, or the folder of a run") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", "check its permissions") from None
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):  # PowerShell's > writes UTF-16
        return raw.decode("utf-16", errors="replace")
    return raw.decode("utf-8-sig", errors="replace")


# Monotonic time 0 means "no time" to the trace's readers, so the log begins one second after it.
START_S = 1.0
NVIDIA_GAIN_ERROR_REL = 0.05
_BATCH = 1000


def write_trace(log: PowerLog, source: Path, out: Path) -> None:
    if out.exists():
        raise UsageError(f"{out} already exists", "traces are not overwritten; choose another file")
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
    known = {"gpu_index": source.index, "max_gap_s": source.max_gap_s}
    return {
        "device": source.device,
        "component": source.component,
        "name": source.name,
        "counted": source.counted,
        "wrap_j": source.wrap_j,
        "refresh_s": 0.1,
        "gain_error_rel": NVIDIA_GAIN_ERROR_REL,
        "facts": {name: value for name, value in known.items() if value is not None},
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
    """A line per reading of power; a counter read at another time is part of the next line, with its own time."""
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
