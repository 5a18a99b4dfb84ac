"""Which patches are hidden: contiguous ones, always the same number of them.

A number that changes from batch to batch would make a compiled graph anew, or the host wait for the device. So patches
are ranked by smooth noise, and the first so many are hidden: they lie together in blobs, and their number is fixed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# shapes: B images, P patches of a frame, F frames of patches in time, K patches chosen


def ranked_patches(images: int, grid: int, blobs: int, generator: torch.Generator) -> Tensor:
    """[B, P]: the patches of a grid x grid frame, neighbours near each other in rank."""
    noise = torch.rand((images, 1, blobs, blobs), generator=generator, device=generator.device)
    smooth = functional.interpolate(noise, size=(grid, grid), mode="bicubic", align_corners=True)
    return smooth.flatten(1).argsort(dim=1)


def through_time(patches_BK: Tensor, frames: int, patches_per_frame: int) -> Tensor:
    """[B, F * K]: the same patches in every frame, numbered through the clip."""
    starts_F = torch.arange(frames, device=patches_BK.device) * patches_per_frame
    return (starts_F[None, :, None] + patches_BK[:, None, :]).flatten(1)


def pick(tokens_BND: Tensor, places_BK: Tensor) -> Tensor:
    """[B, K, D]: the tokens at these places of each row."""
    return tokens_BND.gather(1, places_BK.unsqueeze(-1).expand(-1, -1, tokens_BND.shape[-1]))
