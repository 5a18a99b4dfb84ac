"""Normalisations and the transformer block around them.

With zero-mean input LayerNorm and RMSNorm are the same function, and a zero-mean vector of width d is told by its first
d - 1 numbers: that is all there is to Pre-RMSNorm and Pre-CRMSNorm (Jiang, Gu, Zhu and Pan, NeurIPS 2023).

Shapes: B batch, T tokens, W width of the residual stream, I width of all heads together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from joulelab.zoo.norms.shapes import EncoderShape, Norm


class CrmsNorm(nn.Module):
    """RMSNorm of the zero-mean vector whose last number was left out: it is minus the sum of the others."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight: nn.Parameter | None = nn.Parameter(torch.ones(width))

    def forward(self, x_BTW: Tensor) -> Tensor:
        x = x_BTW.to(torch.promote_types(x_BTW.dtype, torch.float32))
        left_out = x.sum(-1, keepdim=True)
        squares = x.square().sum(-1, keepdim=True) + left_out.square()
        scaled = x * torch.rsqrt(squares / (x.shape[-1] + 1) + self.eps)
        told = scaled.to(x_BTW.dtype)
        return told if self.weight is None else told * self.weight


def make_norm(kind: Norm, width: int, eps: float) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    if kind == "pre-rms":
        return nn.RMSNorm(width, eps=eps)
    return CrmsNorm(width, eps) if kind == "pre-crms" else nn.LayerNorm(width, eps=eps)


class Block(nn.Module):
    """Attention and a feed-forward net, each a branch beside the residual stream.

    Queries, keys and values come from one matrix product: at batch 1 a product takes about as long as a third of it.
    """

    def __init__(self, shape: EncoderShape, width: int) -> None:
        super().__init__()
        self.heads = shape.heads
        self.after = shape.norm == "post-ln"
        self.norm1 = make_norm(shape.norm, width, shape.eps)
        self.qkv = nn.Linear(width, 3 * shape.inner)
        self.out = nn.Linear(shape.inner, width)
        self.norm2 = make_norm(shape.norm, width, shape.eps)
        self.up = nn.Linear(width, shape.hidden)
        self.down = nn.Linear(shape.hidden, width)

    def forward(self, x_BTW: Tensor, first_only: bool = False) -> Tensor:
        """`first_only`: of the first token alone, which is all that a head on it looks at after the last block."""
        if self.after:
            x = self.norm1((x_BTW[:, :1] if first_only else x_BTW) + self._attend(x_BTW, first_only))
            return self.norm2(x + self._feed(x))  # type: ignore[no-any-return]  # a Module's call is untyped
        x = (x_BTW[:, :1] if first_only else x_BTW) + self._attend(self.norm1(x_BTW), first_only)
        return x + self._feed(self.norm2(x))

    def _attend(self, x_BTW: Tensor, first_only: bool) -> Tensor:
        if first_only:
            inner = self.out.in_features
            weight, bias = self.qkv.weight, self.qkv.bias
            q = self._by_head(functional.linear(x_BTW[:, :1], weight[:inner], bias[:inner]), 1)[0]
            k, v = self._by_head(functional.linear(x_BTW, weight[inner:], bias[inner:]), 2)
        else:
            q, k, v = self._by_head(self.qkv(x_BTW), 3)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _by_head(self, joint: Tensor, parts: int) -> tuple[Tensor, ...]:
        split = joint.unflatten(-1, (parts, self.heads, -1))  # type: ignore[no-untyped-call]
        return tuple(part.transpose(1, 2) for part in split.unbind(2))

    def _feed(self, x_BTW: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x_BTW)))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """What DeiT and BERT share; their subclasses bring embeddings and head."""

    blocks: nn.ModuleList

    def __init__(self, shape: EncoderShape, width: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.width = width or shape.width
        self.first_only = False
        """Whether the last block computes the first token alone; the output is the same."""
        self.blocks = nn.ModuleList(Block(shape, self.width) for _ in range(shape.layers))
        # normalising after each branch leaves nothing to normalise at the end
        self.norm = nn.Identity() if shape.norm == "post-ln" else make_norm(shape.norm, self.width, shape.eps)

    def first_token(self, x_BTW: Tensor) -> Tensor:
        """The first token's vector after all blocks."""
        for number, block in enumerate(self.blocks, 1):
            x_BTW = block(x_BTW, self.first_only and number == len(self.blocks))
        return self.norm(x_BTW[:, 0])  # type: ignore[no-any-return]


def draw_weights(model: nn.Module) -> None:
    """Small normal weights, as both papers have them; norms start as no change."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
