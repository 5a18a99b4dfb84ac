"""Triton kernels of a decoding step: attention of one token per row to the slot of the row, and linear layers of one
row.

Decoding reads every key, value and weight once and computes almost nothing, so its time is the time to read them.

Attention: a kernel for whole sequences has a tile of 64 or 128 queries per program, nearly all of it padding here, and
reaches a third of the memory's bandwidth; this one takes the queries that share a key-value head as one tile of 16, the
smallest that tensor cores accept. Softmax is accumulated block by block (Milakov and Gimelshein, 2018). With few rows,
a slot is split among several programs, whose results are merged (FlashDecoding, 2023): three programs that read 1,024
positions each would leave the other 129 multiprocessors idle.

Linear layers: with one row, time is launches and latency. The norm before a layer and the gate of a feed-forward layer
are computed where its input is loaded, which saves their launches. A version with tensor cores for up to 16 rows took
twice the time of cuBLAS (docs/results.md).

Shapes: R rows, H heads, K key-value heads, D head size, T positions, P splits; in linear layers N outputs, C inputs.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_QUERIES = 16
# Of 17 combinations tried on an H200, all read long slots within 7 % of the memory's bandwidth; this one is among the
# fastest for short ones.
_POSITIONS = 32
_WARPS, _STAGES = 1, 4
# Programs that keep all multiprocessors of a large GPU busy.
_PROGRAMS = 256
# Positions per split, at least: shorter ones take as long because of their latency.
_SPLIT_POSITIONS = 128
# Outputs of a linear layer per program, and inputs that it reads at once: of 15 combinations tried on an H200, the
# fastest for small layers.
_OUTPUTS, _INPUTS = 4, 1024


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, lengths, out, tops, sums, positions, scale: tl.constexpr,
    heads_kv: tl.constexpr, groups: tl.constexpr, size: tl.constexpr, queries: tl.constexpr, block: tl.constexpr,
    splits: tl.constexpr, split_positions: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    # Only positions in use are read; a mask over the whole slot would read them all.
    length = tl.load(lengths + row)
    column = tl.arange(0, size)
    group = tl.arange(0, queries)
    # A tile has 16 queries even where fewer heads share a key-value head; the rest is computed and not stored.
    is_query = group < groups
    query_head = row * heads_kv * groups + head * groups + group
    query_GD = tl.load(query + query_head[:, None] * size + column[None, :], mask=is_query[:, None], other=0.0)
    # Exponentials are taken to base 2, which is one instruction.
    scale_log2: tl.constexpr = scale * 1.4426950408889634
    # Running maximum, sum of weights and weighted values: enough to merge blocks without a second pass over the keys.
    top_G = tl.full([queries], -float("inf"), tl.float32)
    sum_G = tl.zeros([queries], tl.float32)
    mean_GD = tl.zeros([queries, size], tl.float32)
    slot = row * positions
    first = split * split_positions
    last = tl.minimum(first + split_positions, length)
    for begin in range(first, last, block):
        token = begin + tl.arange(0, block)
        is_used = token < last
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
    if splits == 1:
        place = query_head[:, None] * size + column[None, :]
        tl.store(out + place, mean_GD / sum_G[:, None], mask=is_query[:, None])
    else:
        # A split beyond the row's length has the sum 0 and the maximum -inf.
        part = query_head * splits + split
        tl.store(out + part[:, None] * size + column[None, :], mean_GD, mask=is_query[:, None])
        tl.store(tops + part, top_G, mask=is_query)
        tl.store(sums + part, sum_G, mask=is_query)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(part, tops, sums, out, splits: tl.constexpr, size: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per head: the splits weighted by their sums, relative to the largest maximum."""
    head = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, size)
    split = tl.arange(0, block)
    is_split = split < splits
    top_P = tl.load(tops + head * splits + split, mask=is_split, other=-float("inf"))
    sum_P = tl.load(sums + head * splits + split, mask=is_split, other=0.0)
    weight_P = tl.exp2(top_P - tl.max(top_P, 0))
    where_PD = (head * splits + split)[:, None] * size + column[None, :]
    part_PD = tl.load(part + where_PD, mask=is_split[:, None], other=0.0)
    mean_D = tl.sum(part_PD * weight_P[:, None], 0) / tl.sum(sum_P * weight_P, 0)
    tl.store(out + head * size + column, mean_D)


