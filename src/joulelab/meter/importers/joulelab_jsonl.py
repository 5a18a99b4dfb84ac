"""Our own JSONL (monitor logs and run traces), that of earlier monitors, and CSV with the same field names.

Old files have naive stamps, no header, fewer fields and several GPUs interleaved. New ones open each session with a
header, whose pair of clocks places monotonic stamps in the day, so setting the wall clock while the log runs moves
nothing. Sessions appended to one file share the first header's pair as long as the machine was not rebooted between.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from joulelab.clock import NS, wall_seconds
from joulelab.meter.importers.power_log import (
    COLUMNS,
    Findings,
    LogGap,
    PowerLog,
    Row,
    Source,
    TimeRule,
    gather,
    number,
)
from joulelab.meter.trace import SUFFIX, read_lines
from joulelab.units import plural

FORMAT = "joulelab JSONL"
FORMAT_OLD = "monitor JSONL without a header"
FORMAT_CSV = "monitor CSV"
FORMAT_NESTED = "nested telemetry JSONL"
# Clocks drift apart by parts in a million; more than this between wall and monotonic time is a step (or a sleep).
_STEP_S = 1.0
_TIME_FIELDS = ("timestamp", "time", "ts")

_OF_A_GPU = {"power_watts": "power_watts", "power_w": "power_watts"}
"""Names of power in a list of GPUs -> its name here."""

Line = dict[str, Any]


def looks_like(lines: Sequence[str]) -> bool:
    parsed = [line for line in map(_json, lines) if line is not None]
    return any(
        "power_watts" in line or line.get("kind") == "header" or "rapl" in line or _is_nested(line) for line in parsed
    )


def _is_nested(line: Line) -> bool:
    """One line per tick with a list of GPUs, as some monitors write."""
    gpus = line.get("gpus")
    return isinstance(gpus, list) and any(isinstance(gpu, dict) and _OF_A_GPU.keys() & gpu.keys() for gpu in gpus)


def csv_looks_like(lines: Sequence[str]) -> bool:
    names = [cell.strip() for cell in lines[0].split(",")]
    return "power_watts" in names and any(name in names for name in _TIME_FIELDS)


def _json(text: str) -> Line | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read(lines: Sequence[str], rule: TimeRule) -> PowerLog:
    found = Findings(FORMAT_OLD)
    parsed = [_json(line) for line in lines if line.strip()]
    if bad := sum(1 for line in parsed if line is None):
        found.notes.append(f"{bad} lines could not be read and were skipped")
    known = [line for line in parsed if line is not None]
    if any(map(_is_nested, known)):
        found.format = FORMAT_NESTED
        known = [flat for line in known for flat in _flattened(line, found)]
    return _gathered(known, rule, found)


_ENERGY_FIELD = re.compile(r"energy_(uJ|mJ|J|kJ|Wh|kWh)$", re.I)


def _flattened(line: Line, found: Findings) -> Iterator[Line]:
    """A line per GPU, and one of the host; the unit of an energy field is checked against power x time later."""
    stamp = {name: line[name] for name in _TIME_FIELDS if name in line}
    gpus = line.get("gpus")
    for position, gpu in enumerate(gpus if isinstance(gpus, list) else ()):
        if not isinstance(gpu, dict):
            continue
        flat = {**stamp, "gpu_index": gpu.get("index", position), **gpu}
        flat |= {_OF_A_GPU[name]: value for name, value in gpu.items() if name in _OF_A_GPU}
        for name, value in gpu.items():
            if (match := _ENERGY_FIELD.fullmatch(name)) and number(value) is not None:
                found.energy_unit = match[1]
                flat["energy_counter_j"] = value
        yield flat
    cpu = line.get("cpu")
    if isinstance(cpu, dict) and cpu.get("cpu_utilization_percent") is not None:
        yield {"kind": "host", **stamp, "cpu_utilization_percent": cpu["cpu_utilization_percent"]}


def read_files(paths: Sequence[Path], rule: TimeRule) -> PowerLog:
    """Several files as one log: the traces of a run's attempts and hosts."""
    return read([line for path in paths for line in jsonl_text(path).splitlines()], rule)


