"""Energy of an imported log per device, its busy and idle levels, and all figures as plain data (`--json`).

Energy is computed in each way the file allows, trapezoid over power and difference of the counter, shown next to each
other. Polled power misses what happens between two readings; the counter does not, but not every file has it. A gap in
the readings is excluded from the trapezoid and reported, because the power during it is unknown.

Busy and idle are found by power alone: two levels that are far apart compared with their own spread. The cut between
them is Otsu's, which maximizes the variance between the two groups (N. Otsu, IEEE Trans. SMC 9(1), 1979). Readings next
to a change are excluded: a card's power field may be an average over a second, and then they belong to neither level.

Idle power is that of the stable readings before the load. A card that was just loaded draws more than an idle one for
a minute or longer, so readings after the load are neither idle nor busy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np

from joulelab import clock
from joulelab.errors import UsageError
from joulelab.meter.importers.power_log import COLUMNS, Array, DeviceLog, PowerLog, Source, UnusableLog
from joulelab.meter.sensors import counter_rise
from joulelab.units import J_PER_WH

# Readings further apart than this many median steps have a gap between them.
HOLE_FACTOR = 3.0


@dataclass(frozen=True)
class DeviceEnergy:
    device: str
    name: str
    component: str
    counted: bool
    samples: int
    first_s: float
    last_s: float
    interval_s: float | None
    """Median time between readings."""
    mean_w: float | None
    max_w: float | None
    trapezoid_j: float | None
    seen_s: float
    """The part of the duration that the trapezoid covers: all but the gaps, unless they are interpolated."""
    counter_j: float | None
    counter_s: float
    """Time between the first and the last reading of the counter."""
    counter_restarts: int
    holes: tuple[tuple[float, float], ...]
    interpolated: bool
    """Whether the trapezoid runs across the gaps, on request."""

    @property
    def duration_s(self) -> float:
        return self.last_s - self.first_s

    @property
    def covered_s(self) -> float:
        """The time of `best_j`: power x this time is the energy."""
        return self.counter_s if self.counter_j is not None else self.seen_s

    @property
    def best_mean_w(self) -> float | None:
        """Mean power of `best_j`, over the time that it covers."""
        return self.best_j / self.covered_s if self.best_j is not None else None

    @property
    def best_j(self) -> float | None:
        return self.counter_j if self.counter_j is not None else self.trapezoid_j


def device_energy(log: DeviceLog, interpolate_gaps: bool = False) -> DeviceEnergy:
    times, watts = log.series("power_watts")
    steps = np.diff(times)
    usual_s = float(np.median(steps)) if len(steps) else None
    # Steps are irregular in every real log, so a gap is judged by the median step, which a few long ones do not move.
    whole = steps <= HOLE_FACTOR * usual_s if usual_s else np.array([], dtype=bool)
    seen = whole | interpolate_gaps
    seen_s = float(steps[seen].sum())
    trapezoid_j = float(((watts[1:] + watts[:-1]) / 2 * steps)[seen].sum()) if len(steps) else None
    counter_times, counter = log.series("energy_counter_j")
    counter_j, restarts = total_rise(counter_times, counter, log.source)
    span_s = float(counter_times[-1] - counter_times[0]) if counter_j is not None else 0.0
    _, curve_w = log.power()
    # mean power is energy over covered time: dividing by the whole duration would count gaps as 0 W
    mean_w = trapezoid_j / seen_s if trapezoid_j is not None else None
    if mean_w is None and counter_j is not None:
        mean_w = counter_j / span_s
    return DeviceEnergy(
        device=log.source.device,
        name=log.source.name,
        component=log.source.component,
        counted=log.source.counted,
        samples=len(times) or len(counter_times) or len(log.times_s),
        first_s=float(log.times_s[0]),
        last_s=float(log.times_s[-1]),
        interval_s=usual_s,
        mean_w=mean_w,
        max_w=float(curve_w.max()) if len(curve_w) else None,
        trapezoid_j=trapezoid_j,
        seen_s=seen_s,
        counter_j=counter_j,
        counter_s=span_s,
        counter_restarts=restarts,
        holes=tuple((float(times[i]), float(times[i + 1])) for i in np.flatnonzero(~whole)),
        interpolated=interpolate_gaps and not whole.all(),
    )


def total_rise(times_s: Array, counter_j: Array, source: Source) -> tuple[float | None, int]:
    """How far a counter rose, and how often it was set back (the driver was reloaded)."""
    if len(counter_j) < 2:
        return None, 0
    rises, restarts = np.diff(counter_j), 0
    for k in np.flatnonzero(rises < 0):
        elapsed_s = float(times_s[k + 1] - times_s[k])
        rise_j = counter_rise(counter_j[k], counter_j[k + 1], elapsed_s, source.wrap_j, source.max_gap_s)
        # after a restart the counter starts at 0, so its value is the rise; what was used before the restart is lost
        restarts += rise_j is None
        rises[k] = counter_j[k + 1] if rise_j is None else rise_j
    return float(rises.sum()), restarts


# Fewer readings than this between two changes are an excursion, not a level.
SHORTEST_SEGMENT = 4
# The levels must differ by this many of their own spreads, and by this many watts.
CLEAR_SPREADS = 3.0
CLEAR_W = 2.0
INDEPENDENT = 20
# Readings before the load whose standard deviation is below this share of their mean are stable.
STABLE_SPREAD_REL = 0.05


@dataclass(frozen=True)
class Segment:
    from_s: float
    to_s: float
    mean_w: float
    samples: int


@dataclass(frozen=True)
class Level:
    """Mean power of the readings that belong to the level, and how they were selected."""

    power_w: float
    spread_w: float | None
    samples: int
    source: str
    segments: tuple[Segment, ...] = ()

    def half_width_w(self, rounding_w: float) -> float:
        """95 % of the level's mean: spread over readings, and rounding, which is the same for all of them.

        Readings of a level drift together, so that more than `INDEPENDENT` of them do not narrow the interval.
        """
        counted = min(self.samples, INDEPENDENT)
        random_w = 1.96 * (self.spread_w or 0.0) / counted**0.5 if counted else 0.0
        return math.hypot(random_w, rounding_w / 2 if counted else 0.0)


@dataclass(frozen=True)
class Inference:
    """Power over idle x latency. `gross_j` counts the idle power of the card during the inference as well."""

    busy: Level
    idle: Level
    latency_s: float
    rounding_w: float
    """Steps in which the log gives power; a level may be off by half of one."""

    @property
    def net_half_width_w(self) -> float:
        return math.hypot(self.busy.half_width_w(self.rounding_w), self.idle.half_width_w(self.rounding_w))

    @property
    def net_half_width_j(self) -> float:
        return self.net_half_width_w * self.latency_s

    @property
    def net_w(self) -> float:
        return self.busy.power_w - self.idle.power_w

    @property
    def net_j(self) -> float:
        return self.net_w * self.latency_s

    @property
    def gross_j(self) -> float:
        return self.busy.power_w * self.latency_s


@dataclass(frozen=True)
class IdleGiven:
    """Idle power as the user gave it: a segment of the log, watts, or neither."""

    window_s: tuple[float, float] | None = None
    """Seconds since the first reading of the log."""
    power_w: float | None = None
    option: str = "--idle"
    """The command's option for it, named in messages."""
    ways: str = "--idle FROM..TO (seconds of the log) or --idle-watts W"

    @property
    def known(self) -> bool:
        return self.window_s is not None or self.power_w is not None


