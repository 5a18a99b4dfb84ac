"""`precision=auto` and `compile=auto` of `joulelab train`: what is fastest for this model here, by a short trial.

On a GPU, a copy of the model trains a few steps in bf16 (autocast over fp32 weights), in fp32, and in the faster of
the two compiled. The choice is the shortest expected training: setup (compilation) plus steps times the time of a step.
A candidate that fails, or whose loss after these steps differs from that of fp32, is not chosen. Trials use energy
themselves (fp32 steps of a convolutional network take seven times as long as bf16 steps), so a short training is
satisfied with bf16, and compilation is only tried where it can pay. On a CPU, and with several ranks, nothing is tried.

The trained model is not touched: its weights and random numbers are those of a run that names the same settings.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pickle import PicklingError
from typing import Any

import torch
from torch import nn

from joulelab.errors import EndedBySignal
from joulelab.train.budget import Budget, Position
from joulelab.train.config import TrainingConfig
from joulelab.train.optim import float32_matmul_precision, repeated_blocks
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.trainer import SimpleTrainer, TrainerCallbacks
from joulelab.units import duration_text
from joulelab.zoo.objective import Objective, Workload

AUTO = "auto"
WARM_UP_STEPS, TIMED_STEPS = 2, 5
MIN_STEPS = 100
MIN_TRAINING_S = 60.0
"""Shorter trainings are not worth a trial."""
COMPILE_PAYS_S = 120.0
"""Compilation takes about half a minute or more: it is tried if training without it would take longer than this."""
MANY_LAYERS = 20
LOSS_TOLERANCE = 0.05
"""Relative difference of the loss from fp32 after the trial's steps; rounding of bf16 is far below it."""


_NO_LIMITS = dict.fromkeys(("epochs", "max_tokens", "max_time_s", "max_energy_j", "replay_budget_of"))


@dataclass(frozen=True)
class Candidate:
    precision: str
    compile: str

    def __str__(self) -> str:
        return f"{self.precision} {'eager' if self.compile == 'off' else f'compiled ({self.compile})'}"


@dataclass(frozen=True)
class Trial:
    candidate: Candidate
    setup_s: float = math.nan
    """The first steps, with compilation."""
    step_s: float = math.nan
    loss: float = math.nan
    problem: str = ""
    """Why it cannot be chosen."""

    def expected_s(self, steps: float) -> float:
        return math.inf if self.problem else self.setup_s + steps * self.step_s

    def __str__(self) -> str:
        if self.problem:
            return f"{self.candidate}: {self.problem}"
        return f"{self.candidate}: {duration_text(self.step_s)} per step, setup {duration_text(self.setup_s)}"


TimeCandidate = Callable[[Candidate], Trial]


@dataclass(frozen=True)
class Choice:
    candidate: Candidate
    reason: str
    trials: tuple[Trial, ...] = ()


def planned_steps(config: TrainingConfig, workload: Workload) -> int | None:
    """Optimizer steps of the training; None if only time or energy limit it."""
    batches = workload.batches
    steps = Budget(config, batches.batches_per_epoch, config.accumulate).total_steps(Position())
    found = [] if steps is None else [steps]
    if config.max_tokens is not None:
        found.append(math.ceil(config.max_tokens / max(1, batches.at(0, 0).tokens * config.accumulate)))
    return min(found, default=None)


def compile_mode(model: nn.Module) -> str:
    """The mode to try: whole, or one layer for all of a deep model, whose compilation would take minutes."""
    return "blocks" if len(repeated_blocks(model)) >= MANY_LAYERS else "default"


