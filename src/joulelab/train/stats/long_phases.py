"""Phases that last seconds can be read off the sensor directly; this notes when they ran.

Only where a phase takes many refreshes of the sensor is the device waited for at its edges: there the wait is lost in
the phase's own length. Shorter phases are never waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from joulelab.train.stats.step_energy import SHORTEST_S, PerStep
from joulelab.train.stats.stretches import Window
from joulelab.train.stats.window_energy import Reader

MOST_WINDOWS = 256


class LongPhases:
    def __init__(self, wait: Callable[[], None], now_ns: Callable[[], int]) -> None:
        self._wait = wait
        self._now_ns = now_ns
        self._times_per_step: dict[str, int] = {}
        self._begun_ns: dict[str, int] = {}
        self._windows: dict[str, list[Window]] = {}

    def choose(self, per_step_s: Mapping[str, float], accumulate: int) -> None:
        """From here on the phases that are long enough are noted."""
        for phase, seconds in per_step_s.items():
            times = 1 if phase == "optimiser_step" else accumulate
            if seconds / times >= SHORTEST_S:
                self._times_per_step[phase] = times

    def start(self, phase: str) -> None:
        if phase in self._times_per_step and len(self._windows.get(phase, ())) < MOST_WINDOWS:
            self._wait()
            self._begun_ns[phase] = self._now_ns()

    def stop(self, phase: str) -> None:
        if phase in self._begun_ns:
            self._wait()
            self._windows.setdefault(phase, []).append((self._begun_ns.pop(phase), self._now_ns()))

    def last_ns(self) -> int:
        return max((windows[-1][1] for windows in self._windows.values()), default=0)

    def energy(self, read: Reader) -> dict[str, PerStep]:
        return {phase: found for phase in self._windows if (found := self._phase(phase, read)) is not None}

    def _phase(self, phase: str, read: Reader) -> PerStep | None:
        windows = self._windows[phase]
        figure = read(windows)
        if figure.energy_j is None:
            return None
        scale = self._times_per_step[phase] / len(windows)
        return PerStep(
            method="direct",
            energy_j=figure.energy_j / max(figure.coverage, 1e-9) * scale,
            half_width_j=(figure.half_width_j or 0.0) * scale,
            duration_s=sum(end - begin for begin, end in windows) / 1e9 * scale,
        )
