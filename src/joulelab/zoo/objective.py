"""What a model's task hands to the loop: a batch in, a summed loss and its count out.

A sum and a count, not a mean: only then is the gradient the same however the data is split into micro-batches and
ranks. That holds for losses that are sums over tokens or samples. It does not hold for terms that look at a batch as a
whole: relation losses, KoLeo, and the statistics of BatchNorm depend on which samples meet in a micro-batch.
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
from joulelab.zoo.registry import WorkloadRequest, require_packages

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


# A model made ready to train: the module, its batches, its objective.


@dataclass(frozen=True)
class Workload:
    model: nn.Module
    objective: Objective[Any]
    batches: BatchSource[Any]
    validation: BatchSource[Any] | None = None
    """Held-out batches of the same kind."""
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """What was chosen for the user and may matter to them: the tokenizer, a set that was cut short."""


def prepare(request: WorkloadRequest) -> Workload:
    """The model on the CPU, its weights drawn from the request's seed or loaded where weights were named."""
    require_packages(request.entry)
    make = request.entry.prepare
    if isinstance(make, str):
        module, _, name = make.partition(":")
        make = getattr(importlib.import_module(module), name)
    return make(request)


def count_parameters(model: nn.Module) -> int:
    """Numbers that training changes; a tensor that two layers share counts once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def build_on_meta(make: Any) -> nn.Module:
    """Build without memory, to count and to cost on paper."""
    with torch.device("meta"):
        model: nn.Module = make()
    return model


# Models of transformers by class name: from a configuration and a seed, or from published weights.


PUBLISHED = "published"


def build(request: WorkloadRequest, **settings: Any) -> nn.Module:
    """The request's architecture in the request's size, ready to train; `settings` go over those of the size."""
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