def parse_idle(text: str, log: PowerLog, option: str = "--idle") -> tuple[float, float]:
    """`FROM..TO`, as seconds since the first reading or as stamps with an offset."""
    parts = text.split("..")
    if len(parts) == 2:
        ends = [_moment(part.strip(), log) for part in parts]
        if ends[0] is not None and ends[1] is not None and ends[0] < ends[1]:
            return ends[0], ends[1]
    raise UsageError(
        f"{option} '{text}' is not a segment of the log",
        "FROM..TO in seconds since its first reading, such as 0..30, or two times, such as 2026-01-31T12:00:00+01:00..",
    )


def _moment(text: str, log: PowerLog) -> float | None:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.timestamp() - log.first_s if log.has_wall else None


def find_levels(times: Array, watts: Array, first_s: float) -> tuple[Level, Level] | None:
    """(idle, busy), or None where the power does not have two clear levels."""
    if len(watts) < 2 * SHORTEST_SEGMENT:
        return None
    high = watts > otsu_cut(watts)
    levels = [_level(times, watts, high == side, first_s, "found in the log") for side in (False, True)]
    idle, busy = levels
    if idle is None or busy is None:
        return None
    # Otsu's method always finds a cut; two levels are real only if they are far apart compared with their spread
    spread = max(idle.spread_w or 0.0, busy.spread_w or 0.0)
    clear = busy.power_w - idle.power_w > max(CLEAR_W, CLEAR_SPREADS * spread)
    return (idle, busy) if clear else None


