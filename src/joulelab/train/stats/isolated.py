"""Energy of the phases of a step by repetition. A phase of milliseconds is far below the resolution of a sensor (NVML
refreshes every 100 ms), so parts of the step are repeated for seconds, and phases are differences between loops.

Each loop does a little more than the one before:

    forward.teacher, forward.student    if the objective marks parts of its forward pass: up to the end of each
    forward                             on batches already on the device; the graph is built and dropped
    forward + backward                  gradients are cleared after each repetition, as in a step
    forward + backward + optimizer      a step without its input
    step                                the same with new batches, drawn as in training

The differences add up to the last loop by construction. The difference of the last two is what drawing batches adds to
a step: almost nothing if the loader overlaps with the device, the waiting time if it does not.

The design removes systematic errors:

- Loops take turns, and every second round runs in reverse order (ABBA), so that a linear drift, such as a GPU warming
  up, cancels.
- Each loop runs before its window begins and after it ends, so that a lagging sensor sees the same load at the edges.
- The device is synchronized only at the edges of a window.
- The optimizer runs with learning rate 0: the same work, unchanged weights.

Before, everything that a step changes is copied to host memory, and restored in place afterwards: parameters,
gradients and buffers of all trained modules (including BatchNorm statistics, an EMA, and buffers that checkpoints
omit), optimizer state and learning rates, the fp16 scaler, all random states and the loader's position. It is restored
in place because an optimizer's `load_state_dict` may change the data type of its state.

The interval of a phase is the wider of two: the spread of the differences over the rounds (Student's t), which includes
the meter's noise and the variation of the machine, and the meter's own uncertainty of each window, because a few rounds
may agree by chance.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from joulelab.clock import NS
from joulelab.errors import EndedBySignal
from joulelab.meter.figures import EnergyFigure, ErrorComponent, add_errors, combined_half_width_j
from joulelab.stats import mean_t
from joulelab.train.parallel import local_shard
from joulelab.train.stats.step_energy import PerStep, Reader

if TYPE_CHECKING:
    from joulelab.train.trainer import Trainer
    from joulelab.zoo.objective import PhaseMaker


class _PartReached(Exception):
    """Ends a forward pass at the end of a part; not an error."""


def forward_parts(trainer: Trainer[Any], batch: Any) -> tuple[str, ...]:
    """Names of the marked parts of the forward pass, in order; empty if there are fewer than two."""
    seen: list[str] = []
    with _on_part_end(trainer, seen.append):
        trainer.forward(batch)
    return tuple(seen) if len(seen) > 1 and len(set(seen)) == len(seen) else ()


def forward_until(trainer: Trainer[Any], part: str, batch: Any) -> None:
    """Run the forward pass up to the end of `part`. Parts are context managers, so leaving one can end the pass."""

    def stop_there(name: str) -> None:
        if name == part:
            raise _PartReached

    with _on_part_end(trainer, stop_there), suppress(_PartReached):
        trainer.forward(batch)


@contextmanager
def _on_part_end(trainer: Trainer[Any], ended: Callable[[str], None]) -> Iterator[None]:
    """Call `ended` at the end of every outermost part."""
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

    before: PhaseMaker = trainer.mark_phase
    trainer.mark_phase = mark
    try:
        yield
    finally:
        trainer.mark_phase = before


LOOPS = ("forward", "forward+backward", "forward+backward+optimizer_step", "step")
"""The loops of a round, after those of the parts of the forward pass."""
# One refresh of NVML's counter: the last refresh that a window's energy uses still sees the same
# load.
LEAD_OUT_S = 0.1
# Limit for all rounds together: long steps need fewer windows, because each is long already.
MAX_ISOLATION_S = 180.0


@dataclass(frozen=True)
class LoopPlan:
    """How long and how often the loops run."""

    window_s: float = 1.5
    settle_s: float = 0.3
    """Time that a loop runs before its window begins."""
    rounds: int = 4
    kept_steps: int = 4
    """Number of steps whose batches the loops without input cycle through."""
    limit_s: float = MAX_ISOLATION_S
    """Time for all of it."""

    def round_s(self, seconds: Sequence[float]) -> float:
        """Of a round of loops with these times of a repetition."""
        # A window has at least one repetition, and so have lead-in and lead-out: three for a step
        # longer than the window.
        return sum(max(self.window_s + self.settle_s + LEAD_OUT_S, 3 * each_s) for each_s in seconds)

    def within(self, left_s: float, seconds: Sequence[float]) -> LoopPlan:
        """The plan that fits into the time that is left: fewer rounds first, then shorter windows."""
        # At least two rounds, one in each order, or the drift would not cancel.
        plan = replace(self, rounds=max(2, min(self.rounds, int(left_s / self.round_s(seconds)))))
        if self.limit_s >= MAX_ISOLATION_S or plan.rounds * plan.round_s(seconds) <= left_s:
            return plan
        share = (left_s / plan.rounds / len(seconds) - LEAD_OUT_S) / (self.window_s + self.settle_s)
        plan = replace(plan, window_s=share * self.window_s, settle_s=share * self.settle_s)
        shortest = replace(plan, window_s=LEAD_OUT_S, settle_s=0.0)
        if plan.window_s < LEAD_OUT_S or shortest.rounds * shortest.round_s(seconds) > left_s:
            # shorter than one refresh of the sensor
            raise TooLittleTime(self.limit_s - left_s + shortest.rounds * shortest.round_s(seconds))
        return plan


class TooLittleTime(Exception):
    """The phases cannot be isolated within the limit; its argument is the least number of seconds."""


@dataclass(frozen=True)
class LoopWindow:
    """One loop in one round, in monotonic time."""

    loop: str
    round: int
    begin_ns: int
    end_ns: int
    repetitions: int
    """Number of optimizer steps."""
    part: str = ""
    """The part of the forward pass that ends this loop; empty for the others."""

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.begin_ns) / NS

    def fields(self) -> dict[str, Any]:
        return asdict(self)


_mark_cuda_graph_step: Callable[[], None] = torch.compiler.cudagraph_mark_step_begin


class Isolation:
    """Runs the loops on a trainer and returns their windows. The caller restores the trainer's state."""

    def __init__(
        self,
        trainer: Trainer[Any],
        plan: LoopPlan,
        now_ns: Callable[[], int],
        wait: Callable[[], None],
        copies_s: float = 0.0,
    ) -> None:
        """`copies_s`: of the plan's limit, what copying and restoring the state takes; the same on all ranks."""
        self._copies_s = copies_s
        self._trainer = trainer
        self._plan = plan
        self._now_ns = now_ns
        self._wait = wait
        self._accumulate = trainer.config.accumulate
        position = trainer.position
        # Batches of a later round do not exist yet where a preparation makes them: those of the last step are repeated.
        drawn = position.drawn - self._accumulate * trainer.ranks.world
        self._repeated = replace(position, drawn=drawn) if trainer.callbacks.preparation else None
        self.shortened_from_s: float | None = None
        """Time that the loops would have taken without the limit of the plan; None if it changed nothing."""
        # torch's CUDA graph trees need a mark where a step begins if the forward pass has no backward pass.
        self._captured = trainer.config.compile in ("reduce-overhead", "max-autotune")

    def run(self) -> list[LoopWindow]:
        begin_ns = self._now_ns()
        self._zero_learning_rate()
        kept = [self._draw() for _ in range(self._plan.kept_steps)]
        self._kept = itertools.cycle(kept)
        parts = forward_parts(self._trainer, kept[0][0])
        loops = (*parts[:-1], *LOOPS)
        self._part_of = dict(zip(loops, parts, strict=False))  # the last part ends with the forward pass
        timing_s = min(self._plan.settle_s, 0.2 * self._plan.limit_s / len(loops))
        seconds = {loop: self._seconds(loop, timing_s) for loop in loops}
        ranks = self._trainer.ranks
        # all ranks choose the same plan
        used_s = self._copies_s + ranks.sum([(self._now_ns() - begin_ns) / NS])[0] / ranks.world
        whole_s = used_s + self._plan.rounds * self._plan.round_s(list(seconds.values()))
        self._plan = self._plan.within(self._plan.limit_s - used_s, list(seconds.values()))
        if self._plan.limit_s < min(whole_s, MAX_ISOLATION_S):
            self.shortened_from_s = whole_s
        windows = []
        for number in range(self._plan.rounds):
            # ABBA: with a drift of d joules per window, loop k of n is off by k d in one round and
            # by (n - 1 - k) d in the next. The mean is the same for all loops, so differences
            # between loops have no drift.
            for loop in loops if number % 2 == 0 else loops[::-1]:
                self._check_stop()
                windows.append(self._window(loop, number, seconds[loop]))
        self._repeat("step", 1)  # leaves shards and replicas on other ranks as a whole step does
        self._wait()
        return windows

    def _begin_drawing(self) -> None:
        if self._repeated is not None:
            self._trainer.rewind(self._repeated)

    def _draw(self) -> list[Any]:
        self._begin_drawing()
        return [self._trainer.next_batch() for _ in range(self._accumulate)]

    def _zero_learning_rate(self) -> None:
        for group in self._trainer.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].zero_()
            else:
                group["lr"] = 0.0

    def _seconds(self, loop: str, timing_s: float) -> float:
        """Of one repetition; the mean over ranks, so that all ranks repeat equally often."""
        self._repeat(loop, 1)
        # Two repetitions give the scale, enough of them for `timing_s` then the mean: the first
        # ones may still allocate memory or raise the clocks.
        first_s = self._time_repetitions(loop, 2)
        better_s = self._time_repetitions(loop, self._times(timing_s, first_s))
        ranks = self._trainer.ranks
        return ranks.sum([better_s])[0] / ranks.world

    def _time_repetitions(self, loop: str, times: int) -> float:
        self._wait()
        begin_ns = self._now_ns()
        self._repeat(loop, times)
        self._wait()
        ranks = self._trainer.ranks
        return ranks.sum([(self._now_ns() - begin_ns) / NS / times])[0] / ranks.world

    @staticmethod
    def _times(wanted_s: float, each_s: float) -> int:
        return max(1, math.ceil(wanted_s / max(each_s, 1e-6)))

    @property
    def plan(self) -> LoopPlan:
        """The one that is used; known after `run`."""
        return self._plan

    def _window(self, loop: str, number: int, each_s: float) -> LoopWindow:
        repetitions = self._times(self._plan.window_s, each_s)
        # The window is read after the previous loop's power has left the 20 ms samples and the
        # clocks have settled to this loop's load.
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
        if ready is None:
            self._begin_drawing()
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
            # The loss is divided by the count of all ranks, here as in training, so that the
            # gradients have their usual size: fp16 scaling and gradient clipping take the same
            # branches.
            trainer.optimizer_step(count * trainer.ranks.world)
            trainer.objective.after_step(trainer.model)
        else:
            # Loops without an optimizer would otherwise add up gradients, which reads and writes
            # memory that a step's first backward pass does not.
            trainer.optimizer.zero_grad(set_to_none=True)

    def _check_stop(self) -> None:
        """All ranks stop together, even if only one was asked to."""
        request: EndedBySignal | None = None
        try:
            self._trainer.callbacks.check_stop()
        except EndedBySignal as signal:
            request = signal
        if self._trainer.ranks.sum([request is not None])[0]:
            raise request or EndedBySignal(15)


