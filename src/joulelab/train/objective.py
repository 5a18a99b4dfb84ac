"""What a pipeline hands to the loop: a batch in, a summed loss and its count out.

A sum and a count, not a mean: only then is the gradient the same however the data is split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

PhaseMaker = Callable[[str], AbstractContextManager[None]]


class TrainingBatch(Protocol):
    @property
    def samples(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def to(self, device: torch.device) -> Self: ...


B_co = TypeVar("B_co", bound=TrainingBatch, covariant=True)
B_contra = TypeVar("B_contra", bound=TrainingBatch, contravariant=True)


class BatchSource(Protocol[B_co]):
    """Batches by position, so that a run resumes at the exact batch with no state but (epoch, index)."""

    @property
    def batches_per_epoch(self) -> int: ...

    def at(self, epoch: int, index: int) -> B_co: ...


@dataclass(frozen=True)
class ObjectiveOutput:
    loss_sum: Tensor
    count: int
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Summed terms of the loss by name, detached; logged as means."""


class Objective(Protocol[B_contra]):
    def __call__(self, model: nn.Module, batch: B_contra, phase: PhaseMaker) -> ObjectiveOutput:
        """The loss of a batch; `phase("forward.teacher")` marks a named part of the forward pass."""

    def modules(self) -> Mapping[str, nn.Module]:
        """Further modules that train along (a connector, say), by name."""

    def after_step(self, model: nn.Module) -> None:
        """Called after every optimiser step; an EMA of the weights lives here."""