def stable_idle_before_load(times: Array, watts: Array, first_s: float, idle: Level, busy: Level) -> Level | None:
    """The stable readings directly before the first load; None where the log begins with the load."""
    before = [segment for segment in idle.segments if segment.to_s < busy.segments[0].from_s]
    if not before:
        return None
    inside = (times - first_s >= before[-1].from_s) & (times - first_s <= before[-1].to_s)
    at, readings = times[inside], watts[inside]
    # a card that cools down from earlier work settles: leave out its first readings until the rest is stable
    while len(readings) > SHORTEST_SEGMENT and readings.std(ddof=1) > STABLE_SPREAD_REL * readings.mean():
        at, readings = at[1:], readings[1:]
    segment = Segment(float(at[0]) - first_s, float(at[-1]) - first_s, float(readings.mean()), len(readings))
    return Level(segment.mean_w, _spread(readings), len(readings), "stable readings before the load", (segment,))


def without_cooldown(times: Array, watts: Array, first_s: float, busy: Level) -> Level:
    """Busy readings without a lower level that follows them: a card that was loaded draws more than an idle one."""
    begin, end = busy.segments[0].from_s, busy.segments[-1].to_s
    inside = (times - first_s >= begin) & (times - first_s <= end)
    found = find_levels(times[inside], watts[inside], first_s)
    if found is None:
        return busy
    after, work = found
    follows = after.segments[0].from_s > work.segments[-1].from_s and after.segments[-1].to_s >= end
    return work if follows else busy


def otsu_cut(watts: Array) -> float:
    """The value between two readings that makes the variance between the groups largest."""
    ordered = np.sort(watts)
    count = len(ordered)
    # Cutting after the k-th of n ordered readings gives groups of k and n - k readings with means m0 and m1. Total
    # variance is constant, so the best cut maximizes the variance between the groups, k (n - k) (m1 - m0)^2 / n^2.
    below = np.arange(1, count)
    sums = np.cumsum(ordered)
    difference = (sums[-1] - sums[:-1]) / (count - below) - sums[:-1] / below
    between = below * (count - below) * difference**2
    best = int(between.argmax())
    return float((ordered[best] + ordered[best + 1]) / 2)


def _level(times: Array, watts: Array, member: Array, first_s: float, source: str) -> Level | None:
    # starts and ends of runs of members alternate; the zeros close runs at both ends of the log
    edges = np.flatnonzero(np.diff(np.concatenate([[0], member.astype(int), [0]])))
    kept, segments = [], []
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        # without the readings next to a change of level, except at the ends of the log
        inner = slice(start + (start > 0), stop - (stop < len(watts)))
        if stop - start < SHORTEST_SEGMENT:
            continue
        kept.append(watts[inner])
        mean_w = float(watts[inner].mean())
        segments.append(
            Segment(float(times[inner][0]) - first_s, float(times[inner][-1]) - first_s, mean_w, len(watts[inner]))
        )
    if not kept:
        return None
    readings = np.concatenate(kept)
    return Level(float(readings.mean()), _spread(readings), len(readings), source, tuple(segments))


def _spread(readings: Array) -> float | None:
    return float(readings.std(ddof=1)) if len(readings) > 1 else None


