"""A model made ready to train: the module, its batches, its objective."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from joulelab import lookup
from joulelab.data.batch_source import BatchSource
from joulelab.data.splits import Split, parse_split
from joulelab.errors import ConfigError, DependencyMissing
from joulelab.zoo.entry import Size, ZooEntry
from joulelab.zoo.objective import Objective

SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class WorkloadRequest:
    """What a user asks of a model of the zoo."""

    entry: ZooEntry
    size_name: str = ""
    batch_size: int = 0
    seed: int = 0
    dataset: str = SYNTHETIC
    """`synthetic`, a path or a hub id."""
    split: str = "train"
    weights: str = ""
    """A folder, hub id or `published` to start from; empty: drawn from the seed."""
    asked_shape: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for known, asked, what in (
            (self.entry.sizes, [self.size_name] if self.size_name else [], "size"),
            (self.size.shape if self.size_name in ("", *self.entry.sizes) else {}, self.asked_shape, "input dimension"),
        ):
            for name in asked:
                if name not in known:
                    raise lookup.unknown(f"{what} of {self.entry.name}", name, known)

    @property
    def size(self) -> Size:
        return self.entry.sizes[self.size_name or self.entry.default_size]

    @property
    def shape(self) -> dict[str, int]:
        return {**self.size.shape, **self.asked_shape}

    @property
    def rows_per_batch(self) -> int:
        return self.batch_size or self.size.batch_size

    @property
    def wanted_split(self) -> Split:
        return parse_split(self.split)


@dataclass(frozen=True)
class Workload:
    model: nn.Module
    objective: Objective[Any]
    batches: BatchSource[Any]
    validation: BatchSource[Any] | None = None
    """Held-out batches of the same kind."""


def prepare(request: WorkloadRequest) -> Workload:
    """The model on the CPU, its weights drawn from the request's seed or loaded where weights were named."""
    require_packages(request.entry)
    make = request.entry.prepare
    if isinstance(make, str):
        module, _, name = make.partition(":")
        make = getattr(importlib.import_module(module), name)
    return make(request)


def require_packages(entry: ZooEntry) -> None:
    absent = [name for name in entry.needs if find_spec(name) is None]
    if absent:
        raise DependencyMissing(
            f"{entry.name} needs {' and '.join(absent)}, not installed here", f'pip install "joulelab[{entry.extra}]"'
        )


def count_parameters(model: nn.Module) -> int:
    """Numbers that training changes; a tensor that two layers share counts once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def refuse_dataset(request: WorkloadRequest) -> ConfigError:
    return ConfigError(
        f"{request.entry.name} cannot read the dataset '{request.dataset}'",
        f"it takes `synthetic`{' or ' + request.entry.dataset if request.entry.dataset else ''}",
    )


def on_meta(make: Any) -> nn.Module:
    """Build without memory, to count and to cost on paper."""
    with torch.device("meta"):
        model: nn.Module = make()
    return model
