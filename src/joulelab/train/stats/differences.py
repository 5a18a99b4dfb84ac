"""From the loops' joules to the phases': differences with intervals, which close on the step.

A phase is the difference of two loops. Its interval is the wider of two: the spread of the differences over the rounds
(Student's t), which contains the meter's noise and the machine's moods; and the meter's own doubt about each window,
because a handful of rounds can agree by luck.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from joulelab.meter.figures import EnergyFigure
from joulelab.stats import mean_t
from joulelab.train.stats.isolated import LOOPS, LoopWindow
from joulelab.train.stats.step_energy import PerStep
from joulelab.train.stats.window_energy import Reader

# Phases by the loop that adds them: a phase is its own loop less the one before. The input's comes first in a step.
LOOP_OF_PHASE = dict(zip(("forward", "backward", "optimiser_step", "input"), LOOPS, strict=True))
LEAST_COVERAGE = 0.95


@dataclass(frozen=True)
class _Turn:
    """One loop in one round, per optimiser step."""

    energy_j: float
    half_width_j: float
    duration_s: float


Rounds = list[dict[str, _Turn]]


@dataclass(frozen=True)
class Isolated:
    phases: dict[str, PerStep]
    """They add up to `step`."""
    parts: dict[str, PerStep]
    """Of the forward pass, where it marks any; they add up to `forward`."""
    step: PerStep
    rounds: int
    figure: EnergyFigure
    """Of all windows together: method, sources, gain error."""


def split(windows: Sequence[LoopWindow], read: Reader) -> Isolated | None:
    """None where the trace does not cover a single whole round."""
    rounds = _whole_rounds(windows, read)
    if not rounds:
        return None
    phases = _ladder(rounds, LOOP_OF_PHASE)
    order = ("input", "forward", "backward", "optimiser_step")
    return Isolated(
        phases={phase: phases[phase] for phase in order},
        parts=_ladder(rounds, {window.part: window.loop for window in windows if window.part}),
        step=_difference(rounds, "step", None),
        rounds=len(rounds),
        figure=read([(window.begin_ns, window.end_ns) for window in windows]),
    )


def _ladder(rounds: Rounds, loop_of: Mapping[str, str]) -> dict[str, PerStep]:
    """Each by how much its loop takes more than the one before."""
    befores = [None, *loop_of.values()]
    return {
        name: _difference(rounds, loop, before) for (name, loop), before in zip(loop_of.items(), befores, strict=False)
    }


def _whole_rounds(windows: Sequence[LoopWindow], read: Reader) -> Rounds:
    rounds: dict[int, dict[str, _Turn]] = {}
    loops = len({window.loop for window in windows})
    for window in windows:
        figure = read([(window.begin_ns, window.end_ns)])
        if figure.energy_j is None or figure.coverage < LEAST_COVERAGE:
            continue
        scale = window.repetitions * figure.coverage
        turn = _Turn(
            figure.energy_j / scale, (figure.half_width_j or 0.0) / scale, window.duration_s / window.repetitions
        )
        rounds.setdefault(window.round, {})[window.loop] = turn
    return [turns for turns in rounds.values() if len(turns) == loops]


def _difference(rounds: Rounds, loop: str, before: str | None) -> PerStep:
    nothing = _Turn(0.0, 0.0, 0.0)
    pairs = [(turns[loop], turns[before] if before else nothing) for turns in rounds]
    energies_j = [more.energy_j - less.energy_j for more, less in pairs]
    spread = mean_t(energies_j)
    spread_j = spread.high - spread.value if len(pairs) > 1 else 0.0
    meter_j = math.sqrt(sum(more.half_width_j**2 + less.half_width_j**2 for more, less in pairs)) / len(pairs)
    return PerStep(
        method="isolated",
        energy_j=spread.value,
        half_width_j=max(spread_j, meter_j),
        duration_s=sum(more.duration_s - less.duration_s for more, less in pairs) / len(pairs),
    )
