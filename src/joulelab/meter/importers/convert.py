"""Detect the format of a power log by its content, read it, and write it as a trace.

File names and extensions do not matter. A trace made from a log contains only what the file has. Times become monotonic
ones counted from the log's start; the header states that, and where the log came from.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

from joulelab import clock
from joulelab.errors import NotFoundError, UsageError
from joulelab.lookup import IMPORTERS
from joulelab.meter.importers import dmon, emissions_csv, joulelab_jsonl, power_table, smi_csv, stage_records
from joulelab.meter.importers.emissions_csv import CodeCarbonLog
from joulelab.meter.importers.log_energy import DeviceEnergy, device_energy
from joulelab.meter.importers.power_log import (
    DeviceLog,
    PowerLog,
    ReportedEnergy,
    RunLog,
    StageLog,
    TimeRule,
    UnknownFormat,
    UnusableLog,
)
from joulelab.meter.trace import SUFFIX, LineFile, header
from joulelab.redaction import printable, printable_json
from joulelab.units import plural

_SUPPORTED = (
    "supported: JSONL with power_watts (joulelab monitor and earlier monitors), a run's trace, "
    "CSV with the same field names, `nvidia-smi dmon` text (# gpu pwr ...), "
    "`nvidia-smi --query-gpu=...,power.draw --format=csv` with its header, "
    "CSV with a time and gpu_N_power_w, gpu_power_w or power, CodeCarbon's emissions.csv, "
    "stage JSON, experiment_summary.json and stage_metrics.csv of the distillation energy benchmark"
)
# The format is decided by this many lines: a dmon header repeats, and JSONL may start with lines of other programs.
_DECIDING_LINES = 50


Log = PowerLog | CodeCarbonLog | list[RunLog]


class Importer(Protocol):
    """A reader of a further format, as a module or object that an entry point of `joulelab.importers` names."""

    def looks_like(self, opening: Sequence[str]) -> bool:
        """Whether lines at the beginning of a file, without blank ones, are of this format."""

    def read(self, lines: Sequence[str], rule: TimeRule) -> Log: ...


def read_log(path: Path, rule: TimeRule) -> Log:
    """One file, or the trace of a run's folder: power over time, CodeCarbon's totals, or stages with stated energy."""
    path = _trace_in(path) if path.is_dir() else path
    lines = [line for line in _text(path).splitlines() if line.strip()]
    if not lines:
        raise UnknownFormat(f"{path} is empty", _SUPPORTED)
    log = _read(path, lines, rule)
    if not (log if isinstance(log, list) else log.runs if isinstance(log, CodeCarbonLog) else log.devices):
        notes = f" ({'; '.join(log.notes)})" if not isinstance(log, list) and log.notes else ""
        kind = log.format if not isinstance(log, list) else "stage records"
        raise UnusableLog(f"{path} ({kind}) contains no reading{notes}", "record it again, or give another file")
    return log


def read_power_log(path: Path, rule: TimeRule, purpose: str) -> PowerLog:
    """Read a log with readings over time; one with only totals of whole runs is an error."""
    log = read_log(path, rule)
    if not isinstance(log, PowerLog):
        whose = "CodeCarbon's totals of whole runs" if isinstance(log, CodeCarbonLog) else "totals of whole stages"
        raise UnusableLog(
            f"{path} contains {whose}; {purpose} needs power over time",
            "`joulelab import FILE` prints the totals; record power with `joulelab monitor` or nvidia-smi",
        )
    return log


def _read(path: Path, lines: list[str], rule: TimeRule) -> Log:
    opening = lines[:_DECIDING_LINES]
    if (record := stage_records.parse_json("\n".join(lines))) is not None:
        return _stage_runs(path, record)
    if joulelab_jsonl.looks_like(opening):
        return joulelab_jsonl.read(lines, rule)
    if dmon.looks_like(opening):
        return dmon.read(lines, rule)
    if emissions_csv.looks_like(opening):
        return emissions_csv.read(lines, rule.zone)
    if stage_records.table_looks_like(opening):
        stages, notes = stage_records.read_table(lines)
        return [_run_log(path, stage_records.FORMAT_TABLE, [stage], notes) for stage in stages]
    if joulelab_jsonl.csv_looks_like(opening):
        return joulelab_jsonl.read_csv(lines, rule)
    if smi_csv.looks_like(opening):
        return smi_csv.read(lines, rule)
    if power_table.looks_like(opening):
        return power_table.read(lines, rule)
    for name in IMPORTERS:
        importer: Importer = IMPORTERS.resolve(name)
        if importer.looks_like(opening):
            return importer.read(lines, rule)
    raise UnknownFormat(f"{path}: unknown log format; the file begins with {opening[0][:60]!r}", _SUPPORTED)


# Stages that follow each other may overlap by the period of a log.
_SAME_TIME_S = 2.0
_POWER_STAGE = "log"
STATED_TIMES = "as stated in the file, in seconds since 1970"


def _run_log(path: Path, kind: str, stages: list[StageLog], notes: list[str]) -> RunLog:
    name = str(stages[0].facts.get("experiment_name") or stages[0].name) if len(stages) > 1 else stages[0].name
    return RunLog(name, kind, STATED_TIMES, tuple(stages), (path,), tuple(dict.fromkeys(notes)))


def _stage_runs(path: Path, record: dict[str, Any]) -> list[RunLog]:
    """A stage JSON is a run with one stage; a summary is a run with all of its stages."""
    is_summary = stage_records.is_summary(record)
    stages, notes = [], []
    for fields in record["stages"].values() if is_summary else (record,):
        named = {"experiment_name": record.get("experiment_name")} if is_summary else {}
        stage, own = stage_records.read_stage({**named, **fields})
        notes += own
        if stage is not None:
            stages.append(stage)
    kind = stage_records.FORMAT_SUMMARY if is_summary else stage_records.FORMAT_STAGE
    return [_run_log(path, kind, stages, notes)] if stages else []


# A run folder of someone else has tens of files; a home directory given by mistake has many more.
_MOST_FILES = 20_000
_SUFFIXES = (".csv", ".json", ".jsonl", ".log", ".txt")
_LARGEST_JSON_BYTES = 200 << 20


def read_folder(folder: Path, rule: TimeRule) -> tuple[list[RunLog], list[str]]:
    """The runs in a folder written by another tool, and remarks on files that are not used.

    Stage records come first. A power log next to the record of its stage is not counted a second time; without a
    record, or with snapshots of an unfinished stage only, it is the stage. CodeCarbon files are runs where no stage
    record states their energy.
    """
    own = {path.parent for path in folder.rglob("config.yaml") if _is_run(path.parent)}
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix in _SUFFIXES and own.isdisjoint(path.parents)
    )
    if own and not files:
        raise UnusableLog(
            f"{folder} contains runs of joulelab and no other log",
            f"they need no import: `joulelab runs --runs-dir {folder}` lists them if it is their store",
        )
    if len(files) > _MOST_FILES:
        raise UsageError(
            f"{folder} contains {len(files)} possible log files; expected at most {_MOST_FILES}",
            "name the folder of one run, or the files",
        )
    groups: list[RunLog] = []
    singles: list[tuple[Path, StageLog]] = []
    notes_by_file: dict[Path, tuple[str, ...]] = {}
    others: list[tuple[Path, PowerLog | CodeCarbonLog]] = []
    for path in files:
        if path.suffix == ".json" and path.stat().st_size > _LARGEST_JSON_BYTES:
            continue
        try:
            log = read_log(path, rule)
        except (UnknownFormat, UnusableLog):
            continue
        if not isinstance(log, list):
            others.append((path, log))
            continue
        notes_by_file[path] = log[0].notes
        for run in log:
            if len(run.stages) > 1 and run.format == stage_records.FORMAT_SUMMARY:
                groups.append(run)
            else:
                singles += [(path, stage) for stage in run.stages]
    groups = list({tuple((stage.name, stage.started_s) for stage in run.stages): run for run in groups}.values())
    in_groups = {(stage.name, stage.started_s) for run in groups for stage in run.stages}
    kept = [one for one in stage_records.final_stages(singles) if (one[1].name, one[1].started_s) not in in_groups]
    notes = [f"{folder}: skipped {plural(len(own), 'joulelab run')}, recorded already"] if own else []
    runs = list(groups)
    for path, stage in kept:
        powers = [log for other, log in others if isinstance(log, PowerLog) and other.parent == path.parent]
        if not stage.complete and powers:
            continue  # the power log continues after the last snapshot
        runs.append(_run_log(path, stage_records.FORMAT_STAGE, [stage], list(notes_by_file.get(path, ()))))
    recorded = {path.parent for path, stage in singles if stage.complete}
    recorded |= {path.parent for run in groups for path in run.files}
    for path, log in others:
        if isinstance(log, PowerLog):
            if path.parent in recorded:
                notes.append(f"{path}: readings of a stage whose record is next to it; not counted again")
                continue
            if all(device_energy(device).best_j is None for device in log.devices):
                notes.append(f"{path}: not used: it has fewer than two valid readings")
                continue
            # Runs of one name are repeats of each other, which several logs in a folder need not be.
            alone = sum(isinstance(found, PowerLog) and other.parent == path.parent for other, found in others) == 1
            runs.append(power_run(log, path, path.parent.name if alone else path.stem))
        elif any(energy.component == "codecarbon" for run in runs for stage in run.stages for energy in stage.energies):
            notes.append(f"{path}: CodeCarbon's figures are in the stage records already")
        else:
            runs += emissions_csv.run_logs(log, path, rule.zone)
    if not runs:
        raise UnusableLog("; ".join([f"{folder} contains no log that can be used", *notes]), _SUPPORTED)
    return runs, notes


def _is_run(folder: Path) -> bool:
    """Whether joulelab wrote the folder, which has records that look like those of other tools."""
    return (folder / "run.json").is_file() or ((folder / "events").is_dir() and (folder / "trace").is_dir())


def power_run(log: PowerLog, path: Path, name: str) -> RunLog:
    """A power log as a run with one stage, which lasts from its first reading to its last."""
    ends = [float(device.times_s[-1]) for device in log.devices]
    stage = StageLog(
        name=_POWER_STAGE,
        role="student",
        activity="run",
        duration_s=max(ends, default=log.first_s) - log.first_s,
        started_s=log.first_s if log.has_wall else None,
        power=log,
    )
    return RunLog(name, log.format, log.clock, (stage,), (path,), log.notes)


def merged(runs: list[RunLog], name: str) -> RunLog:
    """Several runs as one, their stages in the order of time: a teacher's stage and its student's, for example. Notes
    name stages at the same time, whose energy is counted twice if they are of the same devices."""
    # All power logs have the same stage name; their files have different ones.
    stages = [
        replace(stage, name=run.name) if stage.name == _POWER_STAGE else stage for run in runs for stage in run.stages
    ]
    if all(stage.started_s is not None for stage in stages):
        stages.sort(key=lambda stage: stage.started_s or 0.0)
    seen: dict[str, int] = {}
    unique = []
    for stage in stages:
        seen[stage.name] = seen.get(stage.name, 0) + 1
        number = seen[stage.name]
        unique.append(stage if number == 1 else replace(stage, name=f"{stage.name}-{number}"))
    return RunLog(
        name=name,
        format=", ".join(dict.fromkeys(run.format for run in runs)),
        clock="; ".join(dict.fromkeys(run.clock for run in runs)),
        stages=tuple(unique),
        files=tuple(dict.fromkeys(path for run in runs for path in run.files)),
        notes=tuple(dict.fromkeys([*_overlaps(unique), *(note for run in runs for note in run.notes)])),
    )


def _overlaps(stages: Sequence[StageLog]) -> Iterator[str]:
    timed = [(one.name, one.started_s, one.started_s + one.duration_s) for one in stages if one.started_s is not None]
    for (one, begin_s, end_s), (other, other_begin_s, other_end_s) in combinations(timed, 2):
        both_s = min(end_s, other_end_s) - max(begin_s, other_begin_s)
        if both_s > _SAME_TIME_S:
            yield (
                f"{one} and {other} overlap by {both_s:.0f} s: if both are of the same devices, their energy is "
                "counted twice"
            )


def stated(stage: StageLog) -> StageLog:
    """A stage with power readings as one with stated energy, for a run whose other stages have no readings."""
    if stage.power is None:
        return stage
    energies = []
    for component in ("gpu", "cpu", "dram"):
        devices = [device for device in stage.power.devices if device.source.component == component]
        found = [device_energy(device) for device in devices if device.source.counted]
        joules = [energy.best_j for energy in found if energy.best_j is not None]
        if joules:
            by_counter = all(energy.counter_j is not None for energy in found)
            energies.append(ReportedEnergy(component, sum(joules), "counter" if by_counter else "integrated"))
    return replace(stage, power=None, energies=(*stage.energies, *energies))


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
    raise UsageError(f"{folder} is a folder but not a run with a trace", "name a log, or a run's folder")


def _text(path: Path) -> str:
    if path.suffix == SUFFIX and path.is_file():
        return joulelab_jsonl.jsonl_text(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"no such file: {path}", "give a log file, or the folder of a run") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", "check its permissions") from None
    is_utf16 = raw.startswith((b"\xff\xfe", b"\xfe\xff"))  # PowerShell's > writes it
    text = raw.decode("utf-16" if is_utf16 else "utf-8-sig", errors="replace")
    return printable_json(text) if text.lstrip().startswith("{") else printable(text)


# Monotonic time 0 means "no time" to the trace's readers, so the log begins one second after it.
START_S = 1.0
NVIDIA_GAIN_ERROR_REL = 0.05
_COMPONENTS = ("gpu", "cpu", "dram")
# Refresh period of NVIDIA's and Intel's counters.
_REFRESH_S = 0.1
_BATCH = 1000


def write_trace(log: PowerLog, source: Path, out: Path, interpolate_gaps: bool = False) -> None:
    if out.exists():
        raise UsageError(f"{out} already exists", "traces are not overwritten; choose another file")
    source = _trace_in(source) if source.is_dir() else source
    devices = [device for device in log.devices if device.source.component in _COMPONENTS]
    energies = [device_energy(device) for device in devices]
    described = [_device(*pair, interpolate_gaps) for pair in zip(devices, energies, strict=True)]
    intervals = [energy.interval_s for energy in energies if energy.interval_s]
    gaps = not interpolate_gaps
    head = _header(
        _provenance((source,), log.format, log.clock, log.has_wall, log.notes),
        log.first_s if log.has_wall else None,
        described,
        min(intervals, default=1.0),
    )
    _write(out, head, sorted(_lines(log, devices, energies, gaps), key=lambda line: line["mono_ns"]))


def write_stated_trace(run: RunLog, out: Path) -> None:
    """A trace of stages whose energy is only stated: one line per stage and component, one after the other."""
    lines, components = [], {}
    for begin_ns, end_ns, stage in placed_stages(run):
        for energy in stage.energies:
            if energy.component not in _COMPONENTS:
                continue
            device = f"reported:{energy.component}"
            components[energy.component] = energy.method
            line = {"kind": "reported", "mono_ns": end_ns, "begin_ns": begin_ns, "device": device}
            lines.append({**line, "energy_j": energy.energy_j, "peak_w": energy.peak_w})
    described = [
        {
            "device": f"reported:{component}",
            "component": component,
            "name": f"{component.upper()} energy as stated in the file",
            "counted": True,
            "wrap_j": None,
            "refresh_s": _REFRESH_S,
            "gain_error_rel": None,
            "facts": {"reported": True, "method": method, "source": run.format},
        }
        for component, method in components.items()
    ]
    start_s = run.stages[0].started_s
    provenance = _provenance(run.files, run.format, run.clock, start_s is not None, run.notes)
    _write(out, _header(provenance, start_s, described, 1.0), lines)


def placed_stages(run: RunLog) -> Iterator[tuple[int, int, StageLog]]:
    """(begin, end, stage) in monotonic nanoseconds, one after the other: time between the stages of a log is not part
    of the run, since its energy is in no file."""
    at_ns = round(START_S * clock.NS)
    for stage in run.stages:
        end_ns = at_ns + max(1, round(stage.duration_s * clock.NS))
        yield at_ns, end_ns, stage
        at_ns = end_ns


def counter_shift_ns(log: PowerLog) -> int:
    """A counter's value is half a refresh old on average: the time that its readings cover lies that much earlier."""
    devices = [device for device in log.devices if device.source.component in _COMPONENTS]
    counted = [len(device.series("energy_counter_j")[0]) > 1 for device in devices]
    return round(_REFRESH_S / 2 * clock.NS) if counted and all(counted) else 0


