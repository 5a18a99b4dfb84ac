"""The training loop: one story, top to bottom, for teachers, students and every model of the zoo.

    train: resume -> (step -> log, evaluate, save or stop)* -> done
    step:  draw micro-batches -> forward -> backward, each -> one optimiser step

Gradients of summed losses are accumulated and divided by the true count once per step, so that every split into
micro-batches and ranks gives the same gradient. The loss stays on the device between log lines: looking at it costs a
wait.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from joulelab.data.batches import BatchSource, TrainingBatch
from joulelab.errors import EndedBySignal, NonFiniteLoss
from joulelab.train import parallel
from joulelab.train.budget import Budget, BudgetReading, EarlyStopping, Position
from joulelab.train.checkpoint import Checkpoints, LoopState, ModelState
from joulelab.train.config import TrainingConfig
from joulelab.train.optim import (
    BLOCKS,
    OFF,
    autocast,
    checkpoint_activations,
    compile_in_place,
    float32_matmul_precision,
    make_optimizer,
    make_scaler,
    repeated_blocks,
    torch_compile_mode,
)
from joulelab.train.parallel import SINGLE_RANK, Ranks
from joulelab.train.stats.hooks import TrainerStats
from joulelab.zoo.objective import Objective, ObjectiveOutput, PhaseMaker

# What the loop needs from the run around it, and what it tells it; with the defaults the loop works alone.


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
class TrainerCallbacks:
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
    replayed_looks: Sequence[BudgetReading] | None = None
    warn: Callable[[str], None] = lambda text: None
    ranks: Ranks = SINGLE_RANK


# Loss and its parts since the last look, summed on the device: looking at them makes the host wait.


class RunningLoss:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, output: ObjectiveOutput) -> None:
        for name, value in {"loss": output.loss_sum.detach(), **output.parts}.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()
        self._count += output.count

    def take(self, ranks: Ranks) -> tuple[float, dict[str, float]]:
        """Mean loss and mean parts over all ranks; begins anew."""
        names = list(self._sums)
        *sums, count = ranks.sum([*(float(self._sums[name]) for name in names), self._count])
        means = {name: value / max(1.0, count) for name, value in zip(names, sums, strict=True)}
        self._sums, self._count = {}, 0
        return means.pop("loss", math.nan), means

    def peek(self) -> float:
        return float(self._sums["loss"]) if self._sums else 0.0

    def state(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "count": self._count}

    def load_state(self, state: dict[str, Any]) -> None:
        self._sums = {name: value.to(self._device, copy=True) for name, value in state["sums"].items()}
        self._count = state["count"]


# The learning rate as a function of the fraction of the budget that is spent.
#
# A fraction, not a step number: a budget of joules or minutes has no last step that anyone knows in advance.


def learning_rate_factor(schedule: str, fraction: float, warmup_share: float) -> float:
    """Factor on the peak rate: up to 1 over the warm-up, then as the schedule says until the budget is spent."""
    if fraction < warmup_share:
        return fraction / warmup_share
    rest = min(1.0, (fraction - warmup_share) / (1 - warmup_share))
    if schedule == "linear":
        return 1 - rest
    return 1.0 if schedule == "constant" else 0.5 * (1 + math.cos(math.pi * rest))


# Batches made ready ahead of the step that needs them, in a thread and a stream of their own.
#
# Which batch comes next follows from the position alone, so nothing of this is state: after a resume or a step back,
# what was made ahead is dropped and made anew.


B = TypeVar("B", bound=TrainingBatch)


class _PreparedBatch(NamedTuple):
    batch: Any
    copied: torch.cuda.Event | None


class Prefetcher(Generic[B]):
    """`take(number)` gives the micro-batch of that number; the following ones, `stride` apart, are made meanwhile."""

    def __init__(self, source: BatchSource[B], device: torch.device, ahead: int, stride: int = 1) -> None:
        self._source, self._device, self._ahead, self._stride = source, device, ahead, stride
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="joulelab-input") if ahead else None
        self._queue: deque[tuple[int, Future[_PreparedBatch]]] = deque()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def take(self, number: int) -> B:
        if self._pool is None:
            return self._batch(number).to(self._device)
        if not self._queue or self._queue[0][0] != number:
            self._drop()
        while len(self._queue) <= self._ahead:
            following = self._queue[-1][0] + self._stride if self._queue else number
            self._queue.append((following, self._pool.submit(self._make, following)))
        ready = self._queue.popleft()[1].result()
        if ready.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(ready.copied)
            for tensor in _cuda_tensors(ready.batch):
                tensor.record_stream(stream)  # not to be overwritten by a later batch while a kernel still reads it
        batch: B = ready.batch
        return batch

    def close(self) -> None:
        self._drop()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _drop(self) -> None:
        for _, future in self._queue:
            future.cancel()
        self._queue.clear()

    def _batch(self, number: int) -> B:
        epoch, index = divmod(number, self._source.batches_per_epoch)
        return self._source.at(epoch, index)

    def _make(self, number: int) -> _PreparedBatch:
        batch = self._batch(number)
        if self._stream is None:
            return _PreparedBatch(batch.to(self._device), None)
        pin = getattr(batch, "pin_memory", None)
        with torch.cuda.stream(self._stream):
            moved = (pin() if pin else batch).to(self._device)
            return _PreparedBatch(moved, self._stream.record_event())


def _cuda_tensors(batch: object) -> Iterator[Tensor]:
    for value in vars(batch).values():
        if isinstance(value, Tensor) and value.is_cuda:
            yield value
        elif isinstance(value, Mapping):
            yield from (inner for inner in value.values() if isinstance(inner, Tensor) and inner.is_cuda)


class Trainer(ABC, Generic[B]):
    """The loop. A trainer says how one micro-batch goes forward and backward and how the optimiser steps."""

    def __init__(
        self,
        model: nn.Module,
        batches: BatchSource[B],
        objective: Objective[B],
        config: TrainingConfig,
        stats: TrainerStats,
        surroundings: TrainerCallbacks | None = None,
    ) -> None:
        self.model = model
        self.objective = objective
        self.config = config
        self.stats = stats
        self.around = surroundings or TrainerCallbacks()
        self.ranks = self.around.ranks
        self.mark_part = self.around.phase
        self.device = next(model.parameters()).device
        self.trained = nn.ModuleDict({"model": model, **objective.modules()})
        self.optimizer = self.set_up()
        self.position = Position()
        self.early_stopping = EarlyStopping(config.early_stopping_patience)
        self.budget = Budget(
            config,
            batches.batches_per_epoch,
            config.accumulate * self.ranks.world,
            self.around.energy_j,
            self.around.budget_look,
            self.around.replayed_looks,
        )
        self._input = Prefetcher(batches, self.device, config.prefetch, stride=self.ranks.world)
        self._tally = RunningLoss(self.device)
        self._stop: EndedBySignal | None = None

    @abstractmethod
    def set_up(self) -> torch.optim.Optimizer:
        """Make the modules ready for forward passes, and the optimiser of their parameters."""

    @abstractmethod
    def forward(self, batch: B) -> ObjectiveOutput: ...

    @abstractmethod
    def backward(self, output: ObjectiveOutput) -> None: ...

    @abstractmethod
    def optimizer_step(self, count: int) -> None: ...

    def train(self) -> float:
        """Train to the end of the budget; the mean loss of the last stretch of steps."""
        self.resume()
        self.trained.train()
        loss = math.nan
        with float32_matmul_precision(self.config.precision):
            self.budget.start()
            self.stats.start_train()
            began = self.position
            while not self.over:
                if self.position.step == began.step:
                    self._warm_up()
                else:
                    self.step()
                if self._due(self.config.log_every_steps):
                    loss = self.log()
                if self.around.evaluate and self._due(self.config.evaluate_every_steps):
                    self.evaluate()
                if self._due(self.config.checkpoint_every_steps) and not self.over:
                    self.save()  # after the last step the model is about to become an artifact
                if self._stop is not None:
                    self._leave_off(self._stop)
            self.budget.stop()
            self.stats.stop_train()
        self.close()
        return loss

    def _warm_up(self) -> None:
        """The first step of an attempt allocates, initializes libraries and loads kernels: it is setup.

        The rule is the same for short and long trainings, so that their rates can be compared. Only a training of a
        single step keeps it, as nothing else was trained.
        """
        began = self.position
        with self.budget.paused():
            self.step()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # what the step left to the device belongs to it
        if began.step > 0 or not self.over:
            self.around.warmed_up(began, self.position)

    @property
    def over(self) -> bool:
        return self.budget.over(self.position) or self.early_stopping.over

    @property
    def total_steps(self) -> int | None:
        """Where it is known in advance."""
        return self.budget.steps

    def step(self) -> None:
        """One optimiser step over `accumulate` micro-batches on every rank."""
        self.stats.start_step()
        count, samples, tokens = 0, 0, 0
        for number in range(self.config.accumulate):
            self.stats.start_input()
            batch = self.next_batch()
            self.stats.stop_input()
            self.last_of_step = number == self.config.accumulate - 1
            self.stats.start_forward()
            output = self.forward(batch)
            self.stats.stop_forward()
            self.stats.start_backward()
            self.backward(output)
            self.stats.stop_backward()
            self._tally.add(output)
            count, samples, tokens = count + output.count, samples + batch.samples, tokens + batch.tokens
        count, samples, tokens = self._agree(count, samples, tokens)
        self._set_learning_rate(tokens)
        self.stats.start_optimiser_step()
        self.optimizer_step(count)
        self.objective.after_step(self.model)
        self.stats.stop_optimiser_step()
        self.position = self.position.after_step(samples, tokens)
        self.around.advance(self.position)
        self.stats.stop_step()
        self.stats.log_step(self.position.step)

    def next_batch(self) -> B:
        """This rank's next micro-batch, on the device."""
        batch = self._input.take(self.position.drawn + self.ranks.rank)
        self.position = replace(self.position, drawn=self.position.drawn + self.ranks.world)
        return batch

    def rewind(self, position: Position) -> None:
        """Stand at an earlier position again; the batches after it come again."""
        self.position = position

    def _agree(self, count: int, samples: int, tokens: int) -> tuple[int, int, int]:
        """Counts over all ranks, the first one's reading of clock and meter, and whether anyone was asked to stop."""
        seen = self.budget.look(self.position) if self.ranks.is_first else 0.0
        asked = self._asked_to_stop()
        found = self.ranks.sum([count, samples, tokens, seen, asked is not None])
        self.budget.see(self.position, found[3])
        if found[4]:
            self._stop = asked or EndedBySignal(15)
        return int(found[0]), int(found[1]), int(found[2])

    def _asked_to_stop(self) -> EndedBySignal | None:
        try:
            self.around.check_stop()
        except EndedBySignal as ended:
            return ended
        return None

    def _leave_off(self, ended: EndedBySignal) -> None:
        self.save(wait=True)
        self.close()
        raise ended

    def log(self) -> float:
        """Look at the losses since the last look; a loss that is not finite ends the run here."""
        loss, parts = self._tally.take(self.ranks)
        self._require_finite(loss)
        self.stats.log_loss(loss)
        rate = self.optimizer.param_groups[0]["lr"]
        self.around.report(StepReport(self.position, self.budget.fraction(self.position), loss, parts, rate))
        return loss

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work that is not training, between two steps: trackers and budgets look away."""
        self.stats.start_aside()
        with self.budget.paused():
            yield
        self.stats.stop_aside()

    def evaluate(self) -> None:
        """Held-out loss, on the way; the model is as it was afterwards."""
        assert self.around.evaluate is not None
        with self.aside():
            self.trained.eval()
            held_out = self.around.evaluate()
            self.trained.train()
        # the first rank's figure, so that rounding cannot make one rank stop and another go on
        self.early_stopping.take(self.ranks.sum([held_out if self.ranks.is_first else 0.0])[0])

    def save(self, wait: bool = False) -> None:
        if self.around.checkpoints is None:
            return
        self._require_finite(self._tally.peek())  # a broken state must not become what a resume starts from
        self.stats.start_checkpoint()
        self._settle_checkpoint()
        wait = wait or not self.config.checkpoint_async
        self.around.checkpoints.save(self.position, self._heavy, self.light_state(), wait=False)
        self.around.saved(self.position)
        if wait:
            self._settle_checkpoint()
        self.stats.stop_checkpoint()

    def _settle_checkpoint(self) -> None:
        """A full disk must not end hours of training that can still be finished: it is told, and training goes on."""
        try:
            if self.around.checkpoints is not None:
                self.around.checkpoints.finish()
        except OSError as error:
            self.around.warn(f"a checkpoint could not be written: {error}")

    def close(self) -> None:
        """Wait for what is still being written, and end the input's thread."""
        self._input.close()
        self._settle_checkpoint()

    def _require_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"the loss became {loss} by step {self.position.step}",
                "lower the learning rate, or look at the data of the last steps; the joules spent are recorded",
            )

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        found = self.around.checkpoints.load(self._heavy) if self.around.checkpoints else None
        if found is not None:
            self.position, light = found
            self.load_light_state(light)
            self.around.resumed(self.position)
            self.around.advance(self.position)

    @property
    def _heavy(self) -> ModelState:
        return ModelState(self.trained, self.optimizer)

    def state(self) -> dict[str, Any]:
        """All that training changes, by reference; `position` apart."""
        return {
            "trained": self.trained.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "light": self.light_state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.trained.load_state_dict(state["trained"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.load_light_state(state["light"])

    def light_state(self) -> LoopState:
        return {
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "tally": self._tally.state(),
            "budget": self.budget.state(),
            "early_stopping": self.early_stopping.state(),
        }

    def load_light_state(self, light: LoopState) -> None:
        torch.set_rng_state(light["rng"].cpu())
        if light["cuda_rng"] is not None:
            torch.cuda.set_rng_state(light["cuda_rng"].cpu(), self.device)
        self._tally.load_state(light["tally"])
        self.budget.load_state(light["budget"])
        self.early_stopping.load_state(light["early_stopping"])

    def _set_learning_rate(self, tokens: int) -> None:
        """For the step under way, of so many tokens."""
        fraction = self.budget.fraction_amid(self.position, tokens)
        factor = learning_rate_factor(self.config.schedule, fraction, self.config.warmup_share)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * factor

    def _due(self, every: int | None) -> bool:
        return every is not None and (self.position.step % every == 0 or self.over)


# How a micro-batch goes forward and backward and how the optimiser steps: on one device, or on many by DDP or FSDP.


_CLIP_EPS = 1e-6


class SimpleTrainer(Trainer[B]):
    def set_up(self) -> torch.optim.Optimizer:
        self.parallel = parallel.parallel_mode(self.config, self.ranks)
        self.scaler: Any = None
        self.last_of_step = True
        if self.config.activation_checkpointing:
            checkpoint_activations(self.model)
        if self.parallel == "fsdp":
            from joulelab.train.sharding_fsdp import shard_modules

            shard_modules(self.trained.values())
        self.called = parallel.wrap_ddp(self.model, self.device) if self.parallel == "ddp" else self.model
        self._compute = self._computation()
        return make_optimizer(self.trained.parameters(), self.config)

    def _computation(self) -> Callable[[B], ObjectiveOutput]:
        """The objective over the model, compiled where asked: as one graph where it is one, else the model alone, or
        only its blocks."""
        objective, called = self.objective, self.called
        setting, mode = self.config.compile, torch_compile_mode(self.config.compile)
        for module in objective.modules().values():
            if setting != BLOCKS or repeated_blocks(module):  # a connector has none
                compile_in_place(module, setting)
        if setting in (OFF, BLOCKS):
            compile_in_place(self.model, setting)
            return lambda batch: objective(called, batch, self.mark_part)
        if getattr(objective, "is_one_graph", False):  # it marks no phases of its own
            whole = torch.compile(lambda batch: objective(called, batch, lambda name: nullcontext()), mode=mode)
            return lambda batch: whole(batch)
        compiled: Any = torch.compile(called, mode=mode)
        return lambda batch: objective(compiled, batch, self.mark_part)

    def forward(self, batch: B) -> ObjectiveOutput:
        parallel.set_gradient_sync(self.called, now=self.last_of_step)
        with autocast(self.config.precision, self.device):
            return self._compute(batch)

    def backward(self, output: ObjectiveOutput) -> None:
        if self.config.precision != "fp16":
            output.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch leaves Tensor.backward untyped
            return
        if self.scaler is None:
            self.scaler = make_scaler(self.config.precision, self.device, output.count)
        self.scaler.scale(output.loss_sum).backward()

    def optimizer_step(self, count: int) -> None:
        """From gradients of sums, averaged over ranks, to the gradient of the mean over all that was counted."""
        if self.parallel == "ddp":
            parallel.average_gradients(self._beside_the_model(), self.ranks)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.trained.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, self._factor(gradients, self.ranks.world / max(1, count)))
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _factor(self, gradients: list[Tensor], of_mean: float) -> float | Tensor:
        """From sums to the mean and, where that is too long, to the allowed length: one pass over them for both."""
        if self.config.clip_norm is None:
            return of_mean
        length = of_mean * nn.utils.get_total_norm(gradients, foreach=True)
        return of_mean * torch.clamp(self.config.clip_norm / (length + _CLIP_EPS), max=1.0)

    def _beside_the_model(self) -> list[nn.Parameter]:
        return [p for name, module in self.trained.items() if name != "model" for p in module.parameters()]

    def light_state(self) -> LoopState:
        return {**super().light_state(), "scaler": self.scaler.state_dict() if self.scaler is not None else None}

    def load_light_state(self, light: LoopState) -> None:
        super().load_light_state(light)
        if light["scaler"] is not None:
            self.scaler = make_scaler(self.config.precision, self.device, 1)
            self.scaler.load_state_dict(light["scaler"])
