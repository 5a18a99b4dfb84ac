"""Encoders (DeiT, BERT) with a choice of normalization.

For zero-mean input, LayerNorm and RMSNorm are the same function, and a zero-mean vector of width d is determined by its
first d - 1 numbers. Pre-RMSNorm and Pre-CRMSNorm follow from these two facts (Jiang, Gu, Zhu and Pan, NeurIPS 2023).

Shapes: B batch, T tokens, W width of the residual stream, I width of all heads together.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from joulelab.zoo.norms.encoder_shapes import EncoderShape, Norm
from joulelab.zoo.pretrained import seeded_init


class CrmsNorm(nn.Module):
    """RMSNorm of a zero-mean vector without its last element, which is minus the sum of the others."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight: nn.Parameter | None = nn.Parameter(torch.ones(width))

    def forward(self, x_BTW: Tensor) -> Tensor:
        x = x_BTW.to(torch.promote_types(x_BTW.dtype, torch.float32))
        left_out = x.sum(-1, keepdim=True)
        # The omitted element is minus the sum of the others, and its square is part of the mean
        # square; the divisor is the full width. In float32, as torch's own norms do under autocast.
        squares = x.square().sum(-1, keepdim=True) + left_out.square()
        scaled = x * torch.rsqrt(squares / (x.shape[-1] + 1) + self.eps)
        normalized = scaled.to(x_BTW.dtype)
        return normalized if self.weight is None else normalized * self.weight


def make_norm(kind: Norm, width: int, eps: float) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    if kind == "pre-rms":
        return nn.RMSNorm(width, eps=eps)
    return CrmsNorm(width, eps) if kind == "pre-crms" else nn.LayerNorm(width, eps=eps)


class Block(nn.Module):
    """Attention and a feed-forward network, each a residual branch.

    Queries, keys and values come from one matrix product: at batch 1 it takes about as long as a third of it.
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
        """`first_only`: compute the first token only, the only one that the head reads after the last block."""
        if self.after:
            x = self.norm1((x_BTW[:, :1] if first_only else x_BTW) + self._attend(x_BTW, first_only))
            return self.norm2(x + self._feed(x))  # type: ignore[no-any-return]  # a Module's call is untyped
        x = (x_BTW[:, :1] if first_only else x_BTW) + self._attend(self.norm1(x_BTW), first_only)
        return x + self._feed(self.norm2(x))

    def _attend(self, x_BTW: Tensor, first_only: bool) -> Tensor:
        if first_only:
            inner = self.out.in_features
            weight, bias = self.qkv.weight, self.qkv.bias
            # Only the first token needs a query; keys and values are needed of all tokens.
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
    """Blocks of DeiT and BERT; subclasses add embeddings and head."""

    blocks: nn.ModuleList

    def __init__(self, shape: EncoderShape, width: int | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.width = width or shape.width
        self.first_only = False
        """Whether the last block computes the first token alone; the output is the same."""
        self.blocks = nn.ModuleList(Block(shape, self.width) for _ in range(shape.layers))
        # with norms after each branch the output is already normalized
        self.norm = nn.Identity() if shape.norm == "post-ln" else make_norm(shape.norm, self.width, shape.eps)

    def first_token(self, x_BTW: Tensor) -> Tensor:
        """The first token's vector after all blocks."""
        for number, block in enumerate(self.blocks, 1):
            x_BTW = block(x_BTW, self.first_only and number == len(self.blocks))
        return self.norm(x_BTW[:, 0])  # type: ignore[no-any-return]


def init_weights(model: nn.Module) -> None:
    """Normal weights with standard deviation 0.02, as in both papers; norms start as the identity."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


# BERT (Devlin et al., 2018) as a sequence classifier: its embeddings, pooled first token.


SEGMENTS = 2


class Bert(Encoder):
    """For sequences without padding: a padded batch would need a mask, which changes what is measured."""

    def __init__(self, shape: EncoderShape, width: int | None = None) -> None:
        super().__init__(shape, width)
        self.words = nn.Embedding(shape.vocabulary, self.width)
        self.positions = nn.Embedding(shape.positions, self.width)
        self.segments = nn.Embedding(SEGMENTS, self.width)
        # the published model normalizes its embeddings; with norms before each branch, the first norm does that
        self.embedding_norm = nn.LayerNorm(self.width, eps=shape.eps) if shape.norm == "post-ln" else nn.Identity()
        self.pooler = nn.Linear(self.width, shape.inner)
        self.head = nn.Linear(shape.inner, shape.classes)
        init_weights(self)

    def forward(self, ids_BT: Tensor) -> Tensor:
        first = self.first_token(self.embed(ids_BT))
        return self.head(torch.tanh(self.pooler(first)))  # type: ignore[no-any-return]

    def embed(self, ids_BT: Tensor) -> Tensor:
        tokens = ids_BT.shape[1]
        places = self.positions.weight[:tokens] + self.segments.weight[0]
        return self.embedding_norm(self.words(ids_BT) + places)  # type: ignore[no-any-return]


# DeiT (Touvron et al., 2021) without distillation token: image in, class scores out.


CHANNELS = 3


class Deit(Encoder):
    def __init__(self, shape: EncoderShape, width: int | None = None) -> None:
        super().__init__(shape, width)
        # a convolution with stride = kernel is a matrix product of the patches, without a change of layout around it
        self.patches = nn.Linear(CHANNELS * shape.patch**2, self.width)
        self.class_token = nn.Parameter(torch.zeros(1, 1, self.width))
        self.positions = nn.Parameter(torch.zeros(1, shape.patches + 1, self.width))
        self.head = nn.Linear(self.width, shape.classes)
        init_weights(self)
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


def build(shape: EncoderShape, norm: Norm | None = None, seed: int = 0, layers: int | None = None) -> Encoder:
    """`layers`: use fewer layers, for quick tests."""
    wanted = replace(shape, norm=norm or shape.norm, layers=layers or shape.layers)
    with seeded_init(seed):
        return (Deit if shape.kind == "image" else Bert)(wanted).eval()


def make_inputs(shape: EncoderShape, batch_size: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random images or token ids; the values do not change the amount of computation."""
    with seeded_init(seed):
        if shape.kind == "image":
            return torch.randn(batch_size, 3, shape.side, shape.side)
        return torch.randint(0, shape.vocabulary, (batch_size, tokens))