def _write(out: Path, head: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    try:
        file = LineFile(out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror or error}") from None
    file.append(head)
    for start in range(0, len(lines), _BATCH):
        file.append(*lines[start : start + _BATCH])
    last = lines[-1] if lines else head
    stamp: dict[str, Any] = {name: last[name] for name in ("mono_ns", "timestamp") if name in last}
    file.append({"kind": "end", **stamp, "reason": "end of the imported log"}, sync=True)
    file.close()


def _mono_ns(log: PowerLog, seconds: float) -> int:
    return round((seconds - log.first_s + START_S) * clock.NS)


def _stamp(log: PowerLog, mono_ns: int) -> dict[str, Any]:
    stamp: dict[str, Any] = {"mono_ns": mono_ns}
    if log.has_wall:
        stamp["timestamp"] = clock.iso(log.first_s - START_S + mono_ns / clock.NS)
    return stamp


def _provenance(
    files: tuple[Path, ...], kind: str, clock_text: str, has_wall: bool, notes: tuple[str, ...]
) -> dict[str, Any]:
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    more = {"files": [str(path.absolute()) for path in files], "digests": digests} if len(files) > 1 else {}
    return {
        "file": str(files[0].absolute()),
        "sha256": digests[0],
        **more,
        "format": kind,
        "clock": clock_text,
        "has_wall": has_wall,
        "notes": list(notes),
    }


def _header(
    imported: dict[str, Any], start_s: float | None, devices: list[dict[str, Any]], interval_s: float
) -> dict[str, Any]:
    start_ns = round(START_S * clock.NS)
    absent = [name for name in ("gpu", "cpu") if name not in {device["component"] for device in devices}]
    head = {
        **header(
            imported=imported,
            interval_s=interval_s,
            wall_minus_mono_s=start_s - START_S if start_s is not None else 0.0,
            devices=devices,
            missing=[{"component": name, "reason": "the imported file does not have it", "fix": ""} for name in absent],
            units={"power_watts": "W", "energy_counter_j": "J", "memory_used_MB": "MiB"},
        ),
        "mono_ns": start_ns,
        "boot_id": "imported",
        "clocks": {
            "mono_ns": "seconds since the log's first reading + 1, in nanoseconds",
            "timestamp": imported["clock"],
        },
    }
    del head["timestamp"]  # of the import, not of the log
    return head | ({"timestamp": clock.iso(start_s)} if start_s is not None else {})


def _device(device: DeviceLog, energy: DeviceEnergy, interpolate_gaps: bool) -> dict[str, Any]:
    source = device.source
    known: dict[str, Any] = {"gpu_index": source.index, "max_gap_s": source.max_gap_s}
    if interpolate_gaps and energy.holes:
        lost_s = sum(end - begin for begin, end in energy.holes)
        known |= {"interpolate_gaps": True, "reason": f"{lost_s:.1f} s without readings are interpolated"}
    by_counter = energy.counter_j is not None
    return {
        "device": source.device,
        "component": source.component,
        "name": source.name,
        "counted": source.counted,
        "wrap_j": source.wrap_j,
        # without a counter the log is as fine as its readings
        "refresh_s": _REFRESH_S if by_counter else max(_REFRESH_S, energy.interval_s or 0.0),
        "gain_error_rel": NVIDIA_GAIN_ERROR_REL,
        "facts": {name: value for name, value in known.items() if value is not None},
    }


def _lines(
    log: PowerLog, devices: list[DeviceLog], energies: list[DeviceEnergy], gaps: bool
) -> Iterator[dict[str, Any]]:
    for device, energy in zip(devices, energies, strict=True):
        yield from _rapl(log, device) if device.source.device.startswith("rapl:") else _gpu(log, device)
        for begin, end in energy.holes if gaps else ():
            reason = f"no reading for {end - begin:.1f} s in the imported log"
            yield {"kind": "gap", **_stamp(log, _mono_ns(log, begin)), "device": device.source.device, "reason": reason}


def _rapl(log: PowerLog, device: DeviceLog) -> Iterator[dict[str, Any]]:
    domain = device.source.device.removeprefix("rapl:")
    for seconds, energy_j in zip(*device.series("energy_counter_j"), strict=True):
        stamp = _stamp(log, _mono_ns(log, float(seconds)))
        yield {"kind": "rapl", **stamp, "device": "host", "rapl": {domain: float(energy_j)}}


def _gpu(log: PowerLog, device: DeviceLog) -> Iterator[dict[str, Any]]:
    """A line per time at which power or the counter was read."""
    source = device.source
    identity: dict[str, Any] = {"device": source.device, "gpu_name": source.name}
    if source.index is not None:
        identity |= {"gpu_index": source.index}
    for position, seconds in enumerate(device.times_s):
        read_at = {name: float(column[position]) for name, column in device.columns.items()}
        values = {name: value for name, value in read_at.items() if not math.isnan(value)}
        mono_ns = _mono_ns(log, float(seconds))
        if "energy_counter_j" in values:
            values["counter_mono_ns"] = mono_ns
        if "power_watts" in values or "energy_counter_j" in values:
            yield {"kind": "gpu", **_stamp(log, mono_ns), **identity, **values}
