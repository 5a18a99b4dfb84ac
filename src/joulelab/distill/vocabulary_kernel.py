"""KL divergence and cross-entropy of a chunk of positions, with their gradient, as one Triton kernel.

A program takes a position: one pass over the vocabulary finds maximum and sum of exponentials (Milakov and Gimelshein,
2018), a second one, whose reads come from the cache of the GPU, adds up the terms and overwrites the student's logits
with the gradient. So logits are read from memory once and the gradient is written once. What torch compiles from the
same formulas (`chunked.chunk_terms`) makes more passes and takes twice the time (docs/results.md).

Shapes: C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

_WORDS = 4096
_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _terms(  # type: ignore[no-untyped-def]
    student, teacher, targets, weights, divergences, entropies, words, temperature, kl_weight, ce_weight, scale,
    has_kl: tl.constexpr, has_ce: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    student += row.to(tl.int64) * words
    teacher += row.to(tl.int64) * words
    column = tl.arange(0, block)
    inverse = 1.0 / temperature
    top = tl.full([], -float("inf"), tl.float32)
    teacher_top = tl.full([], -float("inf"), tl.float32)
    # Sums of exponentials relative to the largest logit so far: of the student at the temperature and at 1, and of the
    # teacher.
    total = tl.zeros([], tl.float32)
    plain_total = tl.zeros([], tl.float32)
    teacher_total = tl.zeros([], tl.float32)
    for begin in range(0, words, block):
        inside = begin + column < words
        z = tl.load(student + begin + column, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, 0))
        if has_kl:
            total = total * tl.exp((top - higher) * inverse) + tl.sum(tl.exp((z - higher) * inverse), 0)
            t = tl.load(teacher + begin + column, mask=inside, other=-float("inf")).to(tl.float32)
            teacher_higher = tl.maximum(teacher_top, tl.max(t, 0))
            teacher_total = teacher_total * tl.exp((teacher_top - teacher_higher) * inverse)
            teacher_total += tl.sum(tl.exp((t - teacher_higher) * inverse), 0)
            teacher_top = teacher_higher
        if has_ce:
            plain_total = plain_total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
        top = higher
    weight = tl.load(weights + row)
    target = -1
    if has_ce:
        target = tl.load(targets + row).to(tl.int32)
        entropy = tl.zeros([], tl.float32)
        if target >= 0:
            entropy = tl.log(plain_total) + top - tl.load(student + target).to(tl.float32)
        tl.store(entropies + row, entropy)
        ce_weight = tl.where(target >= 0, ce_weight, 0.0)
    log_total = tl.log(total)
    teacher_log_total = tl.log(teacher_total)
    divergence = tl.zeros([], tl.float32)
    tl.debug_barrier()  # the target's logit is read before it is overwritten
    for begin in range(0, words, block):
        inside = begin + column < words
        z = tl.load(student + begin + column, mask=inside, other=-float("inf")).to(tl.float32)
        gradient = tl.zeros([block], tl.float32)
        if has_kl:
            t = tl.load(teacher + begin + column, mask=inside, other=-float("inf")).to(tl.float32)
            log_q = (z - top) * inverse - log_total
            log_p = (t - teacher_top) * inverse - teacher_log_total
            p = tl.exp(log_p)
            # A probability of 0 has the divergence 0 and not 0 times infinity.
            divergence += tl.sum(tl.where(p > 0, p * (log_p - log_q), 0.0), 0)
            # The derivative by z / T is q - p. By the chain rule T^2 d/dz is T times that.
            gradient += weight * kl_weight * temperature * (tl.exp(log_q) - p)
        if has_ce:
            hit = tl.where(begin + column == target, 1.0, 0.0)
            gradient += ce_weight * (tl.exp(z - top) / plain_total - hit)
        tl.store(student + begin + column, (gradient * scale).to(student.dtype.element_ty), mask=inside)
    if has_kl:
        tl.store(divergences + row, divergence * weight * temperature * temperature)


def overwrite_with_gradient(
    student_CV: Tensor, teacher_CV: Tensor | None, targets_C: Tensor | None, weights_C: Tensor,
    *, kl: float, ce: float, temperature: float, scale: float,
) -> Tensor:  # fmt: skip
    """T^2 KL and CE of each position; the student's logits become `scale` times the gradient of their weighted sum.
    Both matrices are contiguous and have one shape."""
    positions, words = student_CV.shape
    has_kl, has_ce = teacher_CV is not None and kl > 0, targets_C is not None and ce > 0
    found_2C = student_CV.new_zeros(2, positions, dtype=torch.float32)
    _terms[(positions,)](
        student_CV, student_CV if teacher_CV is None else teacher_CV,
        weights_C if targets_C is None else targets_C, weights_C, found_2C[0], found_2C[1], words, temperature, kl,
        ce, scale, has_kl=has_kl, has_ce=has_ce, block=_WORDS, num_warps=_WARPS,
    )  # fmt: skip
    return found_2C