Undo = Callable[[], None]


class Snapshot:
    """A copy of everything that a step changes, in host memory because the device may be full."""

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


def _save_tensor(tensor: Tensor) -> Undo:
    # `copy=True`: on a CPU `.to("cpu")` returns the tensor itself, and the step would change the
    # copy too.
    copy = local_shard(tensor.detach()).to("cpu", copy=True)

    def undo() -> None:
        local_shard(tensor.detach()).copy_(copy)

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
            # A learning rate may be a tensor (capturable optimizers, CUDA graphs): the same tensor
            # is refilled, because a captured graph reads its address.
            group.update(kept, lr=rate())
        for parameter in list(optimizer.state):
            if parameter not in state:  # created by a step that is undone
                del optimizer.state[parameter]
                continue
            optimizer.state[parameter] = {name: give() for name, give in state[parameter].items()}

    return undo


def _save_value(value: Any) -> Callable[[], Any]:
    """A function that returns the current value later; a tensor keeps its identity and is refilled."""
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


# Phase -> the loop that adds it: the phase is the difference to the loop before.
LOOP_OF_PHASE = dict(zip(("forward", "backward", "optimizer_step", "input"), LOOPS, strict=True))
MIN_COVERAGE = 0.95


@dataclass(frozen=True)
class _LoopEnergy:
    """One loop in one round, per optimizer step."""

    energy_j: float
    errors: tuple[ErrorComponent, ...]
    duration_s: float