def idle_level(times: Array, watts: Array, first_s: float, given: IdleGiven) -> Level | None:
    """The idle power as given; None where nothing was."""
    if given.power_w is not None:
        return Level(given.power_w, None, 0, "given with --idle-watts")
    if given.window_s is None:
        return None
    begin, end = given.window_s
    inside = watts[(times >= first_s + begin) & (times <= first_s + end)]
    if not len(inside):
        length_s = float(times[-1]) - first_s
        raise UnusableLog(
            f"there is no reading in {given.option} {begin:g}..{end:g} s", f"the log is {length_s:g} s long"
        )
    return Level(float(inside.mean()), _spread(inside), len(inside), f"readings from {begin:g} to {end:g} s")


def inference(
    times: Array, watts: Array, first_s: float, given: IdleGiven, latency_s: float, rounding_w: float = 0.0
) -> Inference:
    idle = idle_level(times, watts, first_s, given)
    found = find_levels(times, watts, first_s)
    if found is not None:
        busy = without_cooldown(times, watts, first_s, found[1])
        idle = idle or stable_idle_before_load(times, watts, first_s, found[0], busy)
        if idle is None:
            raise UnusableLog(
                "the log begins with the load: it has no idle power before it, and power after a load is not idle",
                f"start recording before the load, or specify idle power: {given.ways}",
            )
        return Inference(busy, idle, latency_s, rounding_w)
    if idle is None:
        raise UnusableLog(
            "power does not have two clear levels, so idle and busy cannot be distinguished",
            f"specify which part is idle: {given.ways}",
        )
    rest, source = watts, "all readings"
    if given.window_s is not None:
        begin, end = given.window_s
        rest, source = (
            watts[(times < first_s + begin) | (times > first_s + end)],
            "all readings outside the idle segment",
        )
    if not len(rest):
        raise UnusableLog(f"there is no reading outside {given.option}", "the log must also contain the work")
    return Inference(Level(float(rest.mean()), _spread(rest), len(rest), source), idle, latency_s, rounding_w)


MAX_LISTED_HOLES = 50


@dataclass(frozen=True)
class DeviceFigures:
    """All figures of one device; figures of different devices are never added."""

    energy: DeviceEnergy
    columns: Mapping[str, tuple[float, float]]
    """Mean and highest value of whatever else was read."""
    idle: Level | None = None
    inference: Inference | None = None

    @property
    def above_idle_j(self) -> float | None:
        """Over the time that the trapezoid covers: power in a gap is unknown."""
        if self.idle is None or self.energy.trapezoid_j is None:
            return None
        return self.energy.trapezoid_j - self.idle.power_w * self.energy.seen_s


def figures(
    log: PowerLog, given: IdleGiven, latency_s: float | None = None, interpolate_gaps: bool = False
) -> list[DeviceFigures]:
    return [_figures(log, device, given, latency_s, interpolate_gaps) for device in log.devices]


def _figures(
    log: PowerLog, device: DeviceLog, given: IdleGiven, latency_s: float | None, interpolate_gaps: bool
) -> DeviceFigures:
    energy = device_energy(device, interpolate_gaps)
    columns = _column_figures(device)
    if device.source.component != "gpu":
        return DeviceFigures(energy, columns)
    times, watts = device.power()
    if not len(times):
        return DeviceFigures(energy, columns)
    if latency_s is not None:
        rounding_w = float(log.facts.get("power_rounding_w", 0.0))
        worked = inference(times, watts, log.first_s, given, latency_s, rounding_w)
        return DeviceFigures(energy, columns, worked.idle, worked)
    return DeviceFigures(energy, columns, idle_level(times, watts, log.first_s, given))


def _column_figures(device: DeviceLog) -> dict[str, tuple[float, float]]:
    read_at = {name: device.series(name)[1] for name in COLUMNS if name not in ("power_watts", "energy_counter_j")}
    return {name: (float(values.mean()), float(values.max())) for name, values in read_at.items() if len(values)}


def with_energy(log: PowerLog, rows: list[DeviceFigures]) -> list[DeviceFigures]:
    """The devices whose power or energy was read; an error where there is none."""
    found = [row for row in rows if row.energy.max_w is not None or row.energy.best_j is not None]
    if not found:
        raise UnusableLog(f"this {log.format} has no valid reading of power or energy{_noted(log)}", _RECORD_AGAIN)
    return found


