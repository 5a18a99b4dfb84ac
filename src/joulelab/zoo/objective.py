"""What a model's task hands to the loop: a batch in, a summed loss and its count out.

A sum and a count, not a mean: only then is the gradient the same however the data is split into micro-batches and
ranks. That holds for losses that are sums over tokens or samples. It does not hold for terms that look at a batch as a
whole: relation losses, KoLeo, and the statistics of BatchNorm depend on which samples meet in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from joulelab.data.batches import TrainingBatch

PhaseMaker = Callable[[str], AbstractContextManager[None]]
B_contra = TypeVar("B_contra", bound=TrainingBatch, contravariant=True)


@dataclass(frozen=True)
class ObjectiveOutput:
    loss_sum: Tensor
    count: int
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Summed terms of the loss by name, detached; logged as means."""


class Objective(Protocol[B_contra]):
    """What is differentiated goes through `model(...)` itself, so that a wrapper around the model (DDP, a compiled
    graph) sees every call."""

    def __call__(self, model: nn.Module, batch: B_contra, phase: PhaseMaker) -> ObjectiveOutput:
        """The loss of a batch; `phase("forward.teacher")` marks a named part of the forward pass."""

    def modules(self) -> Mapping[str, nn.Module]:
        """Further modules whose state belongs to the training (a connector, an EMA), by name."""

    def after_step(self, model: nn.Module) -> None:
        """Called after every optimiser step; an EMA of the weights lives here."""


class PlainObjective:
    """An objective of one function, with nothing that trains along and nothing to do after a step."""

    is_one_graph = True
    """It marks no phases, so model and loss can be compiled together."""

    def __init__(self, loss: Callable[[nn.Module, Any], ObjectiveOutput]) -> None:
        self._loss = loss

    def __call__(self, model: nn.Module, batch: Any, phase: PhaseMaker) -> ObjectiveOutput:
        return self._loss(model, batch)

    def modules(self) -> Mapping[str, nn.Module]:
        return {}

    def after_step(self, model: nn.Module) -> None:
        pass
