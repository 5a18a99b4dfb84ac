"""Which part of a picture is shown: a random one to train on, the middle to validate on. Pure numbers, no pixels."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

# The habits of ImageNet training: https://arxiv.org/abs/1409.4842 and torchvision's references
AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
CENTRE_SHARE = 7 / 8  # 224 out of 256
_TRIES = 10


class Box(NamedTuple):
    """Edges as shares of the picture's width and height, so that they hold for a smaller decode of it too."""

    left: float
    top: float
    right: float
    bottom: float

    def pixels(self, width: int, height: int) -> tuple[float, float, float, float]:
        # rounding must not push an edge past the picture's
        return self.left * width, self.top * height, min(1.0, self.right) * width, min(1.0, self.bottom) * height


def random_box(width: int, height: int, random: np.random.Generator) -> Box:
    """A share of the area between `AREA`, at a ratio of sides between `RATIO`, anywhere; the middle where none fits."""
    areas = random.uniform(*AREA, size=_TRIES) * width * height
    ratios = np.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1]), size=_TRIES))
    widths, heights = np.sqrt(areas * ratios) / width, np.sqrt(areas / ratios) / height
    left_share, top_share = random.random(2)
    fitting = np.flatnonzero((widths <= 1) & (heights <= 1))
    if not len(fitting):
        return centre_box(width, height, share=1.0)
    wide, high = float(widths[fitting[0]]), float(heights[fitting[0]])
    left, top = left_share * (1 - wide), top_share * (1 - high)
    return Box(left, top, left + wide, top + high)


def centre_box(width: int, height: int, share: float = CENTRE_SHARE) -> Box:
    """The square in the middle whose side is this share of the shorter side."""
    edge = share * min(width, height)
    wide, high = edge / width, edge / height
    return Box((1 - wide) / 2, (1 - high) / 2, (1 + wide) / 2, (1 + high) / 2)
