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
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from joulelab.clock import NS
from joulelab.errors import EndedBySignal
from joulelab.meter.figures import EnergyFigure
from joulelab.stats import mean_t
from joulelab.train.stats.step_energy import PerStep, Reader

if TYPE_CHECKING:
    from joulelab.train.trainer import Trainer
    from joulelab.zoo.objective import PhaseMaker


# The forward pass cut off after one of the parts it marks (`forward.teacher`, say), to be repeated alone.
#
# An objective marks its parts as context managers. Whoever makes those can leave the pass at the end of any of them;
# what came before it has then been done, and nothing after it.


class _PartReached(Exception):  # the wanted end, no error
    pass


def forward_parts(trainer: Trainer[Any], batch: Any) -> tuple[str, ...]:
    """In the order in which they run; none where there is nothing to tell apart."""
    seen: list[str] = []
    with _on_part_end(trainer, seen.append):
        trainer.forward(batch)
    return tuple(seen) if len(seen) > 1 and len(set(seen)) == len(seen) else ()


def forward_until(trainer: Trainer[Any], part: str, batch: Any) -> None:
    """The forward pass up to the end of `part`."""

    def stop_there(name: str) -> None:
        if name == part:
            raise _PartReached

    with _on_part_end(trainer, stop_there), suppress(_PartReached):
        trainer.forward(batch)


@contextmanager
def _on_part_end(trainer: Trainer[Any], ended: Callable[[str], None]) -> Iterator[None]:
    """Tell of the end of every outermost part; inner ones belong to theirs."""
    depth = 0

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        nonlocal depth
        depth += 1
        try:
            yield
        finally:
            depth -= 1
        if depth == 0:
            ended(name)

    before: PhaseMaker = trainer.mark_part
    trainer.mark_part = mark
    try:
        yield
    finally:
        trainer.mark_part = before


LOOPS = ("forward", "forward+backward", "forward+backward+optimiser_step", "step")
"""The last of a round; before them come those of the forward pass's parts."""
LEAD_OUT_S = 0.1
# A step of many seconds needs fewer windows: each of them is long already.
MAX_ISOLATION_S = 180.0


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


_mark_cuda_graph_step: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin


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
        parts = forward_parts(self._trainer, kept[0][0])
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
        return max(2, min(self._plan.rounds, int(MAX_ISOLATION_S / round_s)))

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
                _mark_cuda_graph_step()
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


# All that a step changes, copied aside and put back bit for bit, so that a tracker may run steps that never were.
#
# Copied are the parameters, gradients and buffers of everything that trains (BatchNorm's statistics and an EMA among
# them, also buffers that a checkpoint leaves out), the optimiser's state and rates, the scaler of fp16, all random
# numbers, and the loader's position. The copies lie in host memory: the device may be full. They are put back in
# place, because an optimiser's own way of loading a state may change its number format.


Undo = Callable[[], None]


