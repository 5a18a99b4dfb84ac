"""Joules per optimiser step: of the training as it ran, and how they divide over the phases by time.

The step's figure is `direct`: measured joules of long windows over the steps in them. The phases' figure is its
`time-share`, the weakest of all: it takes a phase that waits for memory to draw as much power as one that multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from joulelab.meter.figures import EnergyFigure, Frozen
from joulelab.stats import mean_t
from joulelab.train.stats.stretches import Piece
from joulelab.train.stats.window_energy import Reader

# Ten refreshes of a GPU's counter: shorter windows err by several per cent.
SHORTEST_S = 1.0


class PerStep(Frozen):
    """Joules and seconds of a phase, or of the whole, in one optimiser step."""

    method: str
    """`direct`, `isolated` or `time-share`."""
    energy_j: float
    half_width_j: float
    """Random 95 % half-width."""
    duration_s: float

    @property
    def power_w(self) -> float | None:
        """None where the time is not resolved, as for an input that is always ready."""
        return self.energy_j / self.duration_s if self.duration_s > 1e-6 else None


class Found(Frozen):
    """What the trace says of some steps; without joules there is the reason."""

    step: PerStep | None
    steps: int
    duration_s: float
    figure: EnergyFigure

    @property
    def problem(self) -> str | None:
        """Why there are no joules per step, with the way out where one is known."""
        if self.step is not None:
            return None
        if self.figure.energy_j is None:
            return f"{self.figure.reason}" + (f" ({self.figure.fix})" if self.figure.fix else "")
        return f"{self.duration_s:.1f} s of undisturbed training are too short; the sensors need {SHORTEST_S:g} s"


def energy_per_step(pieces: Sequence[Piece], read: Reader) -> Found:
    windows = [window for piece in pieces for window in piece.windows]
    steps, duration_s = sum(piece.steps for piece in pieces), sum(piece.duration_s for piece in pieces)
    figure = read(windows)
    if figure.energy_j is None or duration_s < SHORTEST_S:
        return Found(step=None, steps=steps, duration_s=duration_s, figure=figure)
    # a window's unseen part is taken to be as the seen one
    seen = max(figure.coverage, 1e-9)
    half_width_j = max((figure.half_width_j or 0.0) / steps, _spread(pieces, read))
    per_step = PerStep(
        method="direct",
        energy_j=figure.energy_j / seen / steps,
        half_width_j=half_width_j / seen,
        duration_s=duration_s / steps,
    )
    return Found(step=per_step, steps=steps, duration_s=duration_s, figure=figure)


def _spread(pieces: Sequence[Piece], read: Reader) -> float:
    """Half-width from how the pieces differ: it contains the meter's noise, and what the training itself varies."""
    long = [piece for piece in pieces if piece.duration_s >= SHORTEST_S]
    figures = [(piece, read(piece.windows)) for piece in long]
    values = [(figure.energy_j or 0.0) / piece.steps for piece, figure in figures if figure.coverage > 0.98]
    if len(values) < 3:
        return 0.0
    interval = mean_t(values)
    return interval.high - interval.value


def by_time(step: PerStep, shares: Mapping[str, float]) -> dict[str, PerStep]:
    return {
        phase: PerStep(
            method="time-share",
            energy_j=share * step.energy_j,
            half_width_j=share * step.half_width_j,
            duration_s=share * step.duration_s,
        )
        for phase, share in shares.items()
    }


def agrees(a: PerStep, b: PerStep) -> bool:
    return abs(a.energy_j - b.energy_j) <= math.hypot(a.half_width_j, b.half_width_j)


def as_values(row: PerStep) -> dict[str, Any]:
    return {**row.model_dump(), "power_w": row.power_w}
