"""Busy and idle stretches of a log, found by its power alone: two levels far apart against their own spread.

The cut between them is Otsu's (it makes the two groups as unlike as possible). The readings next to a change are left
out: a card's power field may be an average over a second, and then they belong to neither level.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import numpy as np

from joulelab.errors import UsageError
from joulelab.meter.foreign.power_log import Array, PowerLog, UnusableLog

# Fewer readings than this between two changes are an excursion and no level.
SHORTEST_STRETCH = 4
# The levels must differ by this many of their own spreads, and by this many watts.
CLEAR_SPREADS = 3.0
CLEAR_W = 2.0


@dataclass(frozen=True)
class Stretch:
    from_s: float
    to_s: float
    mean_w: float
    samples: int


@dataclass(frozen=True)
class Level:
    """The mean over the readings that make it up, and how that was decided."""

    power_w: float
    spread_w: float | None
    samples: int
    source: str
    stretches: tuple[Stretch, ...] = ()


@dataclass(frozen=True)
class Inference:
    """Power over idle x latency. `gross_j` counts the idle power of the card during the inference as well."""

    busy: Level
    idle: Level
    latency_s: float

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
    """What the user says about idle: a stretch of the log, watts, or nothing."""

    window_s: tuple[float, float] | None = None
    """Seconds since the first reading of the log."""
    power_w: float | None = None
    option: str = "--idle"
    """The verb's option for it; what is answered names that one."""
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
        f"{option} '{text}' is not a stretch of the log",
        "FROM..TO in seconds since its first reading, as 0..30, or two times, as 2026-01-31T12:00:00+01:00..",
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
    if len(watts) < 2 * SHORTEST_STRETCH:
        return None
    high = watts > otsu_cut(watts)
    levels = [_level(times, watts, high == side, first_s, "found in the log") for side in (False, True)]
    idle, busy = levels
    if idle is None or busy is None:
        return None
    spread = max(idle.spread_w or 0.0, busy.spread_w or 0.0)
    clear = busy.power_w - idle.power_w > max(CLEAR_W, CLEAR_SPREADS * spread)
    return (idle, busy) if clear else None


def otsu_cut(watts: Array) -> float:
    """The value between two readings that makes the variance between the groups largest."""
    ordered = np.sort(watts)
    count = len(ordered)
    below = np.arange(1, count)
    sums = np.cumsum(ordered)
    difference = (sums[-1] - sums[:-1]) / (count - below) - sums[:-1] / below
    between = below * (count - below) * difference**2
    best = int(between.argmax())
    return float((ordered[best] + ordered[best + 1]) / 2)


def _level(times: Array, watts: Array, member: Array, first_s: float, source: str) -> Level | None:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], member.astype(int), [0]])))
    kept, stretches = [], []
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        inner = slice(start + (start > 0), stop - (stop < len(watts)))
        if stop - start < SHORTEST_STRETCH or inner.stop <= inner.start:
            continue
        kept.append(watts[inner])
        mean_w = float(watts[inner].mean())
        stretches.append(
            Stretch(float(times[inner][0]) - first_s, float(times[inner][-1]) - first_s, mean_w, len(watts[inner]))
        )
    if not kept:
        return None
    readings = np.concatenate(kept)
    return Level(float(readings.mean()), _spread(readings), len(readings), source, tuple(stretches))


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
        length = float(times[-1]) - first_s if len(times) else 0.0
        raise UnusableLog(f"no reading lies in {given.option} {begin:g}..{end:g} s", f"the log is {length:g} s long")
    return Level(float(inside.mean()), _spread(inside), len(inside), f"readings from {begin:g} to {end:g} s")


def inference(times: Array, watts: Array, first_s: float, given: IdleGiven, latency_s: float) -> Inference:
    idle = idle_level(times, watts, first_s, given)
    found = find_levels(times, watts, first_s)
    if found is not None:
        return Inference(found[1], idle or found[0], latency_s)
    if idle is None:
        raise UnusableLog(
            "the power has no two clear levels, so idle cannot be told from busy",
            f"say which is idle: {given.ways}",
        )
    begin, end = given.window_s or (0.0, -1.0)
    rest = watts[(times < first_s + begin) | (times > first_s + end)]
    if not len(rest):
        raise UnusableLog(f"no reading lies outside {given.option}", "a log of the work is needed as well")
    source = "all readings outside the idle stretch" if given.window_s else "all readings"
    return Inference(Level(float(rest.mean()), _spread(rest), len(rest), source), idle, latency_s)
