"""A step taken apart by repetition, since a phase of milliseconds is far below what a sensor can resolve.

A handful of loops, each for seconds, each doing a little more than the one before:

    forward.teacher, forward.student    where an objective marks parts of its forward pass: up to the end of each
    forward                             on batches that lie ready on the device; the graph is built and dropped
    forward + backward                  the gradients are cleared after each repetition, as a step does
    forward + backward + optimiser      all of a step but its input
    step                                the same with fresh batches, drawn as training draws them

The differences are the phases, and they add up to the last loop by construction. The input's is what drawing batches
adds to a step: next to nothing where the loader works while the device computes, the waiting where it does not.

The loops take turns in an order that is its own mirror image, so that a slow drift (a warming card) cancels. Each runs
a little before its window begins and after it ends, so that a sensor that lags sees the same load at the edges. The
device is waited for at the edges alone. The optimiser runs at rate 0: the same work, and weights that stay where the
training has them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from joulelab.clock import NS
from joulelab.errors import EndedBySignal
from joulelab.train.stats.forward_parts import forward_until, parts_of

if TYPE_CHECKING:
    from joulelab.train.trainer import Trainer

LOOPS = ("forward", "forward+backward", "forward+backward+optimiser_step", "step")
"""The last of a round; before them come those of the forward pass's parts."""
LEAD_OUT_S = 0.1
# A step of many seconds needs fewer windows: each of them is long already.
LONGEST_S = 180.0


@dataclass(frozen=True)
class LoopPlan:
    window_s: float = 1.5
    settle_s: float = 0.3
    """How long a loop runs before its window begins."""
    rounds: int = 4
    kept_steps: int = 4
    """Steps' worth of batches that the loops without input go round."""


@dataclass(frozen=True)
class LoopWindow:
    loop: str
    round: int
    begin_ns: int
    end_ns: int
    repetitions: int
    """Optimiser steps' worth of it."""
    part: str = ""
    """Of the forward pass, which this loop ends with; empty where it goes on or has no parts."""

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.begin_ns) / NS

    def fields(self) -> dict[str, Any]:
        return asdict(self)


_begin_captured_round: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin


class Isolation:
    """Runs the loops on a trainer and says when each ran. Whoever calls it puts the trainer's state back."""

    def __init__(
        self, trainer: Trainer[Any], plan: LoopPlan, now_ns: Callable[[], int], wait: Callable[[], None]
    ) -> None:
        self._trainer = trainer
        self._plan = plan
        self._now_ns = now_ns
        self._wait = wait
        self._accumulate = trainer.config.accumulate
        # a captured graph that is never followed by its backward pass must be told that a new round begins
        self._captured = trainer.config.compile in ("reduce-overhead", "max-autotune")

    def run(self) -> list[LoopWindow]:
        self._stop_the_learning()
        kept = [[self._trainer.next_batch() for _ in range(self._accumulate)] for _ in range(self._plan.kept_steps)]
        self._kept = itertools.cycle(kept)
        parts = parts_of(self._trainer, kept[0][0])
        loops = (*parts[:-1], *LOOPS)
        self._part_of = dict(zip(loops, parts, strict=False))  # the last part ends where the forward pass does
        seconds = {loop: self._seconds(loop) for loop in loops}
        windows = []
        for number in range(self._rounds(seconds)):
            for loop in loops if number % 2 == 0 else loops[::-1]:
                self._check_stop()
                windows.append(self._window(loop, number, seconds[loop]))
        self._repeat("step", 1)  # shards and copies on other ranks are left as a whole step leaves them
        self._wait()
        return windows

    def _stop_the_learning(self) -> None:
        for group in self._trainer.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].zero_()
            else:
                group["lr"] = 0.0

    def _seconds(self, loop: str) -> float:
        """Of one repetition, the same on all ranks, so that all repeat as often."""
        self._repeat(loop, 1)
        first_s = self._timed_s(loop, 2)
        better_s = self._timed_s(loop, self._times(self._plan.settle_s, first_s))
        ranks = self._trainer.ranks
        return ranks.sum([better_s])[0] / ranks.world

    def _timed_s(self, loop: str, times: int) -> float:
        self._wait()
        begin_ns = self._now_ns()
        self._repeat(loop, times)
        self._wait()
        ranks = self._trainer.ranks
        return ranks.sum([(self._now_ns() - begin_ns) / NS / times])[0] / ranks.world

    @staticmethod
    def _times(wanted_s: float, each_s: float) -> int:
        return max(1, math.ceil(wanted_s / max(each_s, 1e-6)))

    def _rounds(self, seconds: dict[str, float]) -> int:
        extra_s = self._plan.settle_s + LEAD_OUT_S
        round_s = sum(max(self._plan.window_s + extra_s, 3 * each_s) for each_s in seconds.values())
        return max(2, min(self._plan.rounds, int(LONGEST_S / round_s)))

    def _window(self, loop: str, number: int, each_s: float) -> LoopWindow:
        repetitions = self._times(self._plan.window_s, each_s)
        self._repeat(loop, self._times(self._plan.settle_s, each_s))
        self._wait()
        begin_ns = self._now_ns()
        self._repeat(loop, repetitions)
        self._wait()
        end_ns = self._now_ns()
        self._repeat(loop, self._times(LEAD_OUT_S, each_s))
        self._wait()
        return LoopWindow(loop, number, begin_ns, end_ns, repetitions, self._part_of.get(loop, ""))

    def _repeat(self, loop: str, times: int) -> None:
        for _ in range(times):
            self._once(loop)

    def _once(self, loop: str) -> None:
        trainer = self._trainer
        ready = None if loop == "step" else next(self._kept)
        count = 0
        for number in range(self._accumulate):
            batch = trainer.next_batch() if ready is None else ready[number]
            trainer.last_of_step = number == self._accumulate - 1
            if self._captured and loop not in LOOPS[1:]:
                _begin_captured_round()
            if loop not in LOOPS:
                forward_until(trainer, loop, batch)
                continue
            output = trainer.forward(batch)
            if loop != "forward":
                trainer.backward(output)
            count += output.count
        if loop in LOOPS[2:]:
            trainer.optimizer_step(count * trainer.ranks.world)
            trainer.objective.after_step(trainer.model)
        else:
            trainer.optimizer.zero_grad(set_to_none=True)

    def _check_stop(self) -> None:
        """All ranks leave together, also where only one was asked to."""
        asked: EndedBySignal | None = None
        try:
            self._trainer.around.check_stop()
        except EndedBySignal as ended:
            asked = ended
        if self._trainer.ranks.sum([asked is not None])[0]:
            raise asked or EndedBySignal(15)
