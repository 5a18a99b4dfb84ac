"""What the loop needs from the run around it, and what it tells it; with the defaults the loop works alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from joulelab.train.budget import Look
from joulelab.train.checkpoint import Checkpoints
from joulelab.train.position import Position
from joulelab.train.ranks import ALONE, Ranks
from joulelab.zoo.objective import PhaseMaker


@dataclass(frozen=True)
class StepReport:
    """What the loop tells its surroundings every `log_every_steps` steps."""

    position: Position
    fraction: float
    """Of the budget, spent."""
    loss: float
    parts: dict[str, float]
    learning_rate: float


@dataclass(frozen=True)
class Surroundings:
    """What the loop needs from the run around it; the defaults make it work alone."""

    checkpoints: Checkpoints | None = None
    phase: PhaseMaker = lambda name: torch.autograd.profiler.record_function(name)
    check_stop: Callable[[], None] = lambda: None
    report: Callable[[StepReport], None] = lambda report: None
    advance: Callable[[Position], None] = lambda position: None
    saved: Callable[[Position], None] = lambda position: None
    """A checkpoint of this position was taken."""
    resumed: Callable[[Position], None] = lambda position: None
    """Training goes on from the checkpoint of this position."""
    warmed_up: Callable[[Position, Position], None] = lambda began, position: None
    """The first step of this attempt is done, from one position to the other, and was setup."""
    evaluate: Callable[[], float] | None = None
    """Held-out loss, computed in a stage of its own."""
    energy_j: Callable[[], float | None] = lambda: None
    """Joules that the job has used so far, from any origin; None where no sensor reports."""
    budget_look: Callable[[int, float], None] = lambda step, fraction: None
    replayed_looks: Sequence[Look] | None = None
    warn: Callable[[str], None] = lambda text: None
    ranks: Ranks = ALONE
