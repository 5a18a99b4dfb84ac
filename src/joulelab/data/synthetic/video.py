"""Clips of a scene that drifts by, made on the device: what is hidden follows from the scene and from how it moves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from joulelab import lookup
from joulelab.data.batch_source import Rows, TensorBatch
from joulelab.data.splits import SYNTHETIC_SIZES, Split
from joulelab.data.synthetic.images import FINE_NOISE, generator_on

# shapes: B clips, T frames, C colours, H x W pixels
COARSE_SIDE = 6
SCENE_COLOUR = (1.0, -0.5, 0.5)
"""What all clips have in common; a clip's own pattern varies around it."""
WINDOW = 0.5
"""Share of the pattern's side that a frame shows; the rest is where it can drift to."""


class SyntheticClips:
    """Pattern, path and noise of a clip come from the draw of its batch."""

    def __init__(self, frames: int, side: int, split: Split) -> None:
        if split.name not in SYNTHETIC_SIZES:
            raise lookup.unknown("split of the synthetic clips", split.name, SYNTHETIC_SIZES)
        self.rows = split.rows(SYNTHETIC_SIZES[split.name])
        self._frames, self._side = frames, side
        self._split_number = list(SYNTHETIC_SIZES).index(split.name)

    def batch(self, rows: Rows, draw: int) -> TensorBatch:
        film = partial(_film, frames=self._frames, side=self._side, seed=draw + self._split_number)
        return TensorBatch({"rows": torch.from_numpy(rows)}, samples=len(rows), count=len(rows), expand=film)


def _film(tensors: Mapping[str, Tensor], frames: int, side: int, seed: int) -> Mapping[str, Tensor]:
    rows = tensors["rows"]
    return {"clips": film(len(rows), frames, side, generator_on(rows.device, seed))}


def film(clips: int, frames: int, side: int, generator: torch.Generator) -> Tensor:
    """[B, T, C, H, W]: a window that slides in a straight line over a pattern larger than itself, under fine noise."""
    device = generator.device
    colour = torch.tensor(SCENE_COLOUR, device=device).view(3, 1, 1)
    patterns_BCHW = colour + torch.randn((clips, 3, COARSE_SIDE, COARSE_SIDE), generator=generator, device=device)
    ends_2B2 = (torch.rand((2, clips, 2), generator=generator, device=device) * 2 - 1) * (1 - WINDOW)
    times_T = torch.linspace(0, 1, frames, device=device)
    middles_BT2 = torch.lerp(ends_2B2[0, :, None], ends_2B2[1, :, None], times_T[None, :, None])
    windows = torch.zeros((clips, frames, 2, 3), device=device)
    windows[..., 0, 0] = windows[..., 1, 1] = WINDOW
    windows[..., 2] = middles_BT2
    grid = functional.affine_grid(windows.flatten(0, 1), [clips * frames, 3, side, side], align_corners=False)
    shown = functional.grid_sample(
        patterns_BCHW.repeat_interleave(frames, dim=0), grid, padding_mode="border", align_corners=False
    )
    noise = torch.randn(shown.shape, generator=generator, device=device)
    noisy: Tensor = shown + FINE_NOISE * noise
    return noisy.view(clips, frames, 3, side, side)
