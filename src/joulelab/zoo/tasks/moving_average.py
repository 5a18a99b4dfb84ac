"""A copy of a module that follows it slowly: the teacher of self-distillation, the target encoder of V-JEPA."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class MovingAverage:
    """After every step the copy keeps `momentum` of its weights and takes the rest from the module it follows."""

    def __init__(self, followed: nn.Module, momentum: float) -> None:
        # The module itself, not what the loop calls: DDP and compilation wrap it and leave its tensors where they are.
        self._followed = followed
        self._momentum = momentum
        self.module = copy.deepcopy(followed).requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        _give_back_shards(self.module)
        ours: list[Tensor] = list(self.module.parameters())
        theirs: list[Tensor] = list(self._followed.parameters())
        torch._foreach_lerp_(ours, theirs, 1 - self._momentum)


def _give_back_shards(module: nn.Module) -> None:
    """FSDP leaves a module's weights gathered until its backward pass, which a copy that is not trained never has."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
