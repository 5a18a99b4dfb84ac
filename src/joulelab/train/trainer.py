"""The training loop, for teachers, students and every model of the zoo.

    train: resume -> (prepare where needed -> step -> log, evaluate, save or stop)* -> done
    step:  draw micro-batches -> forward -> backward, each -> one optimizer step

`Trainer` is the loop, `SimpleTrainer` runs a micro-batch on one device or on many (DDP, FSDP). The rest of the module
is what they use: the running loss, the learning-rate schedule and the prefetching of batches.

Objectives return a summed loss and its count. Gradients of sums are accumulated and divided by the total count once per
step, so every split into micro-batches and ranks gives the same gradient; a mean of micro-batch means would weight the
tokens of short batches more. The loss stays on the device between log lines, because reading it synchronizes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from joulelab import lookup
from joulelab.data.batches import BatchSource, TrainingBatch
from joulelab.errors import ConfigError, EndedBySignal, NonFiniteLoss
from joulelab.runs.paths import storage_failure
from joulelab.train import parallel
from joulelab.train.bf16_weights import Bf16Updates, cast_weights, require_castable
from joulelab.train.budget import Budget, BudgetReading, EarlyStopping, Position
from joulelab.train.checkpoint import Checkpoints, LoopState, ModelState
from joulelab.train.config import TrainingConfig
from joulelab.train.fp8_products import FP8_NOT_COMPILED, check_products, require_fp8, use_fp8_products
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
from joulelab.train.stats.hooks import TrainerStats, device_synchronizer
from joulelab.zoo.objective import Objective, ObjectiveOutput, PhaseMaker

B = TypeVar("B", bound=TrainingBatch)
_CLIP_EPS = 1e-6


@dataclass(frozen=True)
class StepReport:
    """Metrics of the last `log_every_steps` steps."""

    position: Position
    fraction: float
    """Fraction of the budget that is spent."""
    loss: float
    parts: dict[str, float]
    """Mean of each term of the loss."""
    learning_rate: float


class StepPreparation(Protocol):
    """Work between steps that training needs, for example sampling the next batches from the model."""

    def is_due(self, position: Position) -> bool:
        """Whether the step at this position needs it; the same on all ranks."""

    def prepare(self, position: Position, paused: Callable[[], AbstractContextManager[object]]) -> None:
        """Do it. What is spent inside `with paused():` does not use the training's budget."""


@dataclass(frozen=True)
class TrainerCallbacks:
    """What the loop needs from the run around it, and what it reports to it. With the defaults the loop runs alone."""

    checkpoints: Checkpoints | None = None
    phase: PhaseMaker = lambda name: torch.autograd.profiler.record_function(name)
    check_stop: Callable[[], None] = lambda: None
    """Raises EndedBySignal when the run was asked to stop."""
    on_log: Callable[[StepReport], None] = lambda report: None
    on_step: Callable[[Position], None] = lambda position: None
    on_checkpoint: Callable[[Position], None] = lambda position: None
    """A checkpoint of this position was taken."""
    on_resume: Callable[[Position], None] = lambda position: None
    """Training continues from the checkpoint of this position."""
    on_warmup: Callable[[Position, Position], None] = lambda before, after: None
    """The first step of this attempt is done and counts as setup; positions before and after it."""
    evaluate: Callable[[], float] | None = None
    """Computes the held-out loss, in a separate stage."""
    energy_j: Callable[[], float | None] = lambda: None
    """Energy of the job so far, from an arbitrary origin; None where no sensor reports."""
    on_budget_reading: Callable[[int, float], None] = lambda step, fraction: None
    replayed_readings: Sequence[BudgetReading] | None = None
    warn: Callable[[str], None] = lambda text: None
    ranks: Ranks = SINGLE_RANK
    preparation: StepPreparation | None = None


