"""What all importers share: rows as they were in the file, their times, and the log made of them, by device.

Column names are the operators' field names; a value that the file does not have is NaN, never 0. Every irregularity
(duplicates, late lines, clock steps, time zones that had to be assumed) is a note of the log.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joulelab.errors import JoulelabError, UsageError
from joulelab.meter.figures import Method
from joulelab.units import duration_text, plural

_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z%/]*)\s*$")


def number(cell: Any) -> float | None:
    """43.2, '43.20 W' and '17 %' are numbers; '[N/A]', '-', 'nan', 1e309 and nothing are None."""
    if isinstance(cell, bool) or cell is None:
        return None
    if not isinstance(cell, int | float):
        match = _NUMBER.match(str(cell))
        if match is None:
            return None
        cell = match[1]
    try:
        value = float(cell)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return value if math.isfinite(value) else None


# More than the electricity of all data centers in a year, in joules, and more than 30 billion years, in seconds.
_LARGEST_AMOUNT = 1e18


def amount(cell: Any) -> float | None:
    """A number that can be an energy, a power or a duration: neither negative nor beyond all bounds."""
    value = number(cell)
    return value if value is not None and 0 <= value <= _LARGEST_AMOUNT else None


Array = NDArray[np.float64]
COLUMNS = (
    "power_watts",
    "energy_counter_j",
    "gpu_utilization_percent",
    "memory_used_MB",
    "memory_utilization_percent",
    "temperature_C",
    "cpu_utilization_percent",
)


class UnknownFormat(UsageError):
    """A file in none of the supported formats."""


class UnusableLog(JoulelabError):
    """A log of a known format that lacks what the command needs."""

    exit_code = 2


@dataclass(frozen=True)
class Source:
    """The measured device, as far as the file names it."""

    device: str
    name: str = ""
    component: str = "gpu"
    counted: bool = True
    wrap_j: float | None = None
    max_gap_s: float | None = None
    """The longest time between two readings over which a wrapping counter can be unwrapped."""
    index: int | None = None


@dataclass(frozen=True)
class Row:
    source: Source
    values: Mapping[str, float]
    stamp: str | float | None = None
    """Time as the file has it: text, or a number of seconds since 1970."""
    seconds: float | None = None
    """Time on a clock known to be sound (monotonic time placed by the header), where the file has one."""


@dataclass(frozen=True)
class LogGap:
    """Time for which the recording program itself reported a gap."""

    device: str
    stamp: str
    reason: str


@dataclass(frozen=True)
class DeviceLog:
    """One device's readings; times ascend strictly, in seconds since 1970 or, without stamps, since the start."""

    source: Source
    times_s: Array
    columns: Mapping[str, Array]

    def series(self, column: str) -> tuple[Array, Array]:
        """The times and values at which this column was read."""
        values = self.columns.get(column)
        if values is None:
            return np.array([]), np.array([])
        known = ~np.isnan(values)
        return self.times_s[known], values[known]

    def power(self) -> tuple[Array, Array]:
        """Power as read, or else the slope of the counter, at the middle of each step."""
        times, watts = self.series("power_watts")
        if len(times):
            return times, watts
        times, joules = self.series("energy_counter_j")
        if len(times) < 2:
            return np.array([]), np.array([])
        slope = np.diff(joules) / np.diff(times)
        rising = slope >= 0  # a decrease is a wrap or a restart, whose power is unknown
        return ((times[1:] + times[:-1]) / 2)[rising], slope[rising]


@dataclass(frozen=True)
class ReportedEnergy:
    """Energy of one component over a whole stage, as another program stated it. Its interval is not known."""

    component: str
    """`gpu`, `cpu`, `dram` or `codecarbon`."""
    energy_j: float
    method: Method
    peak_w: float | None = None


@dataclass(frozen=True)
class StageLog:
    """One stage of someone else's run: its energies as stated, or the power readings of its time."""

    name: str
    role: str
    activity: str
    duration_s: float
    started_s: float | None = None
    """Seconds since 1970, where the file states it."""
    energies: tuple[ReportedEnergy, ...] = ()
    power: PowerLog | None = None
    tokens: int | None = None
    complete: bool = True
    """False for a snapshot of a stage whose end was not recorded."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else the file states about the stage, kept in the run's findings."""


