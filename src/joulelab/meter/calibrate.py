"""What kind of sensor this is, from readings of it: refresh period, cost of a call, averaging window, agreement, idle.

Pure functions over recorded series (seconds, value), so that every figure of a machine profile can be recomputed and
tested with series of exactly known properties. `calibrate_devices.py` records them on the machine itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, pstdev, quantiles

from joulelab.meter.figures import Frozen

Reading = tuple[float, float]
"""When, in seconds, and what."""

_FEWEST_CHANGES = 5
# Of a falling edge's height: below the noise at the ends, and with refresh steps on both sides.
_HIGH, _LOW = 0.9, 0.1
# Clocks within one step of this size are one state.
_CLOCK_STEP_MHZ = 100


class CallCost(Frozen):
    median_s: float
    p99_s: float
    calls: int


class IdleState(Frozen):
    """Power at rest in one state of the clocks."""

    sm_clock_MHz: float | None  # noqa: N815 (as in the trace)
    power_w: float
    spread_w: float
    duration_s: float


def refresh_period_s(readings: Sequence[Reading]) -> float | None:
    """Median time between two changes of what is read; None where it changed too seldom to tell.

    It must be polled several times faster than it refreshes, under a load that keeps it changing.
    """
    changes = [later[0] for earlier, later in pairwise(readings) if later[1] != earlier[1]]
    if len(changes) <= _FEWEST_CHANGES:
        return None
    return median(later - earlier for earlier, later in pairwise(changes))


def call_cost(durations_s: Sequence[float]) -> CallCost | None:
    if len(durations_s) < 2:
        return None
    worst = quantiles(durations_s, n=100)[-1]
    return CallCost(median_s=median(durations_s), p99_s=min(worst, max(durations_s)), calls=len(durations_s))


def averaging_window_s(readings: Sequence[Reading], load_end_s: float) -> float | None:
    """Over how long the sensor averages, from how it falls after a load has ended.

    A mean over a window falls in a straight line as long as the window, so its way from 90 % to 10 % of the step is
    0.8 windows. None where there was no step to see.
    """
    before = [value for stamp, value in readings if load_end_s - 0.5 <= stamp <= load_end_s]
    after = [(stamp, value) for stamp, value in readings if stamp > load_end_s]
    if len(before) < 3 or len(after) < 10:
        return None
    height = median(before)
    # the level just after the fall: a card at rest goes on losing watts for many seconds as its clocks drop
    settled = [value for stamp, value in after if 2.0 <= stamp - load_end_s <= 3.0]
    floor = median(settled) if settled else after[-1][1]
    step = height - floor
    if step <= 0.1 * height:
        return None
    left = _crossing(after, floor + _HIGH * step)
    reached = _crossing(after, floor + _LOW * step)
    return None if left is None or reached is None else (reached - left) / (_HIGH - _LOW)


def _crossing(falling: Sequence[Reading], level: float) -> float | None:
    return next((stamp for stamp, value in falling if value <= level), None)


def agreement_rel(counter_j: Sequence[Reading], power_w: Sequence[Reading]) -> float | None:
    """Integral of power over the counter's difference, minus 1, over the time both were read."""
    if len(counter_j) < 2 or len(power_w) < 2:
        return None
    start, end = max(counter_j[0][0], power_w[0][0]), min(counter_j[-1][0], power_w[-1][0])
    spent = _at(counter_j, end) - _at(counter_j, start) if end > start else 0.0
    if spent <= 0:
        return None
    inside = [(start, _at(power_w, start)), *(r for r in power_w if start < r[0] < end), (end, _at(power_w, end))]
    integral = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(inside))
    return integral / spent - 1


def _at(readings: Sequence[Reading], stamp: float) -> float:
    """Linear between two readings."""
    for (earlier, low), (later, high) in pairwise(readings):
        if earlier <= stamp <= later:
            return low + (high - low) * (stamp - earlier) / (later - earlier) if later > earlier else high
    return readings[0][1] if stamp < readings[0][0] else readings[-1][1]


def idle_states(rows: Sequence[tuple[float, float, float | None]]) -> tuple[IdleState, ...]:
    """(seconds, watts, SM clock) of a card at rest, gathered by clock; what lasted less than a second is left out."""
    by_clock: dict[float | None, list[tuple[float, float]]] = {}
    for (stamp, power_w, clock_mhz), (following, _, _) in pairwise(rows):
        state = None if clock_mhz is None else round(clock_mhz / _CLOCK_STEP_MHZ) * float(_CLOCK_STEP_MHZ)
        by_clock.setdefault(state, []).append((following - stamp, power_w))
    found = [
        IdleState(
            sm_clock_MHz=clock,
            power_w=fmean(power for _, power in seen),
            spread_w=pstdev(power for _, power in seen),
            duration_s=sum(step for step, _ in seen),
        )
        for clock, seen in by_clock.items()
    ]
    return tuple(sorted((s for s in found if s.duration_s >= 1.0), key=lambda state: -state.power_w))
