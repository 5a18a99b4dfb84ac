"""AdamW on bfloat16 weights as one Triton kernel: a weight, its gradient and its moments are read and written once.

The update has almost no arithmetic, so its time is that of its memory traffic: 22 bytes a weight with float32 moments,
14 with bfloat16 ones. The same update by torch's fused AdamW on float32 copies, followed by the rounding, moves about
80 (docs/results.md). A common factor of all gradients (clipping) is applied as they are read.

Random bits come from Philox (Salmon et al., 2011), a function of seed, position and old weight: nothing is stored, and
a weight gets the same bits whatever the size of the grid. Philox is most of the arithmetic: with one call of 10 rounds
per weight the kernel took 1.8 times as long as its memory traffic. So a call serves two weights, each rounding takes 16
of its 128 bits, and it has 7 rounds, the fewest with which the authors found no failure in statistical tests.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_BLOCK = 1024
_ROUNDS = 7


@triton.jit
def _rounded(value, bits):  # type: ignore[no-untyped-def]
    """A float32 number whose lower half is 0: up or down with the probability of the distance (see `bf16_weights`)."""
    carried = (value.to(tl.int32, bitcast=True) + (bits & 0xFFFF).to(tl.int32)) & -65536
    # Infinity and NaN minus themselves are NaN; the carry could turn them into numbers.
    return tl.where(value - value == 0, carried.to(tl.float32, bitcast=True), value)


@triton.jit(do_not_specialize=["seed"])  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    weights, gradients, means, squares, factor, elements, seed, rate, decay, keep_mean, keep_square, epsilon,
    scale_mean, scale_square, round_moments: tl.constexpr, block: tl.constexpr, rounds: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, block)
    program = tl.program_id(0)
    gradient_factor = tl.load(factor)
    # Two weights, `block` apart, share a call: the upper and the lower half of each of its words. The first weight's
    # old value is in the counter too. It makes the compiler compute the bits in the registers in which the weight is
    # used; from the position alone it computes them elsewhere and moves them through shared memory.
    first = program.to(tl.int64) * 2 * block + lane
    old = tl.load(weights + first, mask=first < elements, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
    zero = old * 0
    word_weight, word_mean, word_square, _ = tl.philox(seed, program * block + lane, old, zero, zero, rounds)
    for half in tl.static_range(2):
        place = first + half * block
        inside = place < elements
        weight = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradients + place, mask=inside, other=0.0).to(tl.float32) * gradient_factor
        mean = tl.load(means + place, mask=inside, other=0.0).to(tl.float32)
        square = tl.load(squares + place, mask=inside, other=0.0).to(tl.float32)
        mean = mean + (gradient - mean) * (1 - keep_mean)
        square = square * keep_square + gradient * gradient * (1 - keep_square)
        # Decoupled decay, then the step, as in torch. The scales undo the bias of moments that began at 0.
        weight = weight * (1 - rate * decay)
        weight = weight - rate * scale_mean * mean / (tl.sqrt(square) * scale_square + epsilon)
        weight = _rounded(weight, word_weight >> (16 * half))
        tl.store(weights + place, weight.to(weights.dtype.element_ty), mask=inside)
        if round_moments:
            mean = _rounded(mean, word_mean >> (16 * half))
            square = _rounded(square, word_square >> (16 * half))
        tl.store(means + place, mean.to(means.dtype.element_ty), mask=inside)
        tl.store(squares + place, square.to(squares.dtype.element_ty), mask=inside)


def update(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, factor: Tensor, *, step: int, seed: int,
    rate: float, decay: float, betas: tuple[float, float], epsilon: float,
) -> None:  # fmt: skip
    """Update weight and moments in place; all are contiguous. The gradient is multiplied by `factor`, one float32
    number on the same device. `step` counts from 1, `seed` has 31 bits."""
    elements = weight.numel()
    _update[(triton.cdiv(elements, 2 * _BLOCK),)](
        weight, gradient, mean, square, factor, elements, seed, rate, decay, *betas, epsilon,
        1 / (1 - betas[0] ** step), (1 - betas[1] ** step) ** -0.5,
        round_moments=mean.dtype == torch.bfloat16, block=_BLOCK, rounds=_ROUNDS,
    )  # fmt: skip
