"""Images with something to learn, made on the device that reads them.

Every class has a coarse pattern; an image is that pattern, varied coarsely, under fine noise. The host only says which
classes and which draw: at thousands of images a second, making or carrying pixels there would be what is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from joulelab import lookup
from joulelab.data.batch_source import Rows, TensorBatch
from joulelab.data.splits import SYNTHETIC_SIZES, Split

# shapes: B images, C colours, H x W pixels
COARSE_SIDE = 4
COARSE_NOISE = 0.3
FINE_NOISE = 0.5
_PATTERN_SEED = 597  # the classes look the same in every run; only the images of them vary


class SyntheticImages:
    """Labels follow from the rows; the noise is drawn anew for every batch, from its draw alone."""

    def __init__(self, classes: int, side: int, split: Split) -> None:
        if split.name not in SYNTHETIC_SIZES:
            raise lookup.unknown("split of the synthetic images", split.name, SYNTHETIC_SIZES)
        self.classes, self._side = classes, side
        self.rows = split.rows(SYNTHETIC_SIZES[split.name])
        self._split_number = list(SYNTHETIC_SIZES).index(split.name)
        shape = (classes, 3, COARSE_SIDE, COARSE_SIDE)
        self._patterns = np.random.default_rng(_PATTERN_SEED).standard_normal(shape, dtype=np.float32)

    def batch(self, rows: Rows, draw: int) -> TensorBatch:
        labels = rows % self.classes
        tensors = {"labels": torch.from_numpy(labels), "patterns": torch.from_numpy(self._patterns[labels])}
        paint = partial(_paint, side=self._side, seed=draw + self._split_number)
        return TensorBatch(tensors, samples=len(rows), count=len(rows), expand=paint)


def _paint(tensors: Mapping[str, Tensor], side: int, seed: int) -> Mapping[str, Tensor]:
    pixels_BCHW = paint(tensors["patterns"], side, generator_on(tensors["patterns"].device, seed))
    return {"labels": tensors["labels"], "pixels": pixels_BCHW}


def paint(patterns: Tensor, side: int, generator: torch.Generator) -> Tensor:
    device = patterns.device
    varied = patterns + COARSE_NOISE * torch.randn(patterns.shape, generator=generator, device=device)
    coarse_BCHW = functional.interpolate(varied, size=(side, side), mode="bilinear")
    # drawn with the channels last, as the convolutions of tensor cores read them: no copy is needed to get there
    fine_BHWC = torch.randn((len(patterns), side, side, 3), generator=generator, device=device)
    return fine_BHWC.permute(0, 3, 1, 2).mul_(FINE_NOISE).add_(coarse_BCHW)


def generator_on(device: torch.device, seed: int) -> torch.Generator:
    """Random numbers of a batch's own: the generators that training draws from stay where they are."""
    return torch.Generator(device).manual_seed(seed)