Rounds = list[dict[str, _LoopEnergy]]


@dataclass(frozen=True)
class IsolatedEnergy:
    """Energy per step of the phases, from the loops."""

    phases: dict[str, PerStep]
    """Add up to `step`."""
    parts: dict[str, PerStep]
    """Parts of the forward pass, if it marks any; add up to `forward`."""
    step: PerStep
    rounds: int
    figure: EnergyFigure
    """All windows together: method, sources, gain error."""


def isolated_energy(windows: Sequence[LoopWindow], read: Reader) -> IsolatedEnergy | None:
    """None if the trace does not cover a single complete round."""
    rounds = _complete_rounds(windows, read)
    if not rounds:
        return None
    phases = _consecutive_differences(rounds, LOOP_OF_PHASE)
    order = ("input", "forward", "backward", "optimizer_step")
    return IsolatedEnergy(
        phases={phase: phases[phase] for phase in order},
        parts=_consecutive_differences(rounds, {window.part: window.loop for window in windows if window.part}),
        step=_difference(rounds, "step", None),
        rounds=len(rounds),
        figure=read([(window.begin_ns, window.end_ns) for window in windows]),
    )


def _consecutive_differences(rounds: Rounds, loop_of: Mapping[str, str]) -> dict[str, PerStep]:
    """Each entry is the difference between its loop and the one before."""
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
        # Scaled to full coverage: up to 5 % of a window without readings is taken to be like the
        # rest, and windows with more are left out.
        scale = window.repetitions * figure.coverage
        each = figure.scaled(1 / scale)
        energy = _LoopEnergy(figure.energy_j / scale, each.error_components, window.duration_s / window.repetitions)
        rounds.setdefault(window.round, {})[window.loop] = energy
    return [measured for measured in rounds.values() if len(measured) == loops]


def _difference(rounds: Rounds, loop: str, before: str | None) -> PerStep:
    nothing = _LoopEnergy(0.0, (), 0.0)
    pairs = [(loops[loop], loops[before] if before else nothing) for loops in rounds]
    # Differences within a round: what both loops of a round have in common, such as the temperature
    # of the card, is not in their spread.
    energies_j = [more.energy_j - less.energy_j for more, less in pairs]
    spread = mean_t(energies_j)
    spread_j = spread.high - spread.value if len(pairs) > 1 else 0.0
    # The mean of n differences over 2n windows. Independent errors add in quadrature; the lag of the samples is the
    # same in all windows, so it adds up over rounds and cancels in a difference. Missing time has no common sign.
    signed = [(one, sign) for more, less in pairs for part, sign in ((more, 1.0), (less, -1.0)) for one in part.errors]
    errors = add_errors(one.scaled(abs(sign) if one.name == "missing time" else sign) for one, sign in signed)
    meter_j = combined_half_width_j(errors) / len(pairs)
    return PerStep(
        method="isolated",
        energy_j=spread.value,
        half_width_j=max(spread_j, meter_j),
        duration_s=sum(more.duration_s - less.duration_s for more, less in pairs) / len(pairs),
    )
