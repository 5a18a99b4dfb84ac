"""AdamW on bfloat16 weights as one Triton kernel: a weight, its gradient and its moments are read and written once.

The update has almost no arithmetic, so its time is that of its memory traffic: 22 bytes a weight with float32 moments,
14 with bfloat16 ones. The same update by torch's fused AdamW on float32 copies, followed by the rounding, moves about
80 (docs/results.md).

Random bits come from Philox (Salmon et al., 2011), a function of seed and position: nothing is stored, and a weight
gets the same bits whatever the size of the grid.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _rounded(value, bits):  # type: ignore[no-untyped-def]
    """A float32 number whose lower half is 0: up or down with the probability of the distance (see `bf16_weights`)."""
    carried = (value.to(tl.int32, bitcast=True) + (bits & 0xFFFF).to(tl.int32)) & -65536
    # Infinity and NaN minus themselves are NaN; the carry could turn them into numbers.
    return tl.where(value - value == 0, carried.to(tl.float32, bitcast=True), value)


@triton.jit(do_not_specialize=["seed"])  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    weights, gradients, means, squares, elements, seed, rate, decay, keep_mean, keep_square, epsilon, scale_mean,
    scale_square, round_moments: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < elements
    weight = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + place, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(means + place, mask=inside, other=0.0).to(tl.float32)
    square = tl.load(squares + place, mask=inside, other=0.0).to(tl.float32)
    mean = mean + (gradient - mean) * (1 - keep_mean)
    square = square * keep_square + gradient * gradient * (1 - keep_square)
    # Decoupled decay, then the step, as in torch. The scales undo the bias of moments that began at 0.
    weight = weight * (1 - rate * decay)
    weight = weight - rate * scale_mean * mean / (tl.sqrt(square) * scale_square + epsilon)
    first, second, third, _ = tl.randint4x(seed, place)
    tl.store(weights + place, _rounded(weight, first).to(weights.dtype.element_ty), mask=inside)
    if round_moments:
        mean, square = _rounded(mean, second), _rounded(square, third)
    tl.store(means + place, mean.to(means.dtype.element_ty), mask=inside)
    tl.store(squares + place, square.to(squares.dtype.element_ty), mask=inside)


def update(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, step: int, seed: int, rate: float, decay: float,
    betas: tuple[float, float], epsilon: float,
) -> None:  # fmt: skip
    """Update weight and moments in place; all are contiguous. `step` counts from 1, `seed` has 31 bits."""
    elements = weight.numel()
    _update[(triton.cdiv(elements, _BLOCK),)](
        weight, gradient, mean, square, elements, seed, rate, decay, *betas, epsilon,
        1 / (1 - betas[0] ** step), (1 - betas[1] ** step) ** -0.5,
        round_moments=mean.dtype == torch.bfloat16, block=_BLOCK,
    )  # fmt: skip
