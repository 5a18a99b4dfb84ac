"""Triton kernels of a decoding step: attention of one token per row to the slot of the row, linear layers of one row,
and sampling.

Decoding reads every key, value and weight once and computes almost nothing, so its time is the time to read them.

Attention: a kernel for whole sequences has a tile of 64 or 128 queries per program, nearly all of it padding here, and
reaches a third of the memory's bandwidth; this one takes the queries that share a key-value head as one tile of 16, the
smallest that tensor cores accept. Softmax is accumulated block by block (Milakov and Gimelshein, 2018). With few rows,
a slot is split among several programs, whose results are merged (FlashDecoding, 2023): three programs that read 1,024
positions each would leave the other 129 multiprocessors idle.

Linear layers: with one row, time is launches and latency. The norm before a layer and the gate of a feed-forward layer
are computed where its input is loaded, which saves their launches. A version with tensor cores for up to 16 rows took
twice the time of cuBLAS (docs/results.md).

Sampling: settings are per row, so that one captured step serves all of them. A cut of the distribution (top-p, top-k)
is found as in `sampler`, by bisection over the bit patterns of the logits, but with eight cuts tried in each pass over
the vocabulary: six passes for bfloat16, read from the cache of the GPU, where torch's operations go through memory
sixteen times.

Shapes: R rows, V vocabulary, H heads, K key-value heads, D head size, T positions, P splits; in linear layers N
outputs, C inputs.
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
# Inputs of a linear layer that a program reads at once.
_INPUTS = 1024
# Logits that a program reads at once, and the bits of a cut that one pass over the vocabulary finds.
_WORDS, _CUT_BITS = 2048, 3


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
    total_N = tl.zeros([block_n], tl.float32)
    squares = 0.0
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
            squares += tl.sum(x_C * x_C, 0)
            x_C = x_C * tl.load(norm + column, mask=is_column, other=0.0).to(tl.float32)
        total_N += tl.sum(weight_NC.to(tl.float32) * x_C[None, :], 1)
    if has_norm:
        total_N = total_N * tl.rsqrt(squares / C + epsilon)
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
    # Small layers: few outputs per program, so that there are enough programs for all multiprocessors.
    block_n = 4 if outputs < 4 * _PROGRAMS else 8
    _linear[(triton.cdiv(outputs, block_n),)](
        x, weight_NC, weight_NC if bias_N is None else bias_N, weight_NC if norm_C is None else norm_C, out,
        epsilon, N=outputs, C=inputs, has_norm=norm_C is not None, has_bias=bias_N is not None, gated=gated,
        block_n=block_n, block_c=block_c, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _float_of(key, shift: tl.constexpr):  # type: ignore[no-untyped-def]
    """The float32 number with this place in the order of all numbers; `shift` lower bits of its pattern are 0."""
    ordered = key << shift
    # IEEE 754 numbers are sign and magnitude: negative ones have the reversed order.
    return tl.where(ordered >= 0, ordered, -2147483648 - ordered).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _key_of(number, shift: tl.constexpr):  # type: ignore[no-untyped-def]
    pattern = number.to(tl.int32, bitcast=True)
    return tl.where(pattern >= 0, pattern, -2147483648 - pattern) >> shift


@triton.jit  # type: ignore[untyped-decorator]
def _highest_cut(  # type: ignore[no-untyped-def]
    logits, words, top, scale, low, needed, counts: tl.constexpr, shift: tl.constexpr, passes: tl.constexpr,
    cuts: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The highest key whose numbers and those above it have a total of `needed`: a count, or a sum of weights."""
    high = _key_of(top, shift)
    column = tl.arange(0, block)
    part = tl.arange(0, cuts)
    for _ in range(passes):
        # Each pass over the vocabulary tries `cuts` keys between the bounds, the lowest of them known to be enough.
        width = (high.to(tl.int64) - low + cuts) // cuts
        keys = tl.minimum(low + part * width, high.to(tl.int64)).to(tl.int32)
        levels = _float_of(keys, shift)
        totals = tl.zeros([cuts], tl.float64)
        for begin in range(0, words, block):
            x = tl.load(logits + begin + column, mask=begin + column < words, other=-float("inf")).to(tl.float32)
            weight = tl.where(x == -float("inf"), 0.0, 1.0) if counts else tl.exp((x - top) * scale)
            kept = tl.where(x[None, :] >= levels[:, None], weight[None, :], 0.0)
            totals += tl.sum(kept, 1).to(tl.float64)
        is_enough = (totals >= needed) & (part > 0)
        best = tl.max(tl.where(is_enough, part, 0), 0)
        low_next = tl.minimum(low + best * width, high.to(tl.int64))
        high = tl.minimum(low_next + width - 1, high.to(tl.int64)).to(tl.int32)
        low = low_next
    return _float_of(low.to(tl.int32), shift)


