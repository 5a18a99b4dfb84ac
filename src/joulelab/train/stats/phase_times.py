"""How a step's time divides over its phases, from one step in a few: a mean needs no more, and the others stay free."""

from __future__ import annotations

import torch

from joulelab.train.stats.phase_clock import clock_for

STEP_PHASES = ("input", "forward", "backward", "optimiser_step")


class PhaseTimes:
    def __init__(self, device: torch.device, every: int = 10) -> None:
        self.watching = False
        """Whether the step that is under way is one of those that are timed."""
        self._clock = clock_for(device)
        self._every = every
        self._seen = 0
        self._watched = 0
        self._sums_s: dict[str, float] = {}

    def start(self, phase: str) -> None:
        if phase == "step":
            self.watching = self._seen % self._every == 0
            self._seen += 1
        if self.watching:
            self._clock.start(phase)

    def stop(self, phase: str) -> None:
        if self.watching:
            self._clock.stop(phase)
            self.watching = phase != "step"

    def harvest(self) -> None:
        for timed in self._clock.harvest():
            self._sums_s[timed.phase] = self._sums_s.get(timed.phase, 0.0) + timed.best_s
            self._watched += timed.phase == "step"

    def per_step_s(self) -> dict[str, float]:
        """Seconds of each phase in one optimiser step, its micro-batches added up."""
        return {phase: self._sums_s.get(phase, 0.0) / max(1, self._watched) for phase in STEP_PHASES}

    def shares(self) -> dict[str, float]:
        """They add up to 1; empty where nothing was timed."""
        per_step_s = self.per_step_s()
        whole_s = sum(per_step_s.values())
        return {phase: seconds / whole_s for phase, seconds in per_step_s.items()} if whole_s else {}