def require_energy(log: PowerLog, rows: Sequence[DeviceFigures]) -> None:
    """One reading has no duration, and so no energy; a log without two of one device is an error."""
    if all(row.energy.best_j is None for row in rows):
        raise UnusableLog(
            f"this {log.format} has one valid reading per device; energy needs at least two{_noted(log)}", _RECORD_AGAIN
        )


_RECORD_AGAIN = "record it again, or give another file"


def _noted(log: PowerLog) -> str:
    return f" ({'; '.join(log.notes)})" if log.notes else ""


def require_inference(log: PowerLog, rows: Sequence[DeviceFigures]) -> None:
    """Energy per inference is computed from a GPU's power over time; a log without it is an error."""
    if any(row.inference is not None for row in rows):
        return
    found = ", ".join(dict.fromkeys(f"{row.energy.device} ({_method(row.energy)})" for row in rows))
    measured = any(row.energy.component != "cpu_estimate" for row in rows)
    raise UnusableLog(
        f"energy per inference needs the measured power of a GPU; this {log.format} has none, it has {found}"
        + ("" if measured else ": nothing in it was measured"),
        "pass a log of a GPU, or measure here: joulelab infer MODEL (--estimate-cpu estimates CPU energy)",
    )


def summary_data(log: PowerLog, rows: list[DeviceFigures]) -> dict[str, Any]:
    return {
        "format": log.format,
        "clock": log.clock,
        "notes": list(log.notes),
        "gaps": [asdict(gap) for gap in log.gaps],
        "units": "J, W, s as in the names; 1 Wh = 3600 J; times as stated in `clock`",
        "devices": [_device_data(log, row) for row in rows],
    }


def _device_data(log: PowerLog, row: DeviceFigures) -> dict[str, Any]:
    energy = row.energy
    data: dict[str, Any] = {
        "device": energy.device,
        "name": energy.name,
        "component": energy.component,
        "counted": energy.counted,
        "samples": energy.samples,
        "first": clock.iso(energy.first_s) if log.has_wall else None,
        "last": clock.iso(energy.last_s) if log.has_wall else None,
        "duration_s": energy.duration_s,
        "sample_interval_s": energy.interval_s,
        "mean_power_w": energy.best_mean_w,
        "max_power_w": energy.max_w,
        "energy_j": energy.best_j,
        "energy_method": _method(energy),
        "trapezoid": _energy_data(energy.trapezoid_j),
        "counter": _energy_data(energy.counter_j),
        "coverage": min(1.0, energy.covered_s / energy.duration_s) if energy.duration_s else None,
        "gaps_interpolated": energy.interpolated,
        "gaps_s": [list(hole) for hole in _relative(energy.holes[:MAX_LISTED_HOLES], log.first_s)],
        "counter_restarts": energy.counter_restarts,
    }
    data |= {name: {"mean": mean, "max": most} for name, (mean, most) in row.columns.items()}
    if row.idle is not None:
        data |= {"idle": asdict(row.idle), "above_idle_j": row.above_idle_j}
    if row.inference is not None:
        data["busy"] = asdict(row.inference.busy)
        data["inference"] = {
            "latency_s": row.inference.latency_s,
            "power_above_idle_w": row.inference.net_w,
            "power_above_idle_half_width_w": row.inference.net_half_width_w,
            "energy_above_idle_j": row.inference.net_j,
            "energy_above_idle_half_width_j": row.inference.net_half_width_j,
            "energy_gross_j": row.inference.gross_j,
        }
    return data


def _method(energy: DeviceEnergy) -> str:
    if energy.best_j is None:
        return "missing"
    if energy.component == "cpu_estimate":
        return "estimated"
    return "counter" if energy.counter_j is not None else "trapezoid"


def _energy_data(energy_j: float | None) -> dict[str, float] | None:
    if energy_j is None:
        return None
    return {"energy_j": energy_j, "energy_kj": energy_j / 1000, "energy_wh": energy_j / J_PER_WH}


def _relative(holes: tuple[tuple[float, float], ...], first_s: float) -> list[tuple[float, float]]:
    return [(begin - first_s, end - first_s) for begin, end in holes]
