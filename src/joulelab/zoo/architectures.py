"""Models of transformers by class name: from a configuration and a seed, or from published weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from joulelab.zoo.pretrained import drawn_from, explained_load, import_transformers
from joulelab.zoo.request import WorkloadRequest

PUBLISHED = "published"


def build(request: WorkloadRequest, **settings: Any) -> nn.Module:
    """The request's architecture in the request's size, ready to train; `settings` go over those of the size."""
    kind: Any = getattr(import_transformers(), request.entry.architecture)
    if request.weights:
        place = request.size.hub_id if request.weights == PUBLISHED else request.weights
        return explained_load(kind, place).train()
    config = make_config(request, **settings)
    with drawn_from(request.seed):
        model: nn.Module = kind(config)
    return model.train()


def make_config(request: WorkloadRequest, **settings: Any) -> Any:
    kind: Any = getattr(import_transformers(), request.entry.architecture)
    return kind.config_class(**{**request.size.settings, **settings})
