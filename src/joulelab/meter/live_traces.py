"""Joules and watts of a run that goes on, as others see it: from its traces' tails, over all its hosts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from joulelab.meter.live import LiveJoules


@dataclass(frozen=True)
class LiveReading:
    energy_j: float | None
    power_w: float | None
    estimated: bool = False
    """No sensor told anything, and the CPU estimate stands in for it."""


class LiveTraces:
    """Keeps its place in every trace, so that looking again costs what was written meanwhile."""

    def __init__(self) -> None:
        self._traces: dict[Path, LiveJoules] = {}

    def read(self, traces: Iterable[Path]) -> LiveReading:
        for path in traces:
            self._traces.setdefault(path, LiveJoules(path))
        for estimates in (False, True):
            found = [live.read(estimates) for live in self._traces.values()]
            told = [energy_j for energy_j in found if energy_j is not None]
            if told:
                watts = [live.power_w(estimates) for live in self._traces.values()]
                known = [power_w for power_w in watts if power_w is not None]
                return LiveReading(sum(told), sum(known) if known else None, estimates)
        return LiveReading(None, None)
