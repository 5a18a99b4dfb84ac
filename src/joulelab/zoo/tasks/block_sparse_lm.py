"""BigBird's masked language modelling, with its block-sparse attention in fused kernels.

transformers (5.22) draws the random blocks anew in every layer of every step, and writes all attention weights into a
dense square of tokens x tokens: at 4,096 tokens the memory and time that sparse attention is there to save, and under
autocast an error. Here the blocks are drawn once (they are the same in every step), and each block of queries meets
its blocks of keys in one call of torch's own attention. A test holds the two against each other.

Shapes: B rows, H heads, T tokens in N blocks of Q tokens, R random blocks of each, D features of a head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from joulelab.zoo.request import WorkloadRequest
from joulelab.zoo.tasks import masked_lm
from joulelab.zoo.workload import Workload

_PLANNED_IN_THE_PAPER = (1024, 3072, 4096)


def prepare(request: WorkloadRequest) -> Workload:
    workload = masked_lm.prepare(request)
    fuse_attention(workload.model, request.shape["tokens"])
    return workload


def fuse_attention(model: nn.Module, tokens: int) -> None:
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

    fused = type("FusedBlockSparseAttention", (FusedBlocks, BigBirdBlockSparseAttention), {})
    for module in model.modules():
        if isinstance(module, BigBirdBlockSparseAttention):
            module.register_buffer("random_blocks", _draw_blocks(module, tokens), persistent=False)
            module.__class__ = fused
            module.tokens = tokens


class FusedBlocks(nn.Module):
    """Mixed into BigBird's attention, for rows of one length without padding."""

    tokens: int
    random_blocks: Tensor
    """[H, N - 2, R]: of all blocks but the first and the last, which attend to everything."""
    num_attention_heads: int
    block_size: int

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.shape[1] != self.tokens:
            return super().forward(hidden_states, *args, **kwargs)
        # transformers draws no blocks outside of training, and then looks at the first block in their place
        chosen_HNR = self.random_blocks if self.training else torch.zeros_like(self.random_blocks)
        modules: Any = (self.query, self.key, self.value)
        query_BHNQD, key_BHNQD, value_BHNQD = (self._blocks(project(hidden_states)) for project in modules)
        parts = zip(
            (query_BHNQD[:, :, part] for part in _PARTS),
            _seen(key_BHNQD, chosen_HNR),
            _seen(value_BHNQD, chosen_HNR),
            strict=True,
        )
        context_BHNQD = torch.cat([_attend(query, key, value) for query, key, value in parts], dim=2)
        return context_BHNQD.flatten(2, 3).transpose(1, 2).flatten(2), None

    def _blocks(self, features: Tensor) -> Tensor:
        """[B, T, H * D] as [B, H, N, Q, D]."""
        rows, tokens, width = features.shape
        heads = self.num_attention_heads
        split = features.view(rows, tokens // self.block_size, self.block_size, heads, width // heads)
        return split.permute(0, 3, 1, 2, 4)


_PARTS = (slice(0, 1), slice(1, 2), slice(2, -2), slice(-2, -1), slice(-1, None))
"""Blocks of queries that see alike: the first, the second, all in the middle, the last but one, the last."""


def _seen(blocks_BHNQD: Tensor, chosen_HNR: Tensor) -> list[Tensor]:
    """What each part of the queries sees of the keys (or values), [B, H, blocks of the part, tokens seen, D]."""
    heads_H11 = torch.arange(len(chosen_HNR), device=chosen_HNR.device)[:, None, None]
    random = blocks_BHNQD[:, heads_H11, chosen_HNR].flatten(3, 4)
    everything = blocks_BHNQD.flatten(2, 3).unsqueeze(2)
    first, last = blocks_BHNQD[:, :, :1], blocks_BHNQD[:, :, -1:]
    before, here, after = (blocks_BHNQD[:, :, shift : shift - 4] for shift in (1, 2, 3))
    middle = [first.expand_as(here), before, here, after, last.expand_as(here), random[:, :, 1:-1]]
    low = torch.cat([blocks_BHNQD[:, :, :3], last], dim=2).flatten(2, 3).unsqueeze(2)
    high = torch.cat([first, blocks_BHNQD[:, :, -3:]], dim=2).flatten(2, 3).unsqueeze(2)
    return [
        everything,
        torch.cat([low, random[:, :, :1]], dim=3),
        torch.cat(middle, dim=3),
        torch.cat([high, random[:, :, -1:]], dim=3),
        everything,
    ]


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each block of queries with its own keys: to the kernel they are so many more heads."""
    context = functional.scaled_dot_product_attention(query.flatten(1, 2), key.flatten(1, 2), value.flatten(1, 2))
    return context.view(query.shape)


def _draw_blocks(attention: Any, tokens: int) -> Tensor:
    """The blocks that transformers draws for this layer at every step, drawn once. It seeds numpy's own generator to
    do so, which is given back as it was."""
    block, count, longest = attention.block_size, attention.num_random_blocks, attention.max_seqlen
    before = np.random.get_state()
    np.random.seed(attention.seed)
    try:
        if tokens in _PLANNED_IN_THE_PAPER:
            draw = attention._bigbird_block_rand_mask
            drawn = [
                draw(longest, longest, block, block, count, last_idx=1024)[: tokens // block - 2]
                for _ in range(attention.num_attention_heads)
            ]
        else:
            lengths, counts = attention._get_rand_attn_plan(tokens, block, count)
            drawn = attention._bigbird_block_rand_mask_with_head(
                tokens, tokens, block, block, attention.num_attention_heads, lengths, counts
            )
    finally:
        np.random.set_state(before)
    return torch.from_numpy(np.stack(drawn).astype(np.int64))
