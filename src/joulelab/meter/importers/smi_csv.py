"""`nvidia-smi --query-gpu=... --format=csv`, with units or without, and its many spellings of "not available"."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence

from joulelab.meter.importers.power_log import Findings, PowerLog, Row, Source, TimeRule, UnusableLog, gather, number
from joulelab.units import plural

FORMAT = "nvidia-smi --query-gpu CSV"
# What each is called in a query, the best first: the plain field is a 1 s average on recent cards.
_FIELDS = {
    "power_watts": ("power.draw.instant", "power.draw", "power.draw.average"),
    "temperature_C": ("temperature.gpu",),
    "gpu_utilization_percent": ("utilization.gpu",),
    "memory_utilization_percent": ("utilization.memory",),
    "memory_used_MB": ("memory.used",),
}
_IDENTITIES = ("uuid", "gpu_uuid", "index", "pci.bus_id", "gpu_bus_id", "serial")
_UNIT = re.compile(r"\s*\[.*\]\s*$")


def _header(line: str) -> list[str]:
    return [_UNIT.sub("", cell).strip().lower() for cell in line.split(",")]


def looks_like(lines: Sequence[str]) -> bool:
    names = _header(lines[0])
    return any(name.startswith("power.draw") for name in names) or (
        "timestamp" in names and any(name.startswith(("utilization.", "memory.used")) for name in names)
    )


def read(lines: Sequence[str], rule: TimeRule) -> PowerLog:
    names = _header(lines[0])
    power = next((name for name in _FIELDS["power_watts"] if name in names), None)
    if power is None:
        raise UnusableLog("this nvidia-smi file has no power.draw column", "add power.draw to --query-gpu")
    found = Findings(FORMAT)
    if "timestamp" not in names:
        if rule.period_s is None:
            raise UnusableLog(
                "this nvidia-smi file has no timestamp column",
                "give the seconds between readings with --period, or also query timestamp",
            )
        found.elapsed_clock = f"no timestamps in the file; one reading every {rule.period_s:g} s (given with --period)"
    if not any(name in names for name in _IDENTITIES):
        found.notes.append("no index, uuid or bus id column: all rows are taken as one GPU")
    found.facts["power_field"] = power
    return gather(list(_rows(lines, names, rule, found)), rule, found)


def _rows(lines: Sequence[str], names: Sequence[str], rule: TimeRule, found: Findings) -> Iterator[Row]:
    counts: dict[str, int] = {}
    torn = absent = 0
    for cells in csv.reader(lines[1:], skipinitialspace=True):
        if len(cells) != len(names):
            torn += bool(cells)
            continue
        row = dict(zip(names, cells, strict=True))
        if _header(",".join(cells)) == list(names):  # a second recording appended to the first
            continue
        source = _source(row)
        values = {}
        for key, candidates in _FIELDS.items():
            read_as = [number(row[name]) for name in candidates if name in row]
            value = next((one for one in read_as if one is not None), None)
            if value is not None:
                values[key] = value
        absent += "power_watts" not in values
        if "timestamp" in row:
            yield Row(source, values, stamp=row["timestamp"])
        else:
            counts[source.device] = counts.get(source.device, -1) + 1
            yield Row(source, values, seconds=counts[source.device] * (rule.period_s or 0.0))
    if torn:
        found.notes.append(f"{torn} lines do not match the header and were skipped")
    if absent:
        found.notes.append(f"{plural(absent, 'row')} without a power value ([N/A] or an error)")


def _source(row: dict[str, str]) -> Source:
    identity = next((row[name].strip() for name in _IDENTITIES if name in row), "0")
    index = row.get("index", "").strip()
    name = row.get("name", row.get("gpu_name", "")).strip() or f"GPU {index or identity}"
    return Source(device=f"gpu:{identity}", name=name, index=int(index) if index.isdigit() else None)
