"""A model made ready to train: the module, its batches, its objective."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from joulelab.data.batches import BatchSource
from joulelab.zoo.objective import Objective
from joulelab.zoo.registry import require_packages
from joulelab.zoo.request import WorkloadRequest


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


def on_meta(make: Any) -> nn.Module:
    """Build without memory, to count and to cost on paper."""
    with torch.device("meta"):
        model: nn.Module = make()
    return model
