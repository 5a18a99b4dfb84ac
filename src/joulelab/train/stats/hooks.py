"""Hooks around every phase of the loop. A tracker is one class that overrides what it wants to see.

The loop calls `start_*` and `stop_*` around train, step, input (waiting for the next batch), forward, backward,
optimiser step, checkpoint, and aside (what interrupts the training: an evaluation, a tracker's own measurement). By
default each of them calls `start(phase)` or `stop(phase)`, which do nothing: a tracker that treats phases alike
overrides those two, one that cares for a single phase overrides its pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from joulelab.meter.session import Meter
    from joulelab.train.trainer import Trainer

PHASES = ("train", "step", "input", "forward", "backward", "optimiser_step", "checkpoint", "aside")


@dataclass(frozen=True)
class Bench:
    """What a tracker may use, given to it before training starts."""

    trainer: Trainer[Any]
    device: torch.device
    stage: str = "train"
    """Where the loop's own joules go; a tracker's own work belongs into a stage named after it."""
    folder: Path | None = None
    """Where it may write files; None where the loop runs without a run folder."""
    meter: Meter | None = None
    """The run's own meter, where there is one."""
    aside: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()
    """`with bench.aside(f"{bench.stage}.phases"):` bills what a tracker computes for itself to a stage of its own."""
    say: Callable[[str], None] = lambda text: None
    """A line for whoever watches."""
    result: Callable[[str, dict[str, Any]], None] = lambda name, values: None
    """A finding that belongs into the run's record, under the tracker's name."""


class TrainerStats:
    """Every hook, doing nothing."""

    def attach(self, bench: Bench) -> None:
        """Called once, before training starts."""

    def start(self, phase: str) -> None: ...

    def stop(self, phase: str) -> None: ...

    def start_train(self) -> None:
        self.start("train")

    def stop_train(self) -> None:
        self.stop("train")

    def start_step(self) -> None:
        self.start("step")

    def stop_step(self) -> None:
        self.stop("step")

    def start_input(self) -> None:
        self.start("input")

    def stop_input(self) -> None:
        self.stop("input")

    def start_forward(self) -> None:
        self.start("forward")

    def stop_forward(self) -> None:
        self.stop("forward")

    def start_backward(self) -> None:
        self.start("backward")

    def stop_backward(self) -> None:
        self.stop("backward")

    def start_optimiser_step(self) -> None:
        self.start("optimiser_step")

    def stop_optimiser_step(self) -> None:
        self.stop("optimiser_step")

    def start_checkpoint(self) -> None:
        self.start("checkpoint")

    def stop_checkpoint(self) -> None:
        self.stop("checkpoint")

    def start_aside(self) -> None:
        self.start("aside")

    def stop_aside(self) -> None:
        self.stop("aside")

    def log_loss(self, loss: float) -> None:
        """The mean loss since the last call, every `log_every_steps` steps."""

    def log_step(self, step: int) -> None:
        """After every optimiser step."""

    def log_stats(self) -> str:
        """What the tracker has to say at the end of training; may be empty."""
        return ""


class NoOpStats(TrainerStats):
    """Tracks nothing: what the others are compared with."""


class StatsList(TrainerStats):
    """Several trackers at once; they stop in the reverse order of their start, so that they nest."""

    def __init__(self, members: Sequence[TrainerStats]) -> None:
        self._members = tuple(members)
        self._starts = {phase: _hooks(members, f"start_{phase}") for phase in PHASES}
        self._stops = {phase: _hooks(members[::-1], f"stop_{phase}") for phase in PHASES}

    def attach(self, bench: Bench) -> None:
        for member in self._members:
            member.attach(bench)

    def start(self, phase: str) -> None:
        for hook in self._starts[phase]:
            hook()

    def stop(self, phase: str) -> None:
        for hook in self._stops[phase]:
            hook()

    def log_loss(self, loss: float) -> None:
        for member in self._members:
            member.log_loss(loss)

    def log_step(self, step: int) -> None:
        for member in self._members:
            member.log_step(step)

    def log_stats(self) -> str:
        return "\n\n".join(text for member in self._members if (text := member.log_stats()))


def _hooks(members: Sequence[TrainerStats], name: str) -> list[Callable[[], None]]:
    return [getattr(member, name) for member in members]