def jsonl_text(path: Path) -> str:
    """The lines of a log, also those of a closed trace, which are kept in Parquet."""
    if path.suffix == SUFFIX:
        return "\n".join(json.dumps(line) for line in read_lines(path))
    return path.read_text(errors="replace")


def read_csv(lines: Sequence[str], rule: TimeRule) -> PowerLog:
    rows = [{key.strip(): cell for key, cell in row.items() if key} for row in csv.DictReader(lines)]
    return _gathered(rows, rule, Findings(FORMAT_CSV))


# The fields of a line are only known to be JSON. What a line with other types raises ends that line, not the import.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError)


def _gathered(lines: Sequence[Line], rule: TimeRule, found: Findings) -> PowerLog:
    sessions = _Sessions(found)
    rows: list[Row] = []
    unusable = 0
    for line in lines:
        try:
            rows += list(sessions.rows(line))
        except _MALFORMED:
            unusable += 1
    if unusable:
        found.notes.append(
            f"skipped {plural(unusable, 'line')} with fields of the wrong type or without a required field"
        )
    if rule.period_s:
        found.notes.append("the file has timestamps, so --period was ignored")
    return gather(sessions.finish(rows), rule, found)


@dataclass(frozen=True)
class _Session:
    header: Line
    offset_s: float
    """What to add to monotonic seconds to get the wall clock's."""
    devices: dict[str, Line]


