"""DeiT (Touvron et al., 2021) without distillation token: image in, class scores out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from joulelab.zoo.norms.layers import Encoder, draw_weights
from joulelab.zoo.norms.shapes import EncoderShape

CHANNELS = 3


class Deit(Encoder):
    def __init__(self, shape: EncoderShape, width: int | None = None) -> None:
        super().__init__(shape, width)
        # a convolution with stride = kernel is a matrix product of the patches, without a change of layout around it
        self.patches = nn.Linear(CHANNELS * shape.patch**2, self.width)
        self.class_token = nn.Parameter(torch.zeros(1, 1, self.width))
        self.positions = nn.Parameter(torch.zeros(1, shape.patches + 1, self.width))
        self.head = nn.Linear(self.width, shape.classes)
        draw_weights(self)
        nn.init.trunc_normal_(self.positions, std=0.02)
        nn.init.trunc_normal_(self.class_token, std=0.02)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.head(self.first_token(self.embed(images_BCHW)))  # type: ignore[no-any-return]

    def embed(self, images_BCHW: Tensor) -> Tensor:
        side, rows = self.shape.patch, self.shape.side // self.shape.patch
        grid = images_BCHW.view(len(images_BCHW), CHANNELS, rows, side, rows, side)
        flat = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        first = self.class_token.expand(len(images_BCHW), -1, -1)
        return torch.cat([first, self.patches(flat)], 1) + self.positions
