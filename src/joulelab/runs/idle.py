"""The idle baselines of a run: how much power doing nothing took, how steadily, and in which state of the machine.

An H200 draws 126 W two seconds after a load, 123 W after ten, and 80 W once its clocks have dropped. An idle power
without its state and stability is therefore half a number.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from joulelab.clock import NS
from joulelab.meter.vitals import GpuState
from joulelab.runs.attempt_data import AttemptData, seconds
from joulelab.runs.events import Window
from joulelab.runs.record import IdleBaseline

# Beyond these a baseline was not at rest: clocks dropping, another program, a card still cooling down.
STEADY_SPREAD_REL = 0.05
STEADY_DRIFT_REL = 0.05
PIECE_S = 1.0
_MOST_PIECES = 20


def idle_baselines(attempts: Sequence[AttemptData], policy: str) -> tuple[IdleBaseline, ...]:
    """Measured ones only: an estimate from CPU time knows nothing about idle."""
    found = []
    for attempt in attempts:
        for stage in attempt.idle_stages:
            windows = attempt.windows[stage]
            figure = attempt.energy(windows).under_policy(policy)
            if figure.energy_j is not None and seconds(windows) > 0:
                found.append(_baseline(attempt, stage, windows, figure.energy_j, policy))
    return tuple(found)


def _baseline(attempt: AttemptData, stage: str, windows: list[Window], energy_j: float, policy: str) -> IdleBaseline:
    powers = [power for window in windows for power in _piece_powers(attempt, window, policy)]
    spread, drift = spread_and_drift(powers)
    states = attempt.vitals.during(windows)
    return IdleBaseline(
        stage=stage,
        attempt=attempt.number,
        duration_s=seconds(windows),
        power_w=energy_j / seconds(windows),
        spread_rel=spread,
        drift_rel=drift,
        stable=is_steady(spread, drift),
        sm_clock_MHz=_median(states, "sm_clock_mhz"),
        temperature_C=_median(states, "temperature_c"),
        gpu_utilization_percent=_median(states, "utilization_percent"),
        host=attempt.host,
    )


def _piece_powers(attempt: AttemptData, window: Window, policy: str) -> list[float]:
    """Mean power in pieces of about a second, which is long against every sensor's refresh."""
    count = max(1, min(_MOST_PIECES, int((window[1] - window[0]) / NS / PIECE_S)))
    edges = [window[0] + (window[1] - window[0]) * number // count for number in range(count + 1)]
    powers = []
    for piece in pairwise(edges):
        figure = attempt.energy([piece]).under_policy(policy)
        if figure.energy_j is not None:
            powers.append(figure.energy_j / seconds([piece]))
    return powers


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


def mean_idle_power_w(baselines: Sequence[IdleBaseline]) -> float | None:
    """Over all baselines, by their length."""
    duration_s = sum(baseline.duration_s for baseline in baselines)
    return sum(b.power_w * b.duration_s for b in baselines) / duration_s if duration_s else None


def _median(states: Sequence[GpuState], what: str) -> float | None:
    values = [getattr(state, what) for state in states if getattr(state, what) is not None]
    return float(statistics.median(values)) if values else None
