"""Objectives and workloads: what a task passes to the training loop, and how transformers models are built.

An objective returns a summed loss and its count, not a mean, so that the gradient does not depend on how the data is
split into micro-batches and ranks. That holds for losses that are sums over tokens or samples, not for terms over a
whole batch: relation losses, KoLeo and BatchNorm statistics depend on which samples share a micro-batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from joulelab.data.batches import BatchSource, TrainingBatch
from joulelab.zoo.pretrained import import_transformers, load_pretrained, seeded_init
from joulelab.zoo.registry import PUBLISHED, WorkloadRequest, require_packages

PhaseMaker = Callable[[str], AbstractContextManager[None]]
B_contra = TypeVar("B_contra", bound=TrainingBatch, contravariant=True)


@dataclass(frozen=True)
class ObjectiveOutput:
    """Loss of one micro-batch."""

    loss_sum: Tensor
    count: int
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Summed terms of the loss by name, detached; logged as means."""


class Objective(Protocol[B_contra]):
    """Computes the loss of a batch. Every differentiated computation must go through `model(...)`, so that wrappers
    (DDP, torch.compile) see it."""

    def __call__(self, model: nn.Module, batch: B_contra, phase: PhaseMaker) -> ObjectiveOutput:
        """Loss of a batch; `phase("forward.teacher")` marks a named part of the forward pass."""

    def modules(self) -> Mapping[str, nn.Module]:
        """Further modules whose state belongs to the training (a connector, an EMA), by name."""

    def after_step(self, model: nn.Module) -> None:
        """Called after every optimizer step, for example to update an EMA of the weights."""


class PlainObjective:
    """An objective that is a single function, without further modules."""

    is_one_graph = True
    """Marks no phases, so model and loss can be compiled as one graph."""

    def __init__(self, loss: Callable[[nn.Module, Any], ObjectiveOutput]) -> None:
        self._loss = loss

    def __call__(self, model: nn.Module, batch: Any, phase: PhaseMaker) -> ObjectiveOutput:
        return self._loss(model, batch)

    def modules(self) -> Mapping[str, nn.Module]:
        return {}

    def after_step(self, model: nn.Module) -> None:
        pass


@dataclass(frozen=True)
class Workload:
    """A model ready to train, with its data and objective."""

    model: nn.Module
    objective: Objective[Any]
    batches: BatchSource[Any]
    validation: BatchSource[Any] | None = None
    """Held-out batches of the same kind."""
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """Choices made for the user, such as the tokenizer or a truncated dataset."""


def prepare(request: WorkloadRequest) -> Workload:
    """Build the workload on the CPU, with random weights from the seed or with the requested weights."""
    require_packages(request.entry)
    make = request.entry.prepare
    if isinstance(make, str):
        module, _, name = make.partition(":")
        make = getattr(importlib.import_module(module), name)
    return make(request)


def count_parameters(model: nn.Module) -> int:
    """Trainable parameters; a tensor shared by two layers counts once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def build_on_meta(make: Any) -> nn.Module:
    """Build on the meta device, without memory, to count parameters and FLOPs."""
    with torch.device("meta"):
        model: nn.Module = make()
    return model


def build(request: WorkloadRequest, **settings: Any) -> nn.Module:
    """The transformers model of the request; `settings` override those of the size."""
    kind: Any = getattr(import_transformers(), request.entry.architecture)
    if request.weights:
        place = request.size.hub_id if request.weights == PUBLISHED else request.weights
        return load_pretrained(kind, place).train()
    config = make_config(request, **settings)
    with seeded_init(request.seed):
        model: nn.Module = kind(config)
    return model.train()


def make_config(request: WorkloadRequest, **settings: Any) -> Any:
    kind: Any = getattr(import_transformers(), request.entry.architecture)
    return kind.config_class(**{**request.size.settings, **settings})
