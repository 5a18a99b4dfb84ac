"""Adafactor on bfloat16 matrices and vectors as Triton kernels, for models whose AdamW moments do not fit.

Adafactor (Shazeer and Stern, 2018) keeps one number per row and one per column of a matrix instead of moments. torch's
version works on one tensor at a time with a dozen passes over float32 copies and waits for the device twice per tensor;
for a model of 7B that took as long as the matrix products of a step (docs/results.md). Here a matrix is read three
times, in 12 bytes a weight, and nothing waits:

    1. sums of the squared gradients by row and by column, and of the squared weights
    2. the norm of the update, by which it is clipped
    3. the update, rounded stochastically (see `bf16_weights`)

Sums are taken in a fixed order, so that a resumed training continues with the same numbers.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from joulelab.train.adamw_kernel import _rounded

_ROWS, _COLUMNS, _WARPS = 16, 512, 8
# Of the last pass: one call of Philox has the bits of eight weights.
_LAST_ROWS, _LAST_COLUMNS, _LAST_WARPS = 4, 256, 4
_ROUNDS = 7
_VECTOR = 1024
_SMALL = torch.finfo(torch.float32).eps


@triton.jit  # type: ignore[untyped-decorator]
def _sums(  # type: ignore[no-untyped-def]
    weights, gradients, factor, row_sums, column_sums, weight_sums, height, width,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = block * block_rows + tl.arange(0, block_rows)
    gradient_factor = tl.load(factor)
    by_row = tl.zeros([block_rows], tl.float32)
    by_weight = tl.zeros([block_rows], tl.float32)
    for begin in range(0, width, block_columns):
        column = begin + tl.arange(0, block_columns)
        inside = (row < height)[:, None] & (column < width)[None, :]
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        gradient = tl.load(gradients + place, mask=inside, other=0.0).to(tl.float32) * gradient_factor
        weight = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
        square = gradient * gradient
        by_row += tl.sum(square, 1)
        by_weight += tl.sum(weight * weight, 1)
        tl.store(column_sums + block.to(tl.int64) * width + column, tl.sum(square, 0), mask=column < width)
    tl.store(row_sums + row, by_row, mask=row < height)
    tl.store(weight_sums + block, tl.sum(by_weight, 0))


@triton.jit
def _update_of(gradient, row_square, column_square, row_mean, small):  # type: ignore[no-untyped-def]
    """The gradient divided by the root of its mean square, as the product of a row's and a column's share."""
    estimate = tl.maximum(row_square * column_square / row_mean, small * small)
    return gradient * tl.rsqrt(estimate)


@triton.jit  # type: ignore[untyped-decorator]
def _squared_updates(  # type: ignore[no-untyped-def]
    gradients, factor, rows, columns, row_mean, update_sums, height, width, small,
    block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = block * block_rows + tl.arange(0, block_rows)
    gradient_factor = tl.load(factor)
    mean = tl.load(row_mean)
    row_square = tl.load(rows + row, mask=row < height, other=1.0)
    total = tl.zeros([block_rows], tl.float32)
    for begin in range(0, width, block_columns):
        column = begin + tl.arange(0, block_columns)
        inside = (row < height)[:, None] & (column < width)[None, :]
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        gradient = tl.load(gradients + place, mask=inside, other=0.0).to(tl.float32) * gradient_factor
        column_square = tl.load(columns + column, mask=column < width, other=1.0)
        update = _update_of(gradient, row_square[:, None], column_square[None, :], mean, small)
        total += tl.sum(update * update, 1)
    tl.store(update_sums + block, tl.sum(total, 0))


@triton.jit(do_not_specialize=["seed"])  # type: ignore[untyped-decorator]
def _apply(  # type: ignore[no-untyped-def]
    weights, gradients, factor, rows, columns, row_mean, amount, height, width, small, keep, seed,
    block_rows: tl.constexpr, block_columns: tl.constexpr, rounds: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    row = block * block_rows + tl.arange(0, block_rows)
    gradient_factor = tl.load(factor)
    mean = tl.load(row_mean)
    step = tl.load(amount)
    row_square = tl.load(rows + row, mask=row < height, other=1.0)
    for begin in range(0, width, 8 * block_columns):
        lane = begin // 8 + tl.arange(0, block_columns)
        counter = row[:, None] + 0 * lane[None, :]
        zero = 0 * counter
        one, two, three, four = tl.philox(seed, lane[None, :] + zero, counter, zero, zero, rounds)
        for part in tl.static_range(8):
            column = begin + part * block_columns + tl.arange(0, block_columns)
            inside = (row < height)[:, None] & (column < width)[None, :]
            place = row.to(tl.int64)[:, None] * width + column[None, :]
            gradient = tl.load(gradients + place, mask=inside, other=0.0).to(tl.float32) * gradient_factor
            weight = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
            column_square = tl.load(columns + column, mask=column < width, other=1.0)
            update = _update_of(gradient, row_square[:, None], column_square[None, :], mean, small)
            weight = weight * keep - step * update
            word = one if part < 2 else (two if part < 4 else (three if part < 6 else four))
            bits = word >> (16 * (part % 2))
            tl.store(weights + place, _rounded(weight, bits).to(weights.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed"])  # type: ignore[untyped-decorator]
def _update_vector(  # type: ignore[no-untyped-def]
    weights, gradients, factor, variances, elements, renewed, least, rate, threshold, small, keep, seed,
    block: tl.constexpr, rounds: tl.constexpr,
):  # fmt: skip
    """A norm's gain or a bias, by one program: it is too short to share."""
    lane = tl.arange(0, block)
    gradient_factor = tl.load(factor)
    weight_sum = tl.zeros([block], tl.float32)
    update_sum = tl.zeros([block], tl.float32)
    for begin in range(0, elements, block):
        place = begin + lane
        inside = place < elements
        weight = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradients + place, mask=inside, other=0.0).to(tl.float32) * gradient_factor
        variance = tl.load(variances + place, mask=inside, other=1.0)
        variance += (gradient * gradient - variance) * renewed
        tl.store(variances + place, variance, mask=inside)
        update = gradient * tl.rsqrt(tl.maximum(variance, small * small))
        weight_sum += weight * weight
        update_sum += tl.where(inside, update * update, 0.0)
    size = tl.maximum(tl.sqrt(tl.sum(weight_sum, 0) / elements), least) * rate
    step = size / tl.maximum(tl.sqrt(tl.sum(update_sum, 0) / elements) / threshold, 1.0)
    tl.debug_barrier()  # variances are read again
    for begin in range(0, elements, block):
        place = begin + lane
        inside = place < elements
        weight = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradients + place, mask=inside, other=0.0).to(tl.float32) * gradient_factor
        variance = tl.load(variances + place, mask=inside, other=1.0)
        weight = weight * keep - step * gradient * tl.rsqrt(tl.maximum(variance, small * small))
        zero = 0 * place
        bits, _, _, _ = tl.philox(seed, place, zero, zero, zero, rounds)
        tl.store(weights + place, _rounded(weight, bits).to(weights.dtype.element_ty), mask=inside)


