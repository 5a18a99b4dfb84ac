"""Attention of one token per row to the slot of the row, as a Triton kernel.

Decoding reads every key and value once and computes almost nothing, so its time is the time to read them. A kernel for
whole sequences has a tile of 64 or 128 queries per program, nearly all of it padding here, and reaches a third of the
memory's bandwidth; this one takes the queries that share a key-value head as one tile of 16, the smallest that tensor
cores accept. Softmax is accumulated block by block (Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_QUERIES = 16
_POSITIONS = 64


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, lengths, out, positions, scale: tl.constexpr,
    heads_kv: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, queries: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    # Only positions in use are read; a mask over the whole slot would read them all.
    length = tl.load(lengths + row)
    column = tl.arange(0, size)
    group = tl.arange(0, queries)
    # A tile has 16 queries even where fewer heads share a key-value head; the rest is computed and not stored.
    is_query = (group < groups)[:, None]
    place = (row * heads_kv * groups + head * groups + group)[:, None] * size + column[None, :]
    query_GD = tl.load(query + place, mask=is_query, other=0.0)
    # Exponentials are taken to base 2, which is one instruction.
    scale_log2: tl.constexpr = scale * 1.4426950408889634
    # Running maximum, sum of weights and weighted values: enough to merge blocks without a second pass over the keys.
    top_G = tl.full([queries], -float("inf"), tl.float32)
    sum_G = tl.zeros([queries], tl.float32)
    mean_GD = tl.zeros([queries, size], tl.float32)
    slot = row * positions
    for begin in range(0, length, block):
        token = begin + tl.arange(0, block)
        is_used = token < length
        where_TD = ((slot + token) * heads_kv + head)[:, None] * size + column[None, :]
        key_TD = tl.load(key + where_TD, mask=is_used[:, None], other=0.0)
        value_TD = tl.load(value + where_TD, mask=is_used[:, None], other=0.0)
        score_GT = tl.dot(query_GD, tl.trans(key_TD)) * scale_log2
        # Keys outside the slot were loaded as 0, which would be a score like any other.
        score_GT = tl.where(is_used[None, :], score_GT, -float("inf"))
        higher_G = tl.maximum(top_G, tl.max(score_GT, 1))
        weight_GT = tl.exp2(score_GT - higher_G[:, None])
        # What was summed relative to the old maximum is rescaled to the new one; in the first block this is
        # exp2(-inf) = 0.
        shrink_G = tl.exp2(top_G - higher_G)
        sum_G = sum_G * shrink_G + tl.sum(weight_GT, 1)
        # Half-precision factors, float32 accumulator, as in FlashAttention (Dao et al., 2022).
        mean_GD = mean_GD * shrink_G[:, None] + tl.dot(weight_GT.to(value_TD.dtype), value_TD)
        top_G = higher_G
    tl.store(out + place, mean_GD / sum_G[:, None], mask=is_query)


def attend_slots(query_RHD: Tensor, key_RTKD: Tensor, value_RTKD: Tensor, lengths_R: Tensor, scale: float) -> Tensor:
    """[R, H, D]. Every length is at least 1."""
    rows, positions, heads_kv, size = key_RTKD.shape
    out_RHD = torch.empty_like(query_RHD)
    _attend[(rows, heads_kv)](
        query_RHD, key_RTKD, value_RTKD, lengths_R, out_RHD, positions, scale=scale,
        heads_kv=heads_kv, groups=query_RHD.shape[1] // heads_kv, size=size, queries=_QUERIES, block=_POSITIONS,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out_RHD