class _Sessions:
    """Follows the headers of a file and reads each line with the header of its session."""

    def __init__(self, found: Findings) -> None:
        self._found = found
        self._by_id: dict[str, _Session] = {}
        self._offset_by_boot: dict[str, float] = {}
        self._last: _Session | None = None
        self._stepped_s = 0.0
        self._sampled: set[str] = set()
        self._hosts: set[str] = set()

    def rows(self, line: Line) -> Iterator[Row]:
        kind = line.get("kind", "gpu")
        if kind == "header":
            self._begin(line)
            return
        session = self._by_id.get(str(line.get("session")), self._last)
        if kind == "gap":
            self._found.gaps.append(
                LogGap(str(line.get("device")), str(line.get("timestamp", "")), str(line.get("reason", "")))
            )
        elif kind in ("gpu", "host", "rapl"):
            yield from self._readings(line, session)
        elif kind == "samples":
            yield from self._samples(line, session)
        elif kind == "estimate" and session is not None:
            facts = session.devices.get("estimate:cpu", {})
            watts = facts.get("facts", {}).get("w_per_thread")
            if watts:
                source = _described("estimate:cpu", facts, "cpu_estimate")
                yield self._row(source, {"energy_counter_j": line["busy_thread_s"] * watts}, line, session)

    def finish(self, rows: Sequence[Row]) -> list[Row]:
        """Use the driver's 20 ms samples as power where they exist, and leave out the polled value."""
        return [
            replace(row, values={key: value for key, value in row.values.items() if key != "power_watts"})
            if row.source.device in self._sampled and len(row.values) > 1
            else row
            for row in rows
        ]

    def _begin(self, line: Line) -> None:
        self._found.format = FORMAT
        boot = str(line.get("boot_id"))
        self._hosts.add(str(line.get("host")))
        offset_s = line.get("wall_minus_mono_s")
        if offset_s is None:
            offset_s = wall_seconds(line["timestamp"]) - line["mono_ns"] / NS
        offset_s = self._offset_by_boot.setdefault(boot, float(offset_s))
        devices = {str(device["device"]): device for device in line.get("devices", ())}
        self._last = _Session(line, offset_s, devices)
        self._by_id[str(line.get("session"))] = self._last
        if imported := line.get("imported"):  # a log written by `joulelab import --out` keeps its notes
            self._found.format = f"{FORMAT}, imported from {imported.get('format')}"
            self._found.notes += imported.get("notes", [])
            if not imported.get("has_wall", True):
                self._found.elapsed_clock = str(imported.get("clock"))
        headers = self._found.facts.setdefault("headers", [])
        kept = ("host", "boot_id", "timestamp", "interval_s", "joulelab", "job", "driver", "program_pid")
        headers.append({key: line[key] for key in kept if key in line})

    def _readings(self, line: Line, session: _Session | None) -> Iterator[Row]:
        counters = line.get("rapl") or {}
        for domain, energy_j in counters.items():
            facts = session.devices.get(f"rapl:{domain}", {}) if session else {}
            source = self._of_host(_described(f"rapl:{domain}", facts, "cpu"), session)
            yield self._row(source, {"energy_counter_j": float(energy_j)}, line, session)
        read_as = {name: number(line.get(name)) for name in COLUMNS}
        values = {name: value for name, value in read_as.items() if value is not None}
        if line.get("kind", "gpu") == "gpu":
            stamp_ns = line.get("counter_mono_ns")
            if (
                "energy_counter_j" in values and stamp_ns
            ):  # the counter's own moment, some milliseconds off the record's
                counter = {"energy_counter_j": values.pop("energy_counter_j")}
                yield self._row(_gpu(line), counter, {**line, "mono_ns": stamp_ns}, session)
            yield self._row(_gpu(line), values, line, session)
        elif "cpu_utilization_percent" in values:
            host = self._of_host(Source("host", "host", component="host"), session)
            yield self._row(host, {"cpu_utilization_percent": values["cpu_utilization_percent"]}, line, session)

    def _samples(self, line: Line, session: _Session | None) -> Iterator[Row]:
        if session is None:
            return
        facts = session.devices.get(line["device"], {})
        source = _described(line["device"], facts, "gpu")
        self._sampled.add(source.device)
        base_s = line["wall_us_mono_ns"] / NS + session.offset_s
        for stamp_us, power_mw in zip(line["sample_us"], line["sample_mw"], strict=True):
            yield Row(source, {"power_watts": power_mw / 1000}, seconds=base_s - (line["wall_us"] - stamp_us) / 1e6)

    def _of_host(self, source: Source, session: _Session | None) -> Source:
        if len(self._hosts) < 2 or session is None:
            return source
        return replace(source, device=f"{session.header.get('host')}/{source.device}")

    def _row(self, source: Source, values: dict[str, float], line: Line, session: _Session | None) -> Row:
        stamp = next((line[name] for name in _TIME_FIELDS if line.get(name) not in (None, "")), None)
        if session is None or not line.get("mono_ns"):
            return Row(source, values, stamp=stamp if isinstance(stamp, str | float | int) else None)
        seconds = line["mono_ns"] / NS + session.offset_s
        if isinstance(stamp, str):
            self._watch_wall(stamp, seconds)
        return Row(source, values, seconds=seconds)

    def _watch_wall(self, stamp: str, seconds: float) -> None:
        apart_s = wall_seconds(stamp) - seconds
        if abs(apart_s - self._stepped_s) > _STEP_S:
            self._found.notes.append(
                f"the wall clock stepped by {apart_s - self._stepped_s:+.1f} s (or the machine slept) before {stamp}; "
                "times here follow the monotonic clock"
            )
            self._stepped_s = apart_s


def _gpu(line: Line) -> Source:
    index = number(line.get("gpu_index"))
    identity = line.get("device") or (f"gpu:{line['gpu_uuid']}" if line.get("gpu_uuid") else None)
    if identity is None:
        identity = "gpu" if index is None else f"gpu:{int(index)}"
    name = str(line.get("gpu_name") or ("GPU" if index is None else f"GPU {int(index)}"))
    return Source(str(identity), name, index=None if index is None else int(index))


def _described(device: str, facts: Line, component: str) -> Source:
    wrap_j, index = facts.get("wrap_j"), facts.get("facts", {}).get("gpu_index")
    return Source(
        device=device,
        name=str(facts.get("name", device)),
        component=str(facts.get("component", component)),
        counted=bool(facts.get("counted", True)),
        wrap_j=wrap_j,
        max_gap_s=facts.get("facts", {}).get("max_gap_s"),
        index=index,
    )
