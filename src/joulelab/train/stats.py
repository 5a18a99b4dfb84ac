"""Hooks around every phase of the loop. A tracker is one class that overrides what it wants to see.

The loop calls `start_*` and `stop_*` around train, step, forward, backward, optimiser step and checkpoint. By default
each of them calls `start(phase)` or `stop(phase)`, which do nothing: a tracker that treats phases alike overrides those
two, one that cares for a single phase overrides its pair.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from joulelab.train.objective import PhaseMaker

PHASES = ("train", "step", "forward", "backward", "optimiser_step", "checkpoint")


class TrainerStats:
    """Every hook, doing nothing."""

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

    def log_loss(self, loss: float) -> None:
        """The mean loss since the last call, every `log_every_steps` steps."""

    def log_step(self, step: int) -> None:
        """After every optimiser step."""

    def log_stats(self) -> str:
        """What the tracker has to say at the end of training; may be empty."""
        return ""


class NoOpStats(TrainerStats):
    """Tracks nothing: what the others are compared with."""


class MeterStats(TrainerStats):
    """Leaves the phases as marks for our own recorder; about a microsecond each."""

    def __init__(self, phase: PhaseMaker) -> None:
        self._phases = {name: phase(name) for name in PHASES}

    def start(self, phase: str) -> None:
        self._phases[phase].__enter__()

    def stop(self, phase: str) -> None:
        self._phases[phase].__exit__(None, None, None)


class SimpleStats(TrainerStats):
    """Mean and quantiles of the host's time in each phase, kept in memory and told at the end."""

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}
        self._durations_s: dict[str, list[float]] = {}

    def start(self, phase: str) -> None:
        self._begun[phase] = time.perf_counter()

    def stop(self, phase: str) -> None:
        self._durations_s.setdefault(phase, []).append(time.perf_counter() - self._begun.pop(phase))

    def log_stats(self) -> str:
        lines = [f"{'phase':<16}{'count':>7}{'mean ms':>11}{'p50 ms':>11}{'p95 ms':>11}"]
        for phase, durations in self._durations_s.items():
            p95 = statistics.quantiles(durations, n=20)[-1] if len(durations) > 1 else durations[0]
            numbers = (statistics.fmean(durations), statistics.median(durations), p95)
            lines.append(f"{phase:<16}{len(durations):>7}" + "".join(f"{1e3 * number:>11.2f}" for number in numbers))
        return "\n".join(lines)


class StatsList(TrainerStats):
    """Several trackers at once; they stop in the reverse order of their start, so that they nest."""

    def __init__(self, members: Sequence[TrainerStats]) -> None:
        self._members = tuple(members)
        self._starts = {phase: _hooks(members, f"start_{phase}") for phase in PHASES}
        self._stops = {phase: _hooks(members[::-1], f"stop_{phase}") for phase in PHASES}

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
