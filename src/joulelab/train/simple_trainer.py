"""How a micro-batch goes forward and backward and how the optimiser steps: on one device, or on many by DDP or FSDP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from joulelab.data.batches import TrainingBatch
from joulelab.train import parallel
from joulelab.train.blocks import checkpoint_activations, repeated_blocks
from joulelab.train.checkpoint import Light
from joulelab.train.compiling import BLOCKS, OFF, compile_in_place, mode_of
from joulelab.train.optimisers import make_optimizer
from joulelab.train.precision import autocast, make_scaler
from joulelab.train.trainer import Trainer
from joulelab.zoo.objective import ObjectiveOutput

B = TypeVar("B", bound=TrainingBatch)
_NEVER_ZERO = 1e-6


class SimpleTrainer(Trainer[B]):
    def set_up(self) -> torch.optim.Optimizer:
        self.parallel = parallel.kind_of(self.config, self.ranks)
        self.scaler: Any = None
        self.last_of_step = True
        if self.config.activation_checkpointing:
            checkpoint_activations(self.model)
        if self.parallel == "fsdp":
            from joulelab.train.shards import shard

            shard(self.trained.values())
        self.called = parallel.copy_on_ranks(self.model, self.device) if self.parallel == "ddp" else self.model
        self._compute = self._computation()
        return make_optimizer(self.trained.parameters(), self.config)

    def _computation(self) -> Callable[[B], ObjectiveOutput]:
        """The objective over the model, compiled where asked: as one graph where it is one, else the model alone, or
        only its blocks."""
        objective, called = self.objective, self.called
        setting, mode = self.config.compile, mode_of(self.config.compile)
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
        parallel.share_gradients(self.called, now=self.last_of_step)
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
        return of_mean * torch.clamp(self.config.clip_norm / (length + _NEVER_ZERO), max=1.0)

    def _beside_the_model(self) -> list[nn.Parameter]:
        return [p for name, module in self.trained.items() if name != "model" for p in module.parameters()]

    def light_state(self) -> Light:
        return {**super().light_state(), "scaler": self.scaler.state_dict() if self.scaler is not None else None}

    def load_light_state(self, light: Light) -> None:
        super().load_light_state(light)
        if light["scaler"] is not None:
            self.scaler = make_scaler(self.config.precision, self.device, 1)
            self.scaler.load_state_dict(light["scaler"])
