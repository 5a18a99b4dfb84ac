"""Which kind of log a file is, told by what stands in it: names and extensions are whatever somebody typed."""

from __future__ import annotations

from pathlib import Path

from joulelab.errors import NotFoundError, UsageError
from joulelab.meter.foreign import codecarbon, dmon, operators_jsonl, smi_csv
from joulelab.meter.foreign.codecarbon import CodeCarbonLog
from joulelab.meter.foreign.gather import TimeRule
from joulelab.meter.foreign.power_log import PowerLog, UnknownFormat, UnusableLog
from joulelab.meter.trace_parquet import SUFFIX

_SUPPORTED = (
    "supported: JSONL with power_watts (joulelab monitor and earlier monitors), a run's trace, "
    "CSV with the same field names, `nvidia-smi dmon` text (# gpu pwr ...), "
    "`nvidia-smi --query-gpu=...,power.draw --format=csv` with its header, "
    "CodeCarbon's emissions.csv"
)
# A dmon header repeats and JSONL may open with other programs' lines: so many lines decide.
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
    """A log with readings over time, where totals of whole runs will not do."""
    log = read_log(path, rule)
    if isinstance(log, CodeCarbonLog):
        raise UnusableLog(
            f"{path} contains CodeCarbon's totals of whole runs; {purpose} needs power over time",
            "`joulelab import FILE` prints the totals; record power with `joulelab monitor` or nvidia-smi",
        )
    return log


def _read(path: Path, lines: list[str], rule: TimeRule) -> PowerLog | CodeCarbonLog:
    opening = lines[:_DECIDING_LINES]
    if operators_jsonl.looks_like(opening):
        return operators_jsonl.read(lines, rule)
    if dmon.looks_like(opening):
        return dmon.read(lines, rule)
    if codecarbon.looks_like(opening):
        return codecarbon.read(lines, rule.zone)
    if operators_jsonl.csv_looks_like(opening):
        return operators_jsonl.read_csv(lines, rule)
    if smi_csv.looks_like(opening):
        return smi_csv.read(lines, rule)
    raise UnknownFormat(f"{path}: unknown log format; the file begins with {opening[0][:60]!r}", _SUPPORTED)


def _trace_in(folder: Path) -> Path:
    """The one trace of a run's folder; several are several hosts or attempts, and which is meant must be said."""
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
        return operators_jsonl.jsonl_text(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"no such file: {path}", "give a log file, or the folder of a run") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", "check its permissions") from None
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):  # what PowerShell's > makes of nvidia-smi's output
        return raw.decode("utf-16", errors="replace")
    return raw.decode("utf-8-sig", errors="replace")
