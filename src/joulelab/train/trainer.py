"""The training loop: one story, top to bottom, for teachers, students and every model of the zoo.

    train: resume -> (step -> log -> save or stop)* -> done
    step:  draw micro-batches -> forward -> backward, each -> one optimiser step

Gradients of summed losses are accumulated and divided by the true count once per step, so that every split into
micro-batches gives the same gradient. The loss stays on the device between log lines: looking at it costs a wait.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from joulelab.data.batch_source import BatchSource, TrainingBatch
from joulelab.errors import EndedBySignal, NonFiniteLoss
from joulelab.train.checkpoint import CheckpointFolder, Position
from joulelab.train.config import TrainingConfig
from joulelab.train.schedule import linear_with_warmup
from joulelab.train.stats.hooks import TrainerStats
from joulelab.zoo.objective import Objective, ObjectiveOutput, PhaseMaker

B = TypeVar("B", bound=TrainingBatch)


@dataclass(frozen=True)
class StepReport:
    """What the loop tells its surroundings every `log_every_steps` steps."""

    position: Position
    total_steps: int
    loss: float
    parts: dict[str, float]
    learning_rate: float


@dataclass(frozen=True)
class Surroundings:
    """What the loop needs from the run around it; the defaults make it work alone."""

    checkpoints: CheckpointFolder | None = None
    phase: PhaseMaker = lambda name: torch.autograd.profiler.record_function(name)
    check_stop: Callable[[], None] = lambda: None
    report: Callable[[StepReport], None] = lambda report: None
    advance: Callable[[Position], None] = lambda position: None


class Trainer(ABC, Generic[B]):
    """The loop. A trainer says how one micro-batch goes forward and backward and how the optimiser steps."""

    def __init__(
        self,
        model: nn.Module,
        batches: BatchSource[B],
        objective: Objective[B],
        config: TrainingConfig,
        stats: TrainerStats,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.model = model
        self.batches = batches
        self.objective = objective
        self.config = config
        self.stats = stats
        self.around = surroundings or Surroundings()
        self.device = next(model.parameters()).device
        self.trained = nn.ModuleDict({"model": model, **objective.modules()})
        self.optimizer = self.make_optimizer()
        self.position = Position()
        self.total_steps = self._count_steps()
        self._tally = _Tally(self.device)

    @abstractmethod
    def forward(self, batch: B) -> ObjectiveOutput: ...

    @abstractmethod
    def backward(self, output: ObjectiveOutput) -> None: ...

    @abstractmethod
    def optimizer_step(self, count: int) -> None: ...

    @abstractmethod
    def make_optimizer(self) -> torch.optim.Optimizer: ...

    def train(self) -> float:
        """Train to the end of the budget; the mean loss of the last stretch of steps."""
        self.resume()
        self.trained.train()
        loss = math.nan
        self.stats.start_train()
        while self.position.step < self.total_steps:
            self.step()
            if self._due(self.config.log_every_steps):
                loss = self.log()
            if self._due(self.config.checkpoint_every_steps):
                self.save()
            self._stop_if_asked()
        self.stats.stop_train()
        return loss

    def step(self) -> None:
        """One optimiser step over `accumulate` micro-batches."""
        self.stats.start_step()
        self._set_learning_rate()
        count, samples, tokens = 0, 0, 0
        for _ in range(self.config.accumulate):
            self.stats.start_input()
            batch = self._next_batch()
            self.stats.stop_input()
            self.stats.start_forward()
            output = self.forward(batch)
            self.stats.stop_forward()
            self.stats.start_backward()
            self.backward(output)
            self.stats.stop_backward()
            self._tally.add(output)
            count, samples, tokens = count + output.count, samples + batch.samples, tokens + batch.tokens
        self.stats.start_optimiser_step()
        self.optimizer_step(count)
        self.objective.after_step(self.model)
        self.stats.stop_optimiser_step()
        self._advance(samples, tokens)
        self.stats.stop_step()
        self.stats.log_step(self.position.step)

    def log(self) -> float:
        """Look at the losses since the last look; a loss that is not finite ends the run here."""
        loss, parts = self._tally.take()
        self._require_finite(loss)
        self.stats.log_loss(loss)
        rate = self.optimizer.param_groups[0]["lr"]
        self.around.report(StepReport(self.position, self.total_steps, loss, parts, rate))
        return loss

    def save(self) -> None:
        if self.around.checkpoints is None:
            return
        self._require_finite(self._tally.peek())  # a broken state must not become what a resume starts from
        self.stats.start_checkpoint()
        self.around.checkpoints.save(self.position, self.state())
        self.stats.stop_checkpoint()

    def _require_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise NonFiniteLoss(
                f"the loss became {loss} by step {self.position.step}",
                "lower the learning rate, or look at the data of the last steps; the joules spent are recorded",
            )

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        found = self.around.checkpoints.latest() if self.around.checkpoints else None
        if found is not None:
            self.position, state = found
            self.load_state(state)
            self.around.advance(self.position)

    def state(self) -> dict[str, Any]:
        return {
            "trained": self.trained.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
            "tally": self._tally.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.trained.load_state_dict(state["trained"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"]:
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        self._tally.load_state(state["tally"])

    def _count_steps(self) -> int:
        steps = math.ceil(self.config.epochs * self.batches.batches_per_epoch / self.config.accumulate)
        return min(steps, self.config.max_steps or steps)

    def _next_batch(self) -> B:
        position = self.position
        batch = self.batches.at(position.epoch, position.index).to(self.device)
        epoch, index = position.epoch, position.index + 1
        if index == self.batches.batches_per_epoch:
            epoch, index = epoch + 1, 0
        self.position = Position(epoch, index, position.step, position.samples, position.tokens)
        return batch

    def _advance(self, samples: int, tokens: int) -> None:
        now = self.position
        self.position = Position(now.epoch, now.index, now.step + 1, now.samples + samples, now.tokens + tokens)
        self.around.advance(self.position)

    def _set_learning_rate(self) -> None:
        # the middle of the step: the first one has a rate above 0, and so has the last
        fraction = (self.position.step + 0.5) / self.total_steps
        factor = linear_with_warmup(fraction, self.config.warmup_share)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * factor

    def _due(self, every: int) -> bool:
        return self.position.step % every == 0 or self.position.step == self.total_steps

    def _stop_if_asked(self) -> None:
        try:
            self.around.check_stop()
        except EndedBySignal:
            self.save()
            raise


class _Tally:
    """Loss and its parts since the last look, summed on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, output: ObjectiveOutput) -> None:
        for name, value in {"loss": output.loss_sum.detach(), **output.parts}.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()
        self._count += output.count

    def take(self) -> tuple[float, dict[str, float]]:
        means = {name: float(value) / max(1, self._count) for name, value in self._sums.items()}
        self._sums, self._count = {}, 0
        return means.pop("loss", math.nan), means

    def peek(self) -> float:
        return float(self._sums["loss"]) if self._sums else 0.0

    def state(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "count": self._count}

    def load_state(self, state: dict[str, Any]) -> None:
        self._sums = {name: value.to(self._device) for name, value in state["sums"].items()}
        self._count = state["count"]


class SimpleTrainer(Trainer[B]):
    """One device, full precision, AdamW."""

    def forward(self, batch: B) -> ObjectiveOutput:
        return self.objective(self.model, batch, self.around.phase)

    def backward(self, output: ObjectiveOutput) -> None:
        output.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch leaves Tensor.backward untyped

    def optimizer_step(self, count: int) -> None:
        gradients = [p.grad for p in self.trained.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, float(max(1, count)))
        nn.utils.clip_grad_norm_(self.trained.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def make_optimizer(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.trained.parameters() if p.requires_grad and p.ndim >= 2]
        others = [p for p in self.trained.parameters() if p.requires_grad and p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": self.config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.config.learning_rate, fused=True)
