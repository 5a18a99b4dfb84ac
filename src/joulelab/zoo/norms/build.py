"""Our encoders by name, drawn from a seed."""

from __future__ import annotations

from dataclasses import replace

import torch

from joulelab.zoo.norms.bert import Bert
from joulelab.zoo.norms.deit import Deit
from joulelab.zoo.norms.layers import Encoder
from joulelab.zoo.norms.shapes import EncoderShape, Norm
from joulelab.zoo.pretrained import drawn_from


def build(shape: EncoderShape, norm: Norm | None = None, seed: int = 0, layers: int | None = None) -> Encoder:
    """`layers`: fewer of them, to try a setting quickly."""
    wanted = replace(shape, norm=norm or shape.norm, layers=layers or shape.layers)
    with drawn_from(seed):
        return (Deit if shape.kind == "image" else Bert)(wanted).eval()


def make_inputs(shape: EncoderShape, batch_size: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Images of noise or sequences of words drawn at random; the numbers do not change what is computed."""
    with drawn_from(seed):
        if shape.kind == "image":
            return torch.randn(batch_size, 3, shape.side, shape.side)
        return torch.randint(0, shape.vocabulary, (batch_size, tokens))
