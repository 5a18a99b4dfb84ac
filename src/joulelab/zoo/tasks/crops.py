"""Random crops of a batch of images, cut on the device they lie on: many crops of an image cost the host nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

# shapes: B images, R crops (the first crop of every image, then the second of every image, ...), C colours
GLOBAL_AREA, LOCAL_AREA = (0.32, 1.0), (0.05, 0.32)  # shares of the image, as DINOv2 draws them
RATIO = (3 / 4, 4 / 3)
JITTER = 0.4
"""Largest change of contrast and brightness. DINOv2 also shifts hues, blurs and solarises."""


def random_crops(
    images_BCHW: Tensor, crops: int, side: int, area: tuple[float, float], generator: torch.Generator
) -> Tensor:
    """[R, C, side, side]: boxes of the image, mirrored or not, with contrast and brightness changed."""
    rows = crops * len(images_BCHW)
    windows = _random_windows(rows, area, generator)
    grid = functional.affine_grid(windows, [rows, 3, side, side], align_corners=False)
    seen = functional.grid_sample(images_BCHW.repeat(crops, 1, 1, 1), grid, padding_mode="border", align_corners=False)
    contrast, brightness = _uniform((2, rows, 1, 1, 1), -JITTER, JITTER, generator)
    changed: Tensor = seen * (1 + contrast) + brightness
    return changed


def _random_windows(rows: int, area: tuple[float, float], generator: torch.Generator) -> Tensor:
    """[R, 2, 3]: half the width and height of each box and its middle, in the -1 to 1 of `affine_grid`."""
    shares = _uniform((rows,), *area, generator)
    stretch = _uniform((rows,), math.log(RATIO[0]) / 2, math.log(RATIO[1]) / 2, generator).exp()
    extents_2R = torch.stack([shares.sqrt() * stretch, shares.sqrt() / stretch]).clamp(max=1.0)
    middles_2R = _uniform((2, rows), -1.0, 1.0, generator) * (1 - extents_2R)
    mirrored = _uniform((rows,), -1.0, 1.0, generator).sign()
    windows = torch.zeros((rows, 2, 3), device=generator.device)
    windows[:, 0, 0], windows[:, 1, 1] = extents_2R[0] * mirrored, extents_2R[1]
    windows[:, :, 2] = middles_2R.T
    return windows


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator, device=generator.device)