@triton.jit  # type: ignore[untyped-decorator]
def _sample(  # type: ignore[no-untyped-def]
    all_logits, stride, words, numbers, temperatures, top_ps, top_ks, tokens, logs,
    shift: tl.constexpr, passes: tl.constexpr, cuts: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits = all_logits + row.to(tl.int64) * stride
    column = tl.arange(0, block)
    top = tl.full([], -float("inf"), tl.float32)
    for begin in range(0, words, block):
        x = tl.load(logits + begin + column, mask=begin + column < words, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(x, 0))
    likeliest = tl.full([], 2147483647, tl.int32)
    total = tl.zeros([], tl.float64)
    for begin in range(0, words, block):
        x = tl.load(logits + begin + column, mask=begin + column < words, other=-float("inf")).to(tl.float32)
        likeliest = tl.minimum(likeliest, tl.min(tl.where(x == top, begin + column, 2147483647), 0))
        total += tl.sum(tl.exp(x - top), 0).to(tl.float64)
    token = likeliest
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        scale = (1.0 / temperature).to(tl.float32)
        cut = tl.full([], -float("inf"), tl.float32)
        lowest = _key_of(cut, shift).to(tl.int64)
        top_k = tl.load(top_ks + row)
        if (top_k > 0) & (top_k < words):
            cut = _highest_cut(
                logits, words, top, scale, lowest, top_k.to(tl.float64), True, shift, passes, cuts, block
            )  # fmt: skip
        kept = tl.zeros([], tl.float64)
        for begin in range(0, words, block):
            x = tl.load(logits + begin + column, mask=begin + column < words, other=-float("inf")).to(tl.float32)
            kept += tl.sum(tl.where(x >= cut, tl.exp((x - top) * scale), 0.0), 0).to(tl.float64)
        top_p = tl.load(top_ps + row)
        if top_p < 1:
            # Relative to what top-k has left: the two filters are applied one after the other.
            cut = _highest_cut(
                logits, words, top, scale, _key_of(cut, shift).to(tl.int64), top_p.to(tl.float64) * kept, False,
                shift, passes, cuts, block,
            )  # fmt: skip
            kept = tl.zeros([], tl.float64)
            for begin in range(0, words, block):
                x = tl.load(logits + begin + column, mask=begin + column < words, other=-float("inf")).to(tl.float32)
                kept += tl.sum(tl.where(x >= cut, tl.exp((x - top) * scale), 0.0), 0).to(tl.float64)
        # The first token at which the sum of the weights, in the order of the vocabulary, exceeds the random share.
        mark = tl.load(numbers + row) * kept
        before = tl.zeros([], tl.float64)
        token = tl.full([], 2147483647, tl.int32)
        last = likeliest
        for begin in range(0, words, block):
            x = tl.load(logits + begin + column, mask=begin + column < words, other=-float("inf")).to(tl.float32)
            weight = tl.where(x >= cut, tl.exp((x - top) * scale), 0.0).to(tl.float64)
            upto = before + tl.cumsum(weight, 0)
            token = tl.minimum(token, tl.min(tl.where((upto > mark) & (weight > 0), begin + column, 2147483647), 0))
            last = tl.maximum(last, tl.max(tl.where(weight > 0, begin + column, 0), 0))
            before += tl.sum(weight, 0)
        token = tl.minimum(token, last)  # rounding may put the mark at the total
    tl.store(tokens + row, token.to(tl.int64))
    own = tl.load(logits + token).to(tl.float32).to(tl.float64) - top.to(tl.float64)
    tl.store(logs + row, (own - tl.log(total)).to(tl.float32))


def sample_rows(
    logits_RV: Tensor, numbers_R: Tensor, temperature_R: Tensor, top_p_R: Tensor, top_k_R: Tensor
) -> tuple[Tensor, Tensor]:
    """As `sampler.sample_tokens`, with the settings of every row; temperature 0: the likeliest token."""
    rows, words = logits_RV.shape
    tokens_R = torch.empty(rows, dtype=torch.long, device=logits_RV.device)
    logs_R = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    # The lower half of a bfloat16 number's float32 pattern is 0.
    shift = 16 if logits_RV.dtype == torch.bfloat16 else 0
    _sample[(rows,)](
        logits_RV, logits_RV.stride(0), words, numbers_R, temperature_R, top_p_R, top_k_R, tokens_R, logs_R,
        shift=shift, passes=-(-(32 - shift) // _CUT_BITS), cuts=1 << _CUT_BITS, block=_WORDS, num_warps=8,
    )  # fmt: skip
    return tokens_R, logs_R
