"""Masks over image patches, moving-average teachers, and chained batch expansion, for the self-supervised tasks.

Masked patches are contiguous and their number is fixed: a number that varies between batches would recompile the graph
or synchronize with the device. Patches are ranked by smooth noise, and the first ones are masked, which gives blobs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from joulelab.data.batches import TensorBatch

# shapes: B images, P patches of a frame, F frames of patches in time, K patches chosen


def ranked_patches(images: int, grid: int, blobs: int, generator: torch.Generator) -> Tensor:
    """[B, P]: the patches of a grid x grid frame in a random order in which neighbors have similar ranks."""
    noise = torch.rand((images, 1, blobs, blobs), generator=generator, device=generator.device)
    # Coarse noise enlarged to the grid is smooth, so its lowest values form contiguous regions,
    # whose number the size of the coarse grid sets.
    smooth = functional.interpolate(noise, size=(grid, grid), mode="bicubic", align_corners=True)
    return smooth.flatten(1).argsort(dim=1)


def repeat_over_time(patches_BK: Tensor, frames: int, patches_per_frame: int) -> Tensor:
    """[B, F * K]: the same patches in every frame, as indices into the clip."""
    starts_F = torch.arange(frames, device=patches_BK.device) * patches_per_frame
    return (starts_F[None, :, None] + patches_BK[:, None, :]).flatten(1)


def gather_tokens(tokens_BND: Tensor, places_BK: Tensor) -> Tensor:
    """[B, K, D]: the tokens at these places of each row."""
    return tokens_BND.gather(1, places_BK.unsqueeze(-1).expand(-1, -1, tokens_BND.shape[-1]))


class MovingAverage:
    """Exponential moving average of a module's weights: the teacher of DINOv2, the target encoder of V-JEPA."""

    def __init__(self, followed: nn.Module, momentum: float) -> None:
        # The module itself, not the wrapper that the loop calls: DDP and compilation wrap it without copying its
        # tensors.
        self._followed = followed
        self._momentum = momentum
        self.module = copy.deepcopy(followed).requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        _reshard(self.module)
        ours: list[Tensor] = list(self.module.parameters())
        theirs: list[Tensor] = list(self._followed.parameters())
        # ours + (1 - m) (theirs - ours) = m ours + (1 - m) theirs, for all tensors in one kernel.
        torch._foreach_lerp_(ours, theirs, 1 - self._momentum)


def _reshard(module: nn.Module) -> None:
    """FSDP keeps a module's weights gathered until its backward pass, which a copy that is not trained never has."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


Tensors = Mapping[str, Tensor]


def chain_expand(batch: TensorBatch, more: Callable[[Tensors], Tensors]) -> TensorBatch:
    """The batch with one more transform after those that it already has."""
    first = batch.expand
    return replace(batch, expand=more if first is None else lambda tensors: more(first(tensors)))