@dataclass(frozen=True)
class RunLog:
    """Someone else's run: what becomes one run of the store."""

    name: str
    format: str
    clock: str
    stages: tuple[StageLog, ...]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PowerLog:
    format: str
    clock: str
    """Description of where the times come from, with assumptions."""
    has_wall: bool
    devices: tuple[DeviceLog, ...]
    notes: tuple[str, ...] = ()
    """What a reader of the figures must know: clock steps, duplicates, lines that could not be read."""
    gaps: tuple[LogGap, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def first_s(self) -> float:
        return min((float(device.times_s[0]) for device in self.devices if len(device.times_s)), default=0.0)


_FORMATS = ("%Y/%m/%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S", "%Y%m%d %H:%M:%S", "%Y-%m-%d %H:%M:%S,%f")
ELAPSED = "seconds since the start of the log; the file has no date"
_OFFSET = re.compile(r"([+-])(\d{2}):?(\d{2})$")
# Epoch times of 1973 to 5138 in seconds are between 1e8 and 1e11; in ms, us and ns they are 1000, 10^6 and 10^9 times
# as large, so that the magnitude alone decides the unit. Smaller numbers count from the start of the log.
_EPOCH_ABOVE = 1e8
_LATEST_EPOCH_NS = 1e20
# The year 2096. Nanoseconds of a log that begins and ends within these bounds fit into 64 bits.
_LATEST_S = 4e9
_EPOCH_UNITS = ((1e11, 1.0, "s"), (1e14, 1e3, "ms"), (1e17, 1e6, "us"), (_LATEST_EPOCH_NS, 1e9, "ns"))


def epoch_seconds(stamp: float) -> tuple[float, str]:
    """Seconds since 1970 and the unit of the stamp, by its magnitude; `elapsed s` for a small number."""
    if abs(stamp) < _EPOCH_ABOVE:
        return stamp, "elapsed s"
    return next((stamp / scale, unit) for limit, scale, unit in _EPOCH_UNITS if abs(stamp) < limit)


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
            f"--time-zone '{name}' is not a known zone",
            "use a name such as Europe/Berlin or UTC, or an offset such as +02:00",
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
    epoch_units: set[str] = field(default_factory=set)
    """Units of stamps that are numbers: s, ms, us or ns since 1970, or seconds since the start of the log."""
    offsets: set[timedelta | None] = field(default_factory=set)

    def seconds(self, stamp: str | float | None, previous_s: float | None) -> float | None:
        as_number = number(stamp) if isinstance(stamp, int | float) else _as_number(stamp)
        if as_number is not None and abs(as_number) < _LATEST_EPOCH_NS:
            self.aware += 1
            epoch_s, unit = epoch_seconds(as_number)
            if abs(epoch_s) > _LATEST_S:
                self.unreadable += 1
                return None
            self.epoch_units.add(unit)
            return epoch_s
        moment = None if not isinstance(stamp, str) else _parse(stamp)
        try:
            seconds = None if moment is None else self._of_moment(moment, previous_s)
        except (OverflowError, ValueError, OSError):  # the years 1 and 9999 have no UTC time in every zone
            seconds = None
        if seconds is None or abs(seconds) > _LATEST_S:
            self.unreadable += 1
            return None
        return seconds

    def _of_moment(self, moment: datetime, previous_s: float | None) -> float:
        if moment.tzinfo is not None:
            self.aware += 1
            return moment.timestamp()
        self.naive += 1
        return self._local(moment, previous_s)

    def _local(self, moment: datetime, previous_s: float | None) -> float:
        # PEP 495: `fold` selects the first or second occurrence of a local time. Both are equal for most times, the
        # second is later in the repeated hour of autumn and earlier in the skipped hour of spring.
        first, second = (self._at(moment.replace(fold=fold)) for fold in (0, 1))
        self.offsets.add((moment.replace(tzinfo=self.zone) if self.zone else moment.astimezone()).utcoffset())
        if first > second:  # a time that daylight saving skips in spring
            self.impossible += 1
            return first
        if first < second:
            self.repeated_hour += 1
            # times of a log ascend: where the first occurrence would go back, the second is meant
            return second if previous_s is not None and first < previous_s else first
        return first

    def _at(self, moment: datetime) -> float:
        return (moment.replace(tzinfo=self.zone) if self.zone is not None else moment).timestamp()

    def notes(self) -> list[str]:
        notes = []
        if len(self.epoch_units) > 1:
            notes.append(
                f"numeric timestamps have different units, judging by their size: {', '.join(sorted(self.epoch_units))}"
            )
        if self.unreadable:
            notes.append(f"{self.unreadable} records have no readable time and were skipped")
        if self.repeated_hour:
            notes.append(
                f"{self.repeated_hour} timestamps are in the hour that daylight saving time repeats; "
                "the order in the file decided between the two"
            )
        elif len(self.offsets) > 1:
            notes.append("daylight saving time changed during the log; durations account for it")
        if self.impossible:
            notes.append(
                f"{self.impossible} timestamps do not exist in {self.zone_text}: the time zone is probably wrong"
            )
        return notes

    def clock_text(self) -> str:
        if self.epoch_units and not self.naive:
            if self.epoch_units == {"elapsed s"}:
                return ELAPSED
            return (
                f"wall clock; timestamps are {' and '.join(sorted(self.epoch_units))} since 1970, judging by their size"
            )
        if not self.naive:
            return "wall clock; timestamps have an offset"
        return f"wall clock; timestamps without an offset, read as {self.zone_text}"


def stamp_reader(zone_name: str | None) -> StampReader:
    zone = parse_zone(zone_name)
    here = datetime.now().astimezone().tzname() or "local time"
    text = zone_name or f"this machine's zone ({here}; assumed; set another with --time-zone)"
    return StampReader(zone, text)


def _as_number(stamp: str | None) -> float | None:
    """A stamp that is a number written as text; dates such as 20260131 12:00:00 have more than a number."""
    try:
        value = float(stamp) if stamp is not None else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


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
    """Distinguish late lines from a clock that was set back; a clock step is replaced by one median step."""
    # Walk through the file with `top`, the latest time so far. A block of times below `top` is either late lines, which
    # keep their times, or a clock that was set back, after which all times are moved by `offset_s`.
    placed = np.array(seconds, dtype=float)
    gaps = np.abs(np.diff(placed))
    usual_s = float(np.median(gaps[gaps > 0])) if (gaps > 0).any() else 1.0
    offset_s, late, steps = 0.0, 0, []
    index = 1
    while index < len(placed):
        top = placed[:index].max()
        rest = placed[index:] + offset_s
        if rest[0] >= top:
            # all up to the next decrease are in order and need no check
            falls = np.flatnonzero(np.diff(rest) < 0)
            stop = int(falls[0]) + 1 if len(falls) else len(rest)
            placed[index : index + stop] = rest[:stop]
            index += stop
            continue
        # the block ends where times are above `top` again, if they ever are
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
    """Late lines fill free places, and the log then jumps back to where it was. A clock that was set continues from its
    new time in regular steps, among or before the times that are there already."""
    if block[-1] < block[0] and (np.diff(block) <= 0).all():
        return True  # newest first, as some programs write
    if return_s is not None and return_s < 1.5 * usual_s:
        return False  # no jump back to where the log was: regular steps lead out of the block
    if return_s is None and block.min() < earlier.min():
        return False  # the rest of the log is before its start
    # Late lines were missing where they belong, so they are about a step away from the times that are there. Times of
    # a clock that was set back are a second pass over the same time, at random distances from the first: a quarter of
    # a step in the median.
    others = np.sort(earlier)
    at = np.searchsorted(others, block)  # the last of the others is above the block
    left = np.abs(block - others[np.maximum(at - 1, 0)])
    right = others[at] - block
    return bool(np.median(np.minimum(left, right)) >= 0.7 * usual_s)


@dataclass(frozen=True)
class TimeRule:
    """The user's statements about times."""

    zone: str | None = None
    period_s: float | None = None


@dataclass
class Findings:
    """What a reader found besides rows."""

    format: str
    notes: list[str] = field(default_factory=list)
    gaps: list[LogGap] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    elapsed_clock: str = ""
    """Set where times are not wall clock times: what they are."""
    energy_unit: str | None = None
    """Unit that the file states for its energy column, whose values are still unscaled in `energy_counter_j`."""
    starts_at_zero: bool = False
    """Whether time 0 is the start of the work: a first row of energy per row then begins there."""


def _possible(row: Row) -> Row:
    """The row without values that no sensor reads and no clock shows; all importers pass here, so none prints them."""
    values = {
        name: value
        for name, value in row.values.items()
        if name not in ("power_watts", "energy_counter_j") or amount(value) is not None
    }
    has_time = row.seconds is None or (math.isfinite(row.seconds) and abs(row.seconds) <= _LATEST_S)
    if len(values) == len(row.values) and has_time:
        return row
    return replace(row, values=values, seconds=row.seconds if has_time else None)


def gather(rows: Iterable[Row], rule: TimeRule, found: Findings) -> PowerLog:
    by_device: dict[str, list[Row]] = {}
    impossible = 0
    for row in rows:
        possible = _possible(row)
        impossible += possible is not row
        by_device.setdefault(row.source.device, []).append(possible)
    stamps = stamp_reader(rule.zone)
    devices, notes = [], list(found.notes)
    if impossible:
        notes.append(
            f"{plural(impossible, 'row')} with a negative or impossible power, energy or time: that value is not used"
        )
    for name, device_rows in by_device.items():
        device, own = _device(device_rows, stamps)
        if found.energy_unit and "energy_counter_j" in device.columns:
            device, how = _with_energy_in_j(device, found.energy_unit, found.starts_at_zero)
            own.append(how)
        notes += [f"{name}: {note}" for note in own]
        if len(device.times_s):
            devices.append(device)
    notes += stamps.notes()
    sound = sum(1 for rows_of in by_device.values() for row in rows_of if row.seconds is not None)
    clock = found.elapsed_clock or _clock_text(stamps, sound)
    return PowerLog(
        format=found.format,
        clock=clock,
        has_wall=not found.elapsed_clock and clock != ELAPSED,
        devices=tuple(devices),
        notes=tuple(notes),
        gaps=tuple(found.gaps),
        facts=found.facts,
    )


# What an energy column may be: (scale to J, name). Tools disagree with their own labels: one that reads millijoules and
# divides by the wrong power of ten writes microjoules under `energy_mJ`.
_ENERGY_UNITS = {"uj": 1e-6, "mj": 1e-3, "j": 1.0, "kj": 1e3, "wh": 3600.0, "kwh": 3.6e6}
_UNIT_NAMES = {"uj": "uJ", "mj": "mJ", "j": "J", "kj": "kJ", "wh": "Wh", "kwh": "kWh"}
# Polled power and an energy counter of one card agree within a few percent; units differ by 1000.
_SAME_ENERGY_FACTOR = 3.0


def _with_energy_in_j(device: DeviceLog, stated_unit: str, starts_at_zero: bool) -> tuple[DeviceLog, str]:
    """The device with its energy column as a cumulative counter in J.

    Whether the column is cumulative or per row, and its unit, follow from power x time where the file has power: the
    reading that gives the same energy is right. Without power the stated unit holds, and a column that never falls is
    cumulative.
    """
    times, values = device.series("energy_counter_j")
    power_times, watts = device.series("power_watts")
    stated = stated_unit.lower()
    rises = bool(len(values) > 1 and (np.diff(values) >= 0).all())
    # numpy's own function has two names: trapz before version 2, trapezoid since
    by_power_j = float(np.sum(np.diff(power_times) * (watts[1:] + watts[:-1])) / 2)
    sums = {True: float(values[-1] - values[0]), False: float(values[1:].sum())}
    readings = [(cumulative, unit) for unit in _ENERGY_UNITS for cumulative in (True, False) if rises or not cumulative]
    if by_power_j > 0 and len(values) > 1:
        ratios = {one: sums[one[0]] * _ENERGY_UNITS[one[1]] / by_power_j for one in readings}
        close = {one: ratio for one, ratio in ratios.items() if 1 / _SAME_ENERGY_FACTOR < ratio < _SAME_ENERGY_FACTOR}
        if not close:
            columns = {name: column for name, column in device.columns.items() if name != "energy_counter_j"}
            return DeviceLog(device.source, device.times_s, columns), (
                f"the energy column ({stated_unit}) does not match power x time in any unit and was ignored"
            )
        # among readings that fit, the stated unit first, then the one nearest to power x time
        cumulative, unit = min(close, key=lambda one: (one[1] != stated, abs(math.log(close[one]))))
        kind = "cumulative" if cumulative else "energy per row"
        how = f"the energy column is {kind} in {_UNIT_NAMES[unit]}, inferred from power x time"
        if unit != stated:
            how += f" (its name says {stated_unit})"
    else:
        cumulative, unit = rises, stated
        kind = "cumulative" if rises else "energy per row"
        how = f"the energy column is read as {kind} in {stated_unit}, as its name says"
    scaled = values * _ENERGY_UNITS[unit]
    all_times, columns = device.times_s, dict(device.columns)
    if not cumulative:
        # a row's energy is that of the step that ends with it
        scaled = np.cumsum(scaled)
        if starts_at_zero and times[0] > 0:
            all_times = np.concatenate([[0.0], all_times])
            columns = {name: np.concatenate([[np.nan], values]) for name, values in columns.items()}
            times, scaled = np.concatenate([[0.0], times]), np.concatenate([[0.0], scaled])
        else:
            how += f"; the first row ({scaled[0]:.4g} J) begins before the first time stamp and is not counted"
    column = np.full(len(all_times), np.nan)
    column[np.searchsorted(all_times, times)] = scaled
    return DeviceLog(device.source, all_times, {**columns, "energy_counter_j": column}), how


def _clock_text(stamps: StampReader, sound: int) -> str:
    if not sound:
        return stamps.clock_text()
    ours = "the recorder's monotonic clock, placed by its header's wall clock"
    return f"{ours}; for older records: {stamps.clock_text()}" if stamps.naive + stamps.aware else ours


def _device(rows: Sequence[Row], stamps: StampReader) -> tuple[DeviceLog, list[str]]:
    unique = list({_identity(row): row for row in rows}.values())
    notes = [f"{len(rows) - len(unique)} records are in the file twice"] if len(unique) < len(rows) else []
    times, kept = _seconds(unique, stamps, notes)
    order = np.argsort(times, kind="stable")
    columns = {name: _column(kept, name)[order] for name in COLUMNS if any(name in row.values for row in kept)}
    return _without_equal_times(kept[0].source if kept else rows[0].source, times[order], columns, notes), notes


def _identity(row: Row) -> tuple[Any, ...]:
    """Records without any time are never the same: equal readings are the rule for them."""
    when = row.seconds if row.seconds is not None else row.stamp
    return (when if when is not None else id(row), *sorted(row.values.items(), key=lambda item: item[0]))


def _seconds(rows: Sequence[Row], stamps: StampReader, notes: list[str]) -> tuple[Array, list[Row]]:
    sound = [row for row in rows if row.seconds is not None]
    others, seconds = [], []
    previous = None
    for row in rows:
        if row.seconds is None and (at := stamps.seconds(row.stamp, previous)) is not None:
            others.append(row)
            seconds.append(at)
            previous = at
    ordered = put_in_order(seconds)
    if ordered.late:
        notes.append(f"{ordered.late} records were out of order and were sorted by time")
    for step_s in ordered.steps_s:
        notes.append(
            f"the clock was set back by {duration_text(-step_s)} during the log: later times are shifted, "
            "and one median step is assumed across the change"
        )
    return np.concatenate([np.array([row.seconds for row in sound], dtype=float), ordered.seconds]), [*sound, *others]


def _column(rows: Sequence[Row], name: str) -> Array:
    return np.array([row.values.get(name, np.nan) for row in rows], dtype=float)


def _without_equal_times(source: Source, times: Array, columns: Mapping[str, Array], notes: list[str]) -> DeviceLog:
    """Stamps in whole seconds repeat when sampling was faster: their mean is that second's value."""
    unique, where = np.unique(times, return_inverse=True)
    if len(unique) == len(times):
        return DeviceLog(source, times, dict(columns))
    notes.append(f"{len(times) - len(unique)} records have the same timestamp as the one before; their mean is used")
    merged = {}
    for name, values in columns.items():
        known = ~np.isnan(values)  # a mean over the readings that have the value, NaN where none has
        counts = np.bincount(where[known], minlength=len(unique))
        sums = np.bincount(where[known], weights=values[known], minlength=len(unique))
        merged[name] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return DeviceLog(source, unique, merged)