def attend_slots(query_RHD: Tensor, key_RTKD: Tensor, value_RTKD: Tensor, lengths_R: Tensor, scale: float) -> Tensor:
    """[R, H, D]. Every length is at least 1."""
    rows, positions, heads_kv, size = key_RTKD.shape
    heads = query_RHD.shape[1]
    out_RHD = torch.empty_like(query_RHD)
    splits = _splits(rows * heads_kv, positions)
    part, tops, sums = out_RHD, lengths_R, lengths_R  # not used with one split
    if splits > 1:
        part = torch.empty(rows, heads, splits, size, dtype=torch.float32, device=query_RHD.device)
        tops, sums = torch.empty(2, rows, heads, splits, dtype=torch.float32, device=query_RHD.device).unbind(0)
    # Whole blocks, so that splits do not share one.
    split_positions = -(-positions // splits // _POSITIONS) * _POSITIONS if splits > 1 else positions
    _attend[(rows, heads_kv, splits)](
        query_RHD, key_RTKD, value_RTKD, lengths_R, part, tops, sums, positions, scale=scale,
        heads_kv=heads_kv, groups=heads // heads_kv, size=size, queries=_QUERIES, block=_POSITIONS,
        splits=splits, split_positions=split_positions, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    if splits > 1:
        block = max(2, triton.next_power_of_2(splits))
        _merge[(rows * heads,)](part, tops, sums, out_RHD, splits=splits, size=size, block=block, num_warps=4)
    return out_RHD


def _splits(programs: int, positions: int) -> int:
    splits = max(1, positions // _SPLIT_POSITIONS)
    # By comparison: if the number of rows is symbolic, torch.compile then assumes a range of it. Divided, the number
    # would become a constant of the kernel, and every number of rows would be compiled for itself.
    while splits > 1 and programs * splits > _PROGRAMS:
        splits -= 1
    return splits


@triton.jit  # type: ignore[untyped-decorator]
def _linear(  # type: ignore[no-untyped-def]
    x, weight, bias, norm, out, epsilon, N: tl.constexpr, C: tl.constexpr,
    has_norm: tl.constexpr, has_bias: tl.constexpr, gated: tl.constexpr,
    block_n: tl.constexpr, block_c: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * block_n + tl.arange(0, block_n)
    is_output = output < N
    # Every thread adds up its own columns; one sum over all of them at the end is faster than one in every round.
    total_NC = tl.zeros([block_n, block_c], tl.float32)
    squares_C = tl.zeros([block_c], tl.float32)
    for begin in range(0, C, block_c):
        column = begin + tl.arange(0, block_c)
        is_column = column < C
        where_NC = output.to(tl.int64)[:, None] * C + column[None, :]
        weight_NC = tl.load(weight + where_NC, mask=is_output[:, None] & is_column[None, :], other=0.0)
        x_C = tl.load(x + column, mask=is_column, other=0.0).to(tl.float32)
        if gated:
            # silu(gate) * up; the two halves of the row are the outputs of the layer before.
            x_C = x_C / (1.0 + tl.exp(-x_C)) * tl.load(x + C + column, mask=is_column, other=0.0).to(tl.float32)
        if has_norm:
            # The root mean square is a factor of the whole row, so it is applied at the end.
            squares_C += x_C * x_C
            x_C = x_C * tl.load(norm + column, mask=is_column, other=0.0).to(tl.float32)
        total_NC += weight_NC.to(tl.float32) * x_C[None, :]
    total_N = tl.sum(total_NC, 1)
    if has_norm:
        total_N = total_N * tl.rsqrt(tl.sum(squares_C, 0) / C + epsilon)
    if has_bias:
        total_N += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + output, total_N, mask=is_output)


def linear_row(
    x: Tensor,
    weight_NC: Tensor,
    bias_N: Tensor | None = None,
    norm_C: Tensor | None = None,
    epsilon: float = 0.0,
    gated: bool = False,
) -> Tensor:
    """[..., N] of one row: `x` after RMSNorm with the weight `norm_C`, or silu(first half) * second half of it, times
    the transposed weight."""
    outputs, inputs = weight_NC.shape
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    block_c = min(_INPUTS, triton.next_power_of_2(inputs))
    _linear[(triton.cdiv(outputs, _OUTPUTS),)](
        x, weight_NC, weight_NC if bias_N is None else bias_N, weight_NC if norm_C is None else norm_C, out,
        epsilon, N=outputs, C=inputs, has_norm=norm_C is not None, has_bias=bias_N is not None, gated=gated,
        block_n=_OUTPUTS, block_c=block_c, num_warps=4,
    )  # fmt: skip
    return out
