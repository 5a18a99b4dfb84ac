"""Stamps to seconds. What goes wrong with clocks in logs is met here, put right where the file allows it, and told.

Naive stamps need a zone: the one given, else this machine's, which is then stated as assumed. In the hour that a clock
runs through twice in autumn the file's own order tells which time round it was. Stamps that run backwards are lines
that came late where they fit between their neighbours, and a step of the wall clock where they do not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone, tzinfo

import numpy as np

from joulelab.errors import UsageError
from joulelab.meter.foreign.power_log import Array

_FORMATS = ("%Y/%m/%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S", "%Y%m%d %H:%M:%S", "%Y-%m-%d %H:%M:%S,%f")
_OFFSET = re.compile(r"([+-])(\d{2}):?(\d{2})$")
# Epoch times above this are in milliseconds: in seconds it lies in the year 5138.
_MILLISECONDS_ABOVE = 1e11


def parse_zone(name: str | None) -> tzinfo | None:
    """A zone by name (Europe/Berlin), `UTC`, or an offset (+02:00); None is this machine's own."""
    if name is None:
        return None
    if match := _OFFSET.fullmatch(name):
        sign = 1 if match[1] == "+" else -1
        return timezone(sign * timedelta(hours=int(match[2]), minutes=int(match[3])))
    if name.upper() in ("UTC", "Z"):
        return UTC
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise UsageError(
            f"--time-zone '{name}' is not a known zone", "a name as Europe/Berlin, UTC, or an offset as +02:00"
        ) from None


@dataclass
class StampReader:
    """Turns stamps of one device into seconds since 1970, in the order of the file."""

    zone: tzinfo | None
    zone_text: str
    naive: int = 0
    aware: int = 0
    unreadable: int = 0
    repeated_hour: int = 0
    impossible: int = 0
    offsets: set[timedelta | None] = field(default_factory=set)

    def seconds(self, stamp: str | float | None, previous_s: float | None) -> float | None:
        if isinstance(stamp, int | float):
            self.aware += 1
            return stamp / 1000 if stamp > _MILLISECONDS_ABOVE else float(stamp)
        moment = None if stamp is None else _parse(stamp)
        if moment is None:
            self.unreadable += 1
            return None
        if moment.tzinfo is not None:
            self.aware += 1
            return moment.timestamp()
        self.naive += 1
        return self._local(moment, previous_s)

    def _local(self, moment: datetime, previous_s: float | None) -> float:
        first, second = (self._at(moment.replace(fold=fold)) for fold in (0, 1))
        self.offsets.add((moment.replace(tzinfo=self.zone) if self.zone else moment.astimezone()).utcoffset())
        if first > second:  # a time that the clock leaps over in spring
            self.impossible += 1
            return first
        if first < second:
            self.repeated_hour += 1
            return second if previous_s is not None and first < previous_s else first
        return first

    def _at(self, moment: datetime) -> float:
        return (moment.replace(tzinfo=self.zone) if self.zone is not None else moment).timestamp()

    def notes(self) -> list[str]:
        notes = []
        if self.unreadable:
            notes.append(f"{self.unreadable} records have no readable time and were left out")
        if self.repeated_hour:
            notes.append(
                f"{self.repeated_hour} stamps lie in the hour that daylight saving runs through twice; "
                "the order of the file decided which time round"
            )
        elif len(self.offsets) > 1:
            notes.append("daylight saving changed during the log; durations take account of it")
        if self.impossible:
            notes.append(f"{self.impossible} stamps do not exist in {self.zone_text}: the zone is probably another")
        return notes

    def clock_text(self) -> str:
        if not self.naive:
            return "wall clock; stamps carry their offset"
        return f"wall clock; stamps without an offset, read as {self.zone_text}"


def stamp_reader(zone_name: str | None) -> StampReader:
    zone = parse_zone(zone_name)
    here = datetime.now().astimezone().tzname() or "local time"
    text = zone_name or f"this machine's zone ({here}; assumed, --time-zone names another)"
    return StampReader(zone, text)


def _parse(stamp: str) -> datetime | None:
    text = stamp.strip()
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        pass
    for form in _FORMATS:
        try:
            return datetime.strptime(text, form)
        except ValueError:
            continue
    return None


@dataclass(frozen=True)
class Ordered:
    seconds: Array
    """In the order of the file, with steps of the clock taken out."""
    late: int
    steps_s: tuple[float, ...]


def put_in_order(seconds: Sequence[float]) -> Ordered:
    """Tell late lines from a clock that was set back, and take the latter out: across it one usual step is assumed."""
    placed = np.array(seconds, dtype=float)
    gaps = np.abs(np.diff(placed))
    usual_s = float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 1.0
    offset_s, late, steps = 0.0, 0, []
    index = 1
    while index < len(placed):
        top = placed[:index].max()
        rest = placed[index:] + offset_s
        if rest[0] >= top:
            # all up to the next fall are in order: no need to look at each
            falls = np.flatnonzero(np.diff(rest) < 0)
            stop = int(falls[0]) + 1 if len(falls) else len(rest)
            placed[index : index + stop] = rest[:stop]
            index += stop
            continue
        returns = np.flatnonzero(rest >= top)
        block = rest[: int(returns[0])] if len(returns) else rest
        return_s = float(rest[returns[0]] - block[-1]) if len(returns) else None
        if _came_late(block, placed[:index], return_s, usual_s):
            placed[index : index + len(block)] = block
            late += len(block)
            index += len(block)
        else:
            steps.append(float(rest[0] - top - usual_s))
            offset_s += float(top + usual_s - rest[0])
    return Ordered(placed, late, tuple(steps))


def _came_late(block: Array, earlier: Array, return_s: float | None, usual_s: float) -> bool:
    """Late lines fill places left free, and the log then jumps back to where it was. A clock that was set goes on from
    its new time in usual steps, among or before the times that are there already."""
    if len(block) > 1 and (np.diff(block) < 0).all():
        return True  # newest first: so some programs write
    if return_s is not None and return_s < 1.5 * usual_s:
        return False
    if return_s is None and block.min() < earlier.min():
        return False
    others = np.sort(earlier)
    at = np.searchsorted(others, block)
    left = np.abs(block - others[np.clip(at - 1, 0, len(others) - 1)])
    right = np.abs(block - others[np.clip(at, 0, len(others) - 1)])
    return bool(np.median(np.minimum(left, right)) >= 0.7 * usual_s)
