"""Models that nobody publishes weights of: always drawn from the request's seed."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from joulelab.errors import ConfigError
from joulelab.zoo.pretrained import drawn_from
from joulelab.zoo.request import WorkloadRequest


def drawn(request: WorkloadRequest, make: Callable[[], nn.Module]) -> nn.Module:
    if request.weights:
        raise ConfigError(
            f"{request.entry.name} cannot start from '{request.weights}'",
            "it has no published weights; leave `weights` out and they are drawn from the seed",
        )
    with drawn_from(request.seed):
        return make().train()