class Snapshot:
    def __init__(self, trainer: Trainer[Any]) -> None:
        self._undo: list[Undo] = [
            *(_save_tensor(tensor) for tensor in _tensors(trainer)),
            *(_save_gradient(parameter) for parameter in trainer.trained.parameters()),
            _save_optimizer(trainer.optimizer),
            _save_scaler(trainer),
            _save_position(trainer),
            _save_random_state(trainer.device),
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for undo in self._undo:
            undo()


def _tensors(trainer: Trainer[Any]) -> Iterator[Tensor]:
    yield from trainer.trained.parameters()
    yield from trainer.trained.buffers()


def _local(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor that lies on this rank."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def _save_tensor(tensor: Tensor) -> Undo:
    copy = _local(tensor.detach()).to("cpu", copy=True)

    def undo() -> None:
        _local(tensor.detach()).copy_(copy)

    return undo


def _save_gradient(parameter: Tensor) -> Undo:
    gradient = parameter.grad
    if gradient is None:
        return lambda: setattr(parameter, "grad", None)
    fill = _save_tensor(gradient)

    def undo() -> None:
        fill()
        parameter.grad = gradient

    return undo


def _save_optimizer(optimizer: torch.optim.Optimizer) -> Undo:
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    rates = [_save_value(group["lr"]) for group in optimizer.param_groups]
    state = {
        parameter: {name: _save_value(value) for name, value in values.items()}
        for parameter, values in optimizer.state.items()
    }

    def undo() -> None:
        for group, kept, rate in zip(optimizer.param_groups, groups, rates, strict=True):
            group.update(kept, lr=rate())
        for parameter in list(optimizer.state):
            if parameter not in state:  # first touched by a step that never was
                del optimizer.state[parameter]
                continue
            optimizer.state[parameter] = {name: give() for name, give in state[parameter].items()}

    return undo


def _save_value(value: Any) -> Callable[[], Any]:
    """A function that gives the value back as it is now; a tensor is the same one, filled again."""
    if not isinstance(value, Tensor):
        return lambda: value
    fill = _save_tensor(value)

    def give() -> Tensor:
        fill()
        return value

    return give


def _save_scaler(trainer: Trainer[Any]) -> Undo:
    scaler = getattr(trainer, "scaler", None)
    if scaler is None:
        return lambda: None
    state = scaler.state_dict()
    return lambda: scaler.load_state_dict(state)


def _save_position(trainer: Trainer[Any]) -> Undo:
    position = trainer.position
    return lambda: trainer.rewind(position)


def _save_random_state(device: torch.device) -> Undo:
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    of_cuda = torch.cuda.get_rng_state_all() if device.type == "cuda" else []

    def undo() -> None:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if of_cuda:
            torch.cuda.set_rng_state_all(of_cuda)

    return undo


# From the loops' joules to the phases': differences with intervals, which close on the step.
#
# A phase is the difference of two loops. Its interval is the wider of two: the spread of the differences over the
# rounds (Student's t), which contains the meter's noise and the machine's moods; and the meter's own doubt about each
# window, because a handful of rounds can agree by luck.


# Phases by the loop that adds them: a phase is its own loop less the one before. The input's comes first in a step.
LOOP_OF_PHASE = dict(zip(("forward", "backward", "optimiser_step", "input"), LOOPS, strict=True))
MIN_COVERAGE = 0.95


@dataclass(frozen=True)
class _LoopEnergy:
    """One loop in one round, per optimiser step."""

    energy_j: float
    half_width_j: float
    duration_s: float


Rounds = list[dict[str, _LoopEnergy]]


@dataclass(frozen=True)
class IsolatedEnergy:
    phases: dict[str, PerStep]
    """They add up to `step`."""
    parts: dict[str, PerStep]
    """Of the forward pass, where it marks any; they add up to `forward`."""
    step: PerStep
    rounds: int
    figure: EnergyFigure
    """Of all windows together: method, sources, gain error."""


def isolated_energy(windows: Sequence[LoopWindow], read: Reader) -> IsolatedEnergy | None:
    """None where the trace does not cover a single whole round."""
    rounds = _complete_rounds(windows, read)
    if not rounds:
        return None
    phases = _consecutive_differences(rounds, LOOP_OF_PHASE)
    order = ("input", "forward", "backward", "optimiser_step")
    return IsolatedEnergy(
        phases={phase: phases[phase] for phase in order},
        parts=_consecutive_differences(rounds, {window.part: window.loop for window in windows if window.part}),
        step=_difference(rounds, "step", None),
        rounds=len(rounds),
        figure=read([(window.begin_ns, window.end_ns) for window in windows]),
    )


def _consecutive_differences(rounds: Rounds, loop_of: Mapping[str, str]) -> dict[str, PerStep]:
    """Each by how much its loop takes more than the one before."""
    befores = [None, *loop_of.values()]
    return {
        name: _difference(rounds, loop, before) for (name, loop), before in zip(loop_of.items(), befores, strict=False)
    }


def _complete_rounds(windows: Sequence[LoopWindow], read: Reader) -> Rounds:
    rounds: dict[int, dict[str, _LoopEnergy]] = {}
    loops = len({window.loop for window in windows})
    for window in windows:
        figure = read([(window.begin_ns, window.end_ns)])
        if figure.energy_j is None or figure.coverage < MIN_COVERAGE:
            continue
        scale = window.repetitions * figure.coverage
        turn = _LoopEnergy(
            figure.energy_j / scale, (figure.half_width_j or 0.0) / scale, window.duration_s / window.repetitions
        )
        rounds.setdefault(window.round, {})[window.loop] = turn
    return [turns for turns in rounds.values() if len(turns) == loops]


def _difference(rounds: Rounds, loop: str, before: str | None) -> PerStep:
    nothing = _LoopEnergy(0.0, 0.0, 0.0)
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