class Trainer(ABC, Generic[B]):
    """The loop. Subclasses define forward and backward of a micro-batch and the optimizer step."""

    def __init__(
        self,
        model: nn.Module,
        batches: BatchSource[B],
        objective: Objective[B],
        config: TrainingConfig,
        stats: TrainerStats,
        callbacks: TrainerCallbacks | None = None,
    ) -> None:
        self.model = model
        self.objective = objective
        self.config = config
        self.stats = stats
        self.callbacks = callbacks or TrainerCallbacks()
        self.ranks = self.callbacks.ranks
        self.mark_phase = self.callbacks.phase
        self.device = next(model.parameters()).device
        self.trained = nn.ModuleDict({"model": model, **objective.modules()})
        self.optimizer = self.set_up()
        self.position = Position()
        self.early_stopping = EarlyStopping(config.early_stopping_patience)
        self.budget = Budget(
            config,
            batches.batches_per_epoch,
            config.accumulate * self.ranks.world,
            self.callbacks.energy_j,
            self.callbacks.on_budget_reading,
            self.callbacks.replayed_readings,
        )
        self._input = Prefetcher(batches, self.device, config.prefetch, stride=self.ranks.world)
        self._running_loss = RunningLoss(self.device)
        self._stop: EndedBySignal | None = None

    @abstractmethod
    def set_up(self) -> torch.optim.Optimizer:
        """Prepare the modules for forward passes; returns the optimizer of their parameters."""

    @abstractmethod
    def forward(self, batch: B) -> ObjectiveOutput: ...

    @abstractmethod
    def backward(self, output: ObjectiveOutput) -> None: ...

    @abstractmethod
    def optimizer_step(self, count: int) -> None: ...

    def train(self) -> float:
        """Train until the budget is spent; returns the mean loss since the second to last log line."""
        self.resume()
        self.trained.train()
        loss = math.nan
        with float32_matmul_precision(self.config.precision):
            self.budget.start()
            with self.stats.phase("train"):
                first_step = self.position.step
                while not self.finished:
                    self.prepare_step()
                    if self.position.step == first_step:
                        self._warm_up()
                    else:
                        self.step()
                    if self._due(self.config.log_every_steps):
                        loss = self.log()
                    if self.callbacks.evaluate and self._due(self.config.evaluate_every_steps):
                        self.evaluate()
                    if self._due(self.config.checkpoint_every_steps) and not self.finished:
                        self.save()  # not after the last step: the model becomes an artifact
                    if self._stop is not None and not self.finished:
                        self._save_and_stop(self._stop)  # a finished training has a model to save instead
                self.budget.stop()
        self.close()
        return loss

    def prepare_step(self) -> None:
        """Other work that the next step needs, billed to its own stages. A stop during it loses only that work: no
        batch of the next step has been drawn."""
        preparation = self.callbacks.preparation
        if preparation is None or not preparation.is_due(self.position):
            return
        try:
            with self.stats.phase("aside"):
                preparation.prepare(self.position, self.budget.paused)
        except EndedBySignal as signal:
            self._save_and_stop(signal)

    def _warm_up(self) -> None:
        """Run the first step of an attempt, which counts as setup: it allocates memory and loads libraries and kernels.

        The rule does not depend on the length of the training, so rates of short and long trainings are comparable. A
        training of a single step keeps it, because nothing else was trained.
        """
        before = self.position
        with self.budget.paused():
            self.step()
            device_synchronizer(self.device)()  # kernels still queued belong to this step
        if before.step > 0 or not self.finished:
            self.callbacks.on_warmup(before, self.position)

    @property
    def finished(self) -> bool:
        return self.budget.exhausted(self.position) or self.early_stopping.triggered

    @property
    def total_steps(self) -> int | None:
        """None if the budget does not determine it in advance."""
        return self.budget.total_steps(self.position)

    def step(self) -> None:
        """One optimizer step over `accumulate` micro-batches on every rank."""
        with self.stats.phase("step"):
            count, samples, tokens = 0, 0, 0
            for number in range(self.config.accumulate):
                with self.stats.phase("input"):
                    batch = self.next_batch()
                self.last_of_step = number == self.config.accumulate - 1
                with self.stats.phase("forward"):
                    output = self.forward(batch)
                with self.stats.phase("backward"):
                    self.backward(output)
                self._running_loss.add(output)
                count, samples, tokens = count + output.count, samples + batch.samples, tokens + batch.tokens
            # After the backward passes are queued and before the optimizer needs the count: the
            # exchange overlaps with the device's work.
            count, samples, tokens = self._sync_ranks(count, samples, tokens)
            self._set_learning_rate(tokens)
            with self.stats.phase("optimizer_step"):
                self.optimizer_step(count)
                self.objective.after_step(self.model)
            self.position = self.position.after_step(samples, tokens)
            self.callbacks.on_step(self.position)
        self.stats.log_step(self.position.step)

    def next_batch(self) -> B:
        """This rank's next micro-batch, on the device."""
        batch = self._input.take(self.position.drawn + self.ranks.rank)
        self.position = replace(self.position, drawn=self.position.drawn + self.ranks.world)
        return batch

    def rewind(self, position: Position) -> None:
        """Return to an earlier position; the same batches follow again."""
        self.position = position

    def _sync_ranks(self, count: int, samples: int, tokens: int) -> tuple[int, int, int]:
        """Counts summed over all ranks. Also shares the first rank's budget reading and any request to stop, so that
        all ranks take the same decisions."""
        spent = self.budget.read(self.position) if self.ranks.is_first else 0.0
        stop = self._stop_request()
        # One message for everything that ranks must agree on. Only the first rank reads clock and
        # meter, so its value is the sum.
        sums = self.ranks.sum([count, samples, tokens, spent, stop is not None])
        self.budget.update(self.position, sums[3])
        if sums[4]:
            self._stop = stop or EndedBySignal(15)
        return int(sums[0]), int(sums[1]), int(sums[2])

    def _stop_request(self) -> EndedBySignal | None:
        try:
            self.callbacks.check_stop()
        except EndedBySignal as signal:
            return signal
        return None

    def _save_and_stop(self, signal: EndedBySignal) -> None:
        self.save(wait=True)
        self.close()
        raise signal

    def log(self) -> float:
        """Report the mean loss since the last call. A loss that is not finite ends the run here."""
        loss, parts = self._running_loss.pop_means(self.ranks)
        self._require_finite(loss)
        self.stats.log_loss(loss)
        rate = self.optimizer.param_groups[0]["lr"]
        self.callbacks.on_log(StepReport(self.position, self.budget.fraction(self.position), loss, parts, rate))
        return loss

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Other work between two steps: excluded from the budget, and trackers are notified."""
        with self.stats.phase("aside"), self.budget.paused():
            yield

    def evaluate(self) -> None:
        """Evaluate the held-out loss during training."""
        assert self.callbacks.evaluate is not None
        with self.pause():
            self.trained.eval()
            held_out = self.callbacks.evaluate()
            self.trained.train()
        # All ranks use the first rank's figure: rounding must not make one rank stop and another continue.
        self.early_stopping.update(self.ranks.of_first([held_out])[0])

    def save(self, wait: bool = False) -> None:
        if self.callbacks.checkpoints is None:
            return
        self._require_finite(self._running_loss.peek())  # never resume from a diverged state
        with self.stats.phase("checkpoint"):
            self._finish_checkpoint()
            with self._storage_failures_as_warnings():
                self.callbacks.checkpoints.save(self.position, self._model_state, self.loop_state(), wait=False)
                self.callbacks.on_checkpoint(self.position)
            if wait or not self.config.checkpoint_async:
                self._finish_checkpoint()

    def _finish_checkpoint(self) -> None:
        """Wait for the checkpoint being written."""
        with self._storage_failures_as_warnings():
            if self.callbacks.checkpoints is not None:
                self.callbacks.checkpoints.finish()

    @contextmanager
    def _storage_failures_as_warnings(self) -> Iterator[None]:
        """With a full disk the training itself can still finish."""
        try:
            yield
        except Exception as error:
            failure = storage_failure(error)  # torch reports a full disk as RuntimeError
            if failure is None and not isinstance(error, OSError):
                raise
            self.callbacks.warn(f"a checkpoint could not be written: {failure.message if failure else error}")

    def close(self) -> None:
        """Stop the input thread and wait for the checkpoint being written."""
        self._input.close()
        self._finish_checkpoint()

    def _require_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"the loss became {loss} by step {self.position.step}",
                "lower the learning rate or inspect the data of the last steps; the energy used so far is recorded",
            )

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        checkpoints = self.callbacks.checkpoints
        loaded = checkpoints.load(self._model_state, self.callbacks.warn) if checkpoints else None
        if loaded is not None:
            self.position, loop_state = loaded
            self.load_loop_state(loop_state)
            self.callbacks.on_resume(self.position)
            self.callbacks.on_step(self.position)

    @property
    def _model_state(self) -> ModelState:
        return ModelState(self.trained, self.optimizer)

    def loop_state(self) -> LoopState:
        return {
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "mps_rng": torch.mps.get_rng_state() if self.device.type == "mps" else None,
            "tally": self._running_loss.state(),
            "budget": self.budget.state(),
            "early_stopping": self.early_stopping.state(),
        }

    def load_loop_state(self, state: LoopState) -> None:
        torch.set_rng_state(state["rng"].cpu())
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"].cpu(), self.device)
        if state.get("mps_rng") is not None:  # checkpoints of earlier versions have none
            torch.mps.set_rng_state(state["mps_rng"].cpu())
        self._running_loss.load_state(state["tally"])
        self.budget.load_state(state["budget"])
        self.early_stopping.load_state(state["early_stopping"])

    def _set_learning_rate(self, tokens: int) -> None:
        """For the current step, which trains on `tokens` tokens."""
        fraction = self.budget.fraction_amid(self.position, tokens)
        config, steps = self.config, self.config.warmup_steps
        factor = learning_rate_factor(config.schedule, fraction, 0.0 if steps else config.warmup_share)
        if steps:
            # The number of steps of a token, time or energy budget is not known in advance, so the decay cannot begin
            # after the warm-up: it runs from the first step, and the warm-up multiplies it.
            factor *= min(1.0, (self.position.step + 1) / steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * factor

    def _due(self, every: int | None) -> bool:
        return every is not None and (self.position.step % every == 0 or self.finished)


class SimpleTrainer(Trainer[B]):
    """Forward, backward and optimizer step on one device, or on several ranks with DDP or FSDP."""

    def set_up(self) -> torch.optim.Optimizer:
        self.parallel = parallel.parallel_mode(self.config, self.ranks)
        self.scaler: Any = None
        self.last_of_step = True
        if self.config.weights == "bf16":
            require_castable(self.trained)
            cast_weights(self.trained, torch.bfloat16)
        if self.config.matmul == "fp8":
            require_fp8(self.device)
            use_fp8_products(self.model)
            if self.config.compile == "off":
                self.callbacks.warn(FP8_NOT_COMPILED)
        if self.config.activation_checkpointing:
            checkpoint_activations(self.model)
        if self.parallel == "fsdp":
            from joulelab.train.sharding_fsdp import shard_modules

            shard_modules(self.trained.values())
        self.wrapped_model = parallel.wrap_ddp(self.model, self.device) if self.parallel == "ddp" else self.model
        self._compute = self._compile_objective()
        shard = self.ranks.rank if self.parallel == "fsdp" else 0
        return make_optimizer(self.trained.parameters(), self.config, self._rounding_seed(), shard)

    def _rounding_seed(self) -> int:
        """Drawn by the first rank, because replicas must round alike. Nothing is drawn for fp32 weights, so that their
        trainings have the random numbers of earlier versions."""
        if self.config.weights == "fp32":
            return 0
        return int(self.ranks.of_first([int(torch.randint(2**31, ()))])[0])

    def _compile_objective(self) -> Callable[[B], ObjectiveOutput]:
        """The objective applied to the model, compiled as configured: model and loss as one graph if the objective
        allows it, else the model alone or only its blocks."""
        objective, model = self.objective, self.wrapped_model
        setting, mode = self.config.compile, torch_compile_mode(self.config.compile)
        for module in objective.modules().values():
            if setting != BLOCKS or repeated_blocks(module):  # a small connector has no blocks
                compile_in_place(module, setting)
        if setting in (OFF, BLOCKS):
            compile_in_place(self.model, setting)
            return lambda batch: objective(model, batch, self.mark_phase)
        if getattr(objective, "is_one_graph", False):  # it marks no phases
            whole = torch.compile(lambda batch: objective(model, batch, lambda name: nullcontext()), mode=mode)
            return lambda batch: whole(batch)
        compiled: Any = torch.compile(model, mode=mode)
        return lambda batch: objective(compiled, batch, self.mark_phase)

    def forward(self, batch: B) -> ObjectiveOutput:
        parallel.set_gradient_sync(self.wrapped_model, now=self.last_of_step)
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
        """Step on the gradient of the mean over `count` terms of all ranks.

        DDP and FSDP average gradients over ranks. The gradient of a sum, averaged over `world` ranks, becomes that of
        the mean over all terms when multiplied by world / count.
        """
        if self.parallel == "ddp":
            parallel.average_gradients(self._objective_parameters(), self.ranks)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.trained.parameters() if p.grad is not None]
        factor = self._gradient_factor(gradients, self.ranks.world / max(1, count)) if gradients else 1.0
        self._step(gradients, factor)
        self.optimizer.zero_grad(set_to_none=True)

    def _step(self, gradients: list[Tensor], factor: float | Tensor) -> None:
        """Update the weights by the gradients times the factor. It may be a tensor on the device: clipping then needs
        no synchronization."""
        if isinstance(self.optimizer, Bf16Updates) and self.scaler is None and self.optimizer.takes_factor():
            self.optimizer.step(factor=factor)
            return
        if gradients:
            torch._foreach_mul_(gradients, factor)  # one kernel for all gradients
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def _gradient_factor(self, gradients: list[Tensor], sum_to_mean: float) -> float | Tensor:
        """Sum to mean, times clipping by norm: one pass over the gradients does both."""
        if self.config.clip_norm is None:
            return sum_to_mean
        # The norm is linear in the factor, so the norm of the mean's gradient is known before the
        # gradients are scaled.
        norm = sum_to_mean * nn.utils.get_total_norm(gradients, foreach=True)
        return sum_to_mean * torch.clamp(self.config.clip_norm / (norm + _CLIP_EPS), max=1.0)

    def _objective_parameters(self) -> list[nn.Parameter]:
        """Parameters outside the model, which DDP does not wrap."""
        return [p for name, module in self.trained.items() if name != "model" for p in module.parameters()]

    def loop_state(self) -> LoopState:
        return {**super().loop_state(), "scaler": self.scaler.state_dict() if self.scaler is not None else None}

    def load_loop_state(self, state: LoopState) -> None:
        super().load_loop_state(state)
        if state["scaler"] is not None:
            self.scaler = make_scaler(self.config.precision, self.device, 1)
            self.scaler.load_state_dict(state["scaler"])


GUIDE = "docs/add-a-trainer.md has a complete example"


def load_trainer(name: str) -> type[SimpleTrainer[Any]]:
    """The trainer in a user's file or of an installed package; SimpleTrainer itself for an empty name."""
    if not name:
        return SimpleTrainer
    if name in lookup.TRAINERS.names():
        registered = lookup.TRAINERS.resolve(name)
        if isinstance(registered, type) and issubclass(registered, SimpleTrainer):
            return registered
        raise ConfigError(f"the trainer '{name}' is {registered!r}, not a subclass of SimpleTrainer", GUIDE)
    module = lookup.import_file(Path(name).resolve(), GUIDE)
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    found = [kind for kind in kinds if issubclass(kind, SimpleTrainer)]
    if len(found) != 1:
        names = ", ".join(kind.__name__ for kind in found) or "none"
        raise ConfigError(f"{name} must define one subclass of SimpleTrainer; found {names}", GUIDE)
    return found[0]