def choose(
    config: Any,
    device_type: str,
    ranks: int,
    steps: int | None,
    time_candidate: TimeCandidate,
    compiled: str = "default",
) -> Choice:
    """Concrete values for the settings that are `auto`; the others stay. `steps`: of the whole training, if known;
    `compiled`: the mode of compilation to try."""
    precisions = config.possible_precisions
    modes = ("off", compiled) if config.compile == AUTO else (config.compile,)
    if device_type != "cuda":
        return Choice(Candidate(precisions[0], modes[0]), f"no trial on {device_type}")
    best = Candidate(precisions[-1], modes[0])
    if ranks > 1:
        return Choice(best, "no trial with several ranks")
    if (steps is not None and steps < MIN_STEPS) or (config.max_time_s or math.inf) < MIN_TRAINING_S:
        return Choice(best, f"no trial: fewer than {MIN_STEPS} steps or {MIN_TRAINING_S:g} s of training")
    planned = math.inf if steps is None else float(steps)
    first = _with_equal_losses([time_candidate(best)])[0]
    if first.expected_s(planned) < MIN_TRAINING_S:
        return Choice(best, f"no further trial for less than {MIN_TRAINING_S:g} s of training", (first,))
    others = [time_candidate(Candidate(precision, modes[0])) for precision in precisions[:-1]]
    trials = _with_equal_losses([*others, first])
    fastest = min(trials, key=lambda trial: trial.step_s if not trial.problem else math.inf)
    longest_s = min(fastest.expected_s(planned), config.max_time_s or math.inf)
    if len(modes) > 1 and not fastest.problem and longest_s > COMPILE_PAYS_S:
        trials = _with_equal_losses([*trials, time_candidate(Candidate(fastest.candidate.precision, modes[1]))])
    # Without a number of steps the training is taken as long: compilation is then paid for.
    count = planned if math.isfinite(planned) else 1e6
    chosen = min(trials, key=lambda trial: trial.expected_s(count))
    if chosen.problem:
        return Choice(Candidate(precisions[0], modes[0]), "every trial failed", tuple(trials))
    return Choice(chosen.candidate, "the shortest expected training", tuple(trials))


def _with_equal_losses(trials: Sequence[Trial]) -> list[Trial]:
    """Trials whose loss is not that of the first, or not finite, are marked."""
    first = next((trial for trial in trials if not trial.problem), None)
    if first is None:
        return list(trials)
    found = []
    for trial in trials:
        off = abs(trial.loss - first.loss) / max(abs(first.loss), 1e-6)
        if not trial.problem and not off <= LOSS_TOLERANCE:
            problem = f"its loss is {trial.loss:.4g}, that of {first.candidate} {first.loss:.4g}"
            found.append(Trial(trial.candidate, problem=problem))
        else:
            found.append(trial)
    return found


def time_in_training(
    workload: Workload,
    seed: int,
    config: TrainingConfig,
    device: torch.device,
    trainer: type[SimpleTrainer[Any]] = SimpleTrainer,
    check_stop: Callable[[], None] = lambda: None,
) -> TimeCandidate:
    """Times candidates on copies of the model; every one trains on the same first batches."""

    def trial(candidate: Candidate) -> Trial:
        # The trial must not change the random numbers of the training that follows.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            try:
                return _train(candidate)
            except EndedBySignal:
                raise
            except Exception as error:  # compilers raise anything; if all candidates fail, the training shows why
                first_line = next(iter(str(error).splitlines()), "")
                return Trial(candidate, problem=f"{type(error).__name__}: {first_line[:100]}")
            finally:
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()

    def _train(candidate: Candidate) -> Trial:
        model, objective = _copy_to(device, workload)
        torch.manual_seed(seed)
        settings = config.model_copy(update={**_NO_LIMITS, **vars(candidate), "parallel": "none", "max_steps": 10_000})
        with float32_matmul_precision(candidate.precision):
            loop = trainer(model, workload.batches, objective, settings, NoOpStats(), TrainerCallbacks())
            loop.trained.train()
            try:
                begin = time.monotonic()
                _steps(loop, WARM_UP_STEPS)
                timed = time.monotonic()
                _steps(loop, TIMED_STEPS)
                end = time.monotonic()
                return Trial(candidate, timed - begin, (end - timed) / TIMED_STEPS, loop.log())
            finally:
                loop.close()

    def _steps(loop: SimpleTrainer[Any], count: int) -> None:
        for _ in range(count):
            check_stop()
            loop.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return trial


def _copy_to(device: torch.device, workload: Workload) -> tuple[nn.Module, Objective[Any]]:
    """Copies of model and objective on the device. Initializing billions of weights again would take minutes."""
    modules = (workload.model, *workload.objective.modules().values())
    copies: dict[int, Any] = {}  # deepcopy's memo: weights go to the device without a second copy in host memory
    for module in modules:
        for weight in module.parameters():
            on_device = weight.detach().to(device, copy=True)
            copies[id(weight)] = nn.Parameter(on_device, requires_grad=weight.requires_grad)
        copies |= {id(buffer): buffer.detach().to(device, copy=True) for buffer in module.buffers()}
    try:
        model, objective = copy.deepcopy((workload.model, workload.objective), copies)
    except (TypeError, PicklingError):  # a user's objective may have processes, locks or files
        if len(modules) > 1:
            raise
        return copy.deepcopy(workload.model, copies), workload.objective
    return model, objective
