"""The idle baselines of a run: how much power doing nothing took, how steadily, and in which state of the machine.

An H200 draws 126 W two seconds after a load, 123 W after ten, and 80 W once its clocks have dropped. An idle power
without its state and stability is therefore half a number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from joulelab.clock import NS
from joulelab.meter.figures import EnergyFigure
from joulelab.meter.health import GpuState
from joulelab.runs.attempt_data import AttemptData, seconds
from joulelab.runs.events import Window
from joulelab.runs.record import IdleBaseline

# Beyond these a baseline was not at rest: clocks dropping, another program, a card still cooling down.
STEADY_SPREAD_REL = 0.05
STEADY_DRIFT_REL = 0.05
PIECE_S = 1.0
_MOST_PIECES = 20
MeanPower = Callable[[EnergyFigure, float], float | None]


def idle_baselines(
    attempts: Sequence[AttemptData], policy: str, mean_power_w: MeanPower = EnergyFigure.mean_power_w
) -> tuple[IdleBaseline, ...]:
    """Measured ones only: an estimate from CPU time knows nothing about idle."""
    found = []
    for attempt in attempts:
        for stage in attempt.idle_stages:
            windows = attempt.windows[stage]
            whole, *pieces = (
                mean_power_w(attempt.energy(part).under_policy(policy), seconds(part))
                for part in (windows, *([piece] for window in windows for piece in _pieces(window)))
            )
            if whole is not None:
                found.append(_baseline(attempt, stage, windows, whole, [w for w in pieces if w is not None]))
    return tuple(found)


def _baseline(
    attempt: AttemptData, stage: str, windows: list[Window], power_w: float, piece_powers_w: list[float]
) -> IdleBaseline:
    spread, drift = spread_and_drift(piece_powers_w)
    states = attempt.health.during(windows)
    loads = [start for name, spans in attempt.windows.items() if name not in attempt.idle_stages for start, _ in spans]
    return IdleBaseline(
        stage=stage,
        before_load=windows[0][0] <= min(loads, default=windows[0][0]),
        attempt=attempt.number,
        duration_s=seconds(windows),
        power_w=power_w,
        spread_rel=spread,
        drift_rel=drift,
        stable=is_steady(spread, drift),
        sm_clock_MHz=_median(states, "sm_clock_mhz"),
        temperature_C=_median(states, "temperature_c"),
        gpu_utilization_percent=_median(states, "utilization_percent"),
        host=attempt.host,
    )


def _pieces(window: Window) -> list[Window]:
    """Pieces of about a second, which is long against every sensor's refresh."""
    count = max(1, min(_MOST_PIECES, int((window[1] - window[0]) / NS / PIECE_S)))
    edges = [window[0] + (window[1] - window[0]) * number // count for number in range(count + 1)]
    return list(pairwise(edges))


def spread_and_drift(powers_w: Sequence[float]) -> tuple[float | None, float | None]:
    """Standard deviation against the mean, and second half against first; None where there are too few pieces."""
    if len(powers_w) < 2 or not any(powers_w):
        return None, None
    half = len(powers_w) // 2
    first, second = statistics.fmean(powers_w[:half]), statistics.fmean(powers_w[-half:])
    spread = statistics.stdev(powers_w) / statistics.fmean(powers_w)
    return spread, second / first - 1 if first else None


def is_steady(spread_rel: float | None, drift_rel: float | None) -> bool:
    if spread_rel is None or drift_rel is None:
        return False
    return spread_rel <= STEADY_SPREAD_REL and abs(drift_rel) <= STEADY_DRIFT_REL


class IdlePower(NamedTuple):
    power_w: float
    half_width_w: float
    """95 %: the spread of the baseline, and the difference to a settled idle state after the load."""


def idle_power(baselines: Sequence[IdleBaseline]) -> IdlePower | None:
    """From the stable baselines before the load; the cool-down after it draws more and is no idle.

    A settled state after the load is another idle state of the machine (its clocks may differ). Which of the two the
    load would have been without its work is unknown, so their difference is part of the error.
    """
    before = [baseline for baseline in baselines if baseline.before_load]
    settled_after = [baseline for baseline in baselines if not baseline.before_load and baseline.stable]
    chosen = [baseline for baseline in before if baseline.stable] or before or settled_after or list(baselines)
    duration_s = sum(baseline.duration_s for baseline in chosen)
    if duration_s <= 0:
        return None
    power_w = sum(baseline.power_w * baseline.duration_s for baseline in chosen) / duration_s
    spread_w = statistics.fmean((b.spread_rel if b.spread_rel is not None else 0.1) * b.power_w for b in chosen)
    pieces = max(1, min(_MOST_PIECES, int(duration_s / PIECE_S)))
    other_w = max((abs(baseline.power_w - power_w) for baseline in (*chosen, *settled_after)), default=0.0)
    return IdlePower(power_w, math.hypot(1.96 * spread_w / math.sqrt(pieces), other_w))


def _median(states: Sequence[GpuState], what: str) -> float | None:
    values = [getattr(state, what) for state in states if getattr(state, what) is not None]
    return float(statistics.median(values)) if values else None