def trainer_checks(spec: Any) -> Iterator[Callable[[], object]]:
    """The user's trainer is imported before a run starts, so that a mistake in it costs nothing."""
    yield lambda: check_products(spec.device, [spec.training])
    if (
        spec.trainer in lookup.TRAINERS.names() or Path(spec.trainer).is_file()
    ):  # a missing file is reported by the check of the settings
        yield lambda: load_trainer(spec.trainer)


class RunningLoss:
    """Loss and its parts since the last log line, summed on the device so that adding does not synchronize."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, output: ObjectiveOutput) -> None:
        for name, value in {"loss": output.loss_sum.detach(), **output.parts}.items():
            # `clone` for the first one: with CUDA graphs the next step overwrites the memory of
            # this output.
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()
        self._count += output.count

    def pop_means(self, ranks: Ranks) -> tuple[float, dict[str, float]]:
        """Mean loss and mean parts over all ranks; resets the sums."""
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


def learning_rate_factor(schedule: str, fraction: float, warmup_share: float) -> float:
    """Factor on the peak rate at this fraction of the budget: rises to 1 over the warm-up, then follows the schedule.

    The argument is a fraction and not a step number, because the last step of a time or energy budget is not known in
    advance.
    """
    if fraction < warmup_share:
        return fraction / warmup_share
    rest = min(1.0, (fraction - warmup_share) / (1 - warmup_share))
    if schedule == "linear":
        return 1 - rest
    # Half a cosine from 1 to 0 (Loshchilov and Hutter, 2017, without restarts).
    return 1.0 if schedule == "constant" else 0.5 * (1 + math.cos(math.pi * rest))


class _PreparedBatch(NamedTuple):
    batch: Any
    copied: torch.cuda.Event | None


class Prefetcher(Generic[B]):
    """Prepares batches ahead of the step that needs them, in a thread and, on a GPU, a separate CUDA stream.

    `take(number)` returns the micro-batch of that number; the following ones, `stride` apart, are prepared meanwhile.
    Batches depend only on the position, so the queue is not part of a checkpoint: after a resume or a rewind it is
    dropped and refilled.
    """

    def __init__(self, source: BatchSource[B], device: torch.device, ahead: int, stride: int = 1) -> None:
        self._source, self._device, self._ahead, self._stride = source, device, ahead, stride
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="joulelab-input") if ahead else None
        self._queue: deque[tuple[int, Future[_PreparedBatch]]] = deque()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def take(self, number: int) -> B:
        if self._pool is None:
            return self._batch(number).to(self._device)
        # After a resume or a rewind the prepared batches are of another position.
        if not self._queue or self._queue[0][0] != number:
            self._drop()
        while len(self._queue) <= self._ahead:
            following = self._queue[-1][0] + self._stride if self._queue else number
            self._queue.append((following, self._pool.submit(self._prepare, following)))
        prepared = self._queue.popleft()[1].result()
        if prepared.copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(prepared.copied)
            for tensor in _cuda_tensors(vars(prepared.batch)):
                # The allocator must not reuse the memory for a later batch while a kernel of this stream reads it.
                tensor.record_stream(stream)
        batch: B = prepared.batch
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

    def _prepare(self, number: int) -> _PreparedBatch:
        batch = self._batch(number)
        if self._stream is None:
            return _PreparedBatch(batch.to(self._device), None)
        pin = getattr(batch, "pin_memory", None)
        with torch.cuda.stream(self._stream):
            # From page-locked memory the copy is asynchronous, in a separate stream, and overlaps
            # with the kernels of the current step.
            moved = (pin() if pin else batch).to(self._device)
            return _PreparedBatch(moved, self._stream.record_event())


def _cuda_tensors(value: object) -> Iterator[Tensor]:
    """Of a field of a batch: a tensor, or tensors in mappings, tuples and other batches."""
    if isinstance(value, Tensor):
        if value.is_cuda:
            yield value
        return
    if is_dataclass(value):
        value = vars(value)
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    for one in inner:
        yield from _cuda_tensors(one)
