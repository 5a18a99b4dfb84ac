"""What the checks of `validity.py` look at, gathered from a run's folder: traces, marks, vital signs, environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from joulelab.meter.figures import EnergyFigure
from joulelab.meter.health import most_contended, throttle_shares
from joulelab.meter.integrate import both_paths
from joulelab.meter.series import DeviceSeries
from joulelab.runs.attempt_data import AttemptData, seconds
from joulelab.runs.events import Window
from joulelab.runs.record import IdleBaseline, policy_components
from joulelab.runs.validity import Evidence

# How the NVML sensor words its warning of foreign processes; anything else is a matter of the sensor itself.
_NEIGHBOUR_MARK = "process"

Parts = Sequence[tuple[AttemptData, list[Window]]]


def gather(
    stage: str | None,
    parts: Parts,
    figure: EnergyFigure,
    policy: str,
    idle: tuple[IdleBaseline, ...],
    environment: dict[str, Any],
) -> Evidence:
    """Of one stage, or of the whole run for `stage=None`."""
    windows = [window for _, pieces in parts for window in pieces]
    warnings = [text for attempt, pieces in parts for text in attempt.health.warnings_during(pieces)]
    devices = [series for attempt, _ in parts for series in _devices_behind(attempt, figure)]
    states = [state for attempt, pieces in parts for state in attempt.health.during(pieces)]
    attempts = {(attempt.number, attempt.host): attempt for attempt, _ in parts}
    return Evidence(
        figure=figure,
        window_s=seconds(windows),
        windows=len(windows),
        refresh_s=max((series.refresh_s for series in devices), default=None),
        paths_j=_two_paths(parts, figure, policy),
        idle=None if any(stage in attempt.idle_stages for attempt, _ in parts) else idle,
        neighbours=_unique(text for text in warnings if _NEIGHBOUR_MARK in text),
        sensor_warnings=_unique(text for text in warnings if _NEIGHBOUR_MARK not in text),
        throttled=throttle_shares(states),
        attempts=len(attempts),
        cut_off=sum(not attempt.trace.ended for attempt in attempts.values()),
        shared=_unique(_shared_words(series) for series in devices if _is_shared(series)),
        unmeasured=_unmeasured(parts, policy, environment),
        core_use=most_contended([attempt.core_use(pieces) for attempt, pieces in parts]),
    )


def _devices_behind(attempt: AttemptData, figure: EnergyFigure) -> list[DeviceSeries]:
    return [series for series in attempt.trace.devices if series.device in figure.sources]


def _two_paths(parts: Parts, figure: EnergyFigure, policy: str) -> tuple[float, float] | None:
    """Counter and integral of the component where they disagree most: a sound sensor must not hide a broken one."""
    if not figure.measured:
        return None
    found: list[tuple[float, float]] = []
    for component in policy_components(policy):
        pairs = [both_paths(attempt.trace, component, windows) for attempt, windows in parts]
        counter_j = sum(pair.counter.energy_j or 0.0 for pair in pairs if pair)
        integral_j = sum(pair.integrated.energy_j or 0.0 for pair in pairs if pair)
        if counter_j and integral_j:
            found.append((counter_j, integral_j))
    return max(found, key=lambda pair: abs(pair[1] / pair[0] - 1), default=None)


def _is_shared(series: DeviceSeries) -> bool:
    return bool(series.facts.get("shared") or series.facts.get("node_wide"))


def _shared_words(series: DeviceSeries) -> str:
    how = "covers the whole node" if series.facts.get("node_wide") else "is shared with others"
    return f"{series.name} {how}"


def _unmeasured(parts: Parts, policy: str, environment: dict[str, Any]) -> tuple[str, ...]:
    """A CPU is always there, a GPU where the environment lists one; DRAM often lies inside the package's counter."""
    if policy == "codecarbon" or not parts:
        return ()
    present = [
        name for name in policy_components(policy) if name == "cpu" or (name == "gpu" and environment.get("gpus"))
    ]
    energies = [attempt.energy(windows) for attempt, windows in parts]
    return tuple(name for name in present if not any(getattr(energy, name).measured for energy in energies))


def _unique(texts: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
