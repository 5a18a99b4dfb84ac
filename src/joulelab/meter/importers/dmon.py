"""`nvidia-smi dmon` text: a header that repeats, a row of units, whole watts, and no time unless -o asked for it.

Without stamps the rows are one period apart, 1 s unless -d changed it. The file does not state it, so the period is
reported as assumed, or given by the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from joulelab.meter.importers.power_log import Findings, PowerLog, Row, Source, TimeRule, UnusableLog, gather, number
from joulelab.units import plural

FORMAT = "nvidia-smi dmon"
DEFAULT_PERIOD_S = 1.0
_FIELDS = {
    "pwr": "power_watts",
    "gtemp": "temperature_C",
    "sm": "gpu_utilization_percent",
    "mem": "memory_utilization_percent",
    "fb": "memory_used_MB",
}
_DAY_S = 86_400.0


def looks_like(lines: Sequence[str]) -> bool:
    return any(_names(line) is not None for line in lines)


def _cells(line: str) -> list[str]:
    return line.replace(",", " ").split()


def _names(line: str) -> list[str] | None:
    """The columns, where this is the header's first row."""
    if not line.lstrip().startswith("#"):
        return None
    names = [cell.lower() for cell in _cells(line.lstrip().removeprefix("#"))]
    return names if "gpu" in names and len(names) > 1 else None


def read(lines: Sequence[str], rule: TimeRule) -> PowerLog:
    found = Findings(FORMAT, facts={"power_rounding_w": 1.0})
    stamped = _stamps_in(lines)
    period_s = rule.period_s or DEFAULT_PERIOD_S
    if not stamped:
        given = "given with --period" if rule.period_s else "dmon's default, assumed; set another with --period"
        found.elapsed_clock = f"no timestamps in the file; one reading every {period_s:g} s ({given})"
    elif stamped == ["time"]:
        found.elapsed_clock = "time of day without a date, in the zone of the machine that wrote it"
    if stamped and rule.period_s:
        found.notes.append("the file has timestamps, so --period was ignored")
    return gather(list(_rows(lines, stamped, period_s, found)), rule, found)


def _stamps_in(lines: Sequence[str]) -> list[str]:
    names = next(found for line in lines if (found := _names(line)) is not None)
    if "pwr" not in names:
        raise UnusableLog("this dmon file has no power column (pwr)", "record with `nvidia-smi dmon -s puc`")
    return [name for name in ("date", "time") if name in names]


def _rows(lines: Sequence[str], stamped: Sequence[str], period_s: float, found: Findings) -> Iterator[Row]:
    names: list[str] = []
    counts: dict[str, int] = {}
    days = _Days()
    torn = 0
    powerless: dict[str, int] = {}
    for line in lines:
        names = _names(line) or names
        if line.lstrip().startswith("#") or not line.strip():
            continue
        cells = dict(zip(names, _cells(line), strict=False))
        if len(_cells(line)) != len(names) or not cells["gpu"].isdigit():
            torn += 1
            continue
        index = cells["gpu"]
        read_at = {key: number(cells[column]) for column, key in _FIELDS.items() if column in cells}
        values = {key: value for key, value in read_at.items() if value is not None}
        if number(cells["pwr"]) is None:
            powerless[index] = powerless.get(index, 0) + 1
        source = Source(device=f"gpu:{index}", name=f"GPU {index}", index=int(index))
        if not stamped:
            counts[index] = counts.get(index, -1) + 1
            yield Row(source, values, seconds=counts[index] * period_s)
        elif "date" in stamped:
            yield Row(source, values, stamp=f"{cells['date']} {cells.get('time', '00:00:00')}")
        else:
            yield Row(source, values, stamp=days.seconds(index, cells["time"]))
    if torn:
        found.notes.append(f"{torn} lines do not match the header and were skipped")
    for index, count in powerless.items():
        found.notes.append(f"GPU {index}: {plural(count, 'line')} without a power value (`-`); that energy is missing")


class _Days:
    """Time of day across midnight: a decrease of more than half a day is a new day."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def seconds(self, index: str, text: str) -> float | None:
        try:
            hours, minutes, rest = (float(part) for part in text.split(":"))
        except ValueError:
            return None
        before = self._last.get(index, 0.0)
        day_s = before // _DAY_S * _DAY_S
        at = day_s + hours * 3600 + minutes * 60 + rest
        # rows of several cards may be a second out of order, so only a large decrease is midnight
        if at < before - _DAY_S / 2:
            at += _DAY_S
        self._last[index] = at
        return at
