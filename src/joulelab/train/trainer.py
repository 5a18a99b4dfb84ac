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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from joulelab.data.batches import BatchSource, TrainingBatch
from joulelab.errors import EndedBySignal, NonFiniteLoss
from joulelab.train.budget import Budget, EarlyStopping
from joulelab.train.checkpoint import Heavy, Light
from joulelab.train.config import TrainingConfig
from joulelab.train.position import Position
from joulelab.train.precision import matrix_products
from joulelab.train.prefetch import Prefetcher
from joulelab.train.schedule import rate_factor
from joulelab.train.stats.hooks import TrainerStats
from joulelab.train.surroundings import StepReport, Surroundings
from joulelab.train.tally import Tally
from joulelab.zoo.objective import Objective, ObjectiveOutput

B = TypeVar("B", bound=TrainingBatch)


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
        self.objective = objective
        self.config = config
        self.stats = stats
        self.around = surroundings or Surroundings()
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
        self._tally = Tally(self.device)
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
        with matrix_products(self.config.precision):
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
    def _heavy(self) -> Heavy:
        return Heavy(self.trained, self.optimizer)

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

    def light_state(self) -> Light:
        return {
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "tally": self._tally.state(),
            "budget": self.budget.state(),
            "early_stopping": self.early_stopping.state(),
        }

    def load_light_state(self, light: Light) -> None:
        torch.set_rng_state(light["rng"].cpu())
        if light["cuda_rng"] is not None:
            torch.cuda.set_rng_state(light["cuda_rng"].cpu(), self.device)
        self._tally.load_state(light["tally"])
        self.budget.load_state(light["budget"])
        self.early_stopping.load_state(light["early_stopping"])

    def _set_learning_rate(self, tokens: int) -> None:
        """For the step under way, of so many tokens."""
        fraction = self.budget.fraction_amid(self.position, tokens)
        factor = rate_factor(self.config.schedule, fraction, self.config.warmup_share)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * factor

    def _due(self, every: int | None) -> bool:
        return every is not None and (self.position.step % every == 0 or self.over)
