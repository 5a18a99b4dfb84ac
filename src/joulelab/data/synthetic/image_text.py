"""Images and what there is to say about them: fields of colour, and their names in reading order.

The answer cannot be guessed from the question; whoever does not look at the image is left with one of eight colours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from joulelab.data.batch_source import Rows
from joulelab.data.synthetic.images import generator_on

# shapes: B images, A answer tokens, K fields, C colours of a pixel, H x W pixels
Ids = NDArray[np.int64]
COLOURS = 8  # black, white and what lies between: red, green and blue are each there or not
NOISE = 0.3
_LANGUAGE_SEED = 597  # the words are the same in every run; only what is seen varies


class SyntheticImageText:
    """The fields of image `row` are a pure function of (seed, row)."""

    def __init__(self, vocabulary: range, prompt_tokens: int, answer_tokens: int, seed: int) -> None:
        random = np.random.default_rng(_LANGUAGE_SEED)
        words = vocabulary.start + random.choice(len(vocabulary), size=COLOURS + prompt_tokens, replace=False)
        self.names, self.prompt = words[:COLOURS].astype(np.int64), words[COLOURS:].astype(np.int64)
        """The word for each colour, and the question, which is always the same."""
        self._answer_tokens, self._seed = answer_tokens, seed
        self.fields_a_side = math.ceil(math.sqrt(answer_tokens))

    def colours(self, rows: Rows) -> Ids:
        """[B, K], row by row of the image."""
        draws = [np.random.default_rng([self._seed, int(row)]) for row in rows]
        return np.stack([random.integers(COLOURS, size=self.fields_a_side**2) for random in draws])

    def answers(self, colours_BK: Ids) -> Ids:
        """[B, A]: the names of the fields, as many as fit."""
        return self.names[colours_BK[:, : self._answer_tokens]]


def paint_fields(tensors: Mapping[str, Tensor], side: int, seed: int) -> Mapping[str, Tensor]:
    """`colours` become `pixels` [B, C, H, W]; the rest stays."""
    colours_BK = tensors["colours"]
    bits = torch.arange(3, device=colours_BK.device)
    rgb_BCK = (colours_BK[:, None] >> bits[:, None] & 1) * 2.0 - 1.0
    fields = math.isqrt(colours_BK.shape[1])
    coarse_BCHW = rgb_BCK.view(*rgb_BCK.shape[:2], fields, fields)
    plain_BCHW = functional.interpolate(coarse_BCHW, size=(side, side), mode="nearest")
    generator = generator_on(colours_BK.device, seed)
    noise_BCHW = torch.randn(plain_BCHW.shape, generator=generator, device=colours_BK.device)
    others = {name: value for name, value in tensors.items() if name != "colours"}
    return {**others, "pixels": noise_BCHW.mul_(NOISE).add_(plain_BCHW)}