def update_matrix(
    weight_HW: Tensor, gradient_HW: Tensor, row_H1: Tensor, column_1W: Tensor, factor: Tensor, *, step: int, seed: int,
    rate: float, decay: float, beta2_decay: float, epsilons: tuple[float | None, float], threshold: float,
) -> None:  # fmt: skip
    """Update weight and factors in place; all are contiguous. The gradient is multiplied by `factor`, one float32
    number on the same device. `step` counts from 1, `seed` has 31 bits; the others are those of torch's Adafactor."""
    height, width = weight_HW.shape
    small, least = _SMALL if epsilons[0] is None else epsilons[0], epsilons[1]
    blocks = triton.cdiv(height, _ROWS)
    row_sums = torch.empty_like(row_H1)
    column_sums = row_H1.new_empty(blocks, width)
    sums_2 = row_H1.new_empty(2, blocks)
    tile = {"block_rows": _ROWS, "block_columns": _COLUMNS, "num_warps": _WARPS}
    _sums[(blocks,)](weight_HW, gradient_HW, factor, row_sums, column_sums, sums_2[0], height, width, **tile)
    renewed = float(step) ** beta2_decay
    row_H1.lerp_(row_sums / width, renewed)
    column_1W.lerp_(column_sums.sum(0, keepdim=True) / height, renewed)
    row_mean = row_H1.mean().clamp(min=small)
    _squared_updates[(blocks,)](
        gradient_HW, factor, row_H1, column_1W, row_mean, sums_2[1], height, width, small, **tile
    )  # fmt: skip
    weight_norm, update_norm = (sums_2.sum(1) / weight_HW.numel()).sqrt().unbind()
    size = weight_norm.clamp(min=least) * min(rate, step**-0.5)
    amount = size / (update_norm / threshold).clamp(min=1.0)
    _apply[(triton.cdiv(height, _LAST_ROWS),)](
        weight_HW, gradient_HW, factor, row_H1, column_1W, row_mean, amount, height, width, small, 1 - rate * decay,
        seed, block_rows=_LAST_ROWS, block_columns=_LAST_COLUMNS, rounds=_ROUNDS, num_warps=_LAST_WARPS,
    )  # fmt: skip


def update_vector(
    weight_D: Tensor, gradient_D: Tensor, variance_D: Tensor, factor: Tensor, *, step: int, seed: int, rate: float,
    decay: float, beta2_decay: float, epsilons: tuple[float | None, float], threshold: float,
) -> None:  # fmt: skip
    """The same for a vector, which keeps a variance per element."""
    small, least = _SMALL if epsilons[0] is None else epsilons[0], epsilons[1]
    _update_vector[(1,)](
        weight_D, gradient_D, factor, variance_D, weight_D.numel(), float(step) ** beta2_decay, least,
        min(rate, step**-0.5), threshold, small, 1 - rate * decay, seed, block=_VECTOR, rounds=_ROUNDS, num_warps=4,
    )  # fmt: skip
