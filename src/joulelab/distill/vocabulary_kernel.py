"""Divergence from a teacher and cross-entropy of a chunk of positions, with their gradient, as one Triton kernel.

A program takes a position: one pass over the vocabulary finds maximum and sum of exponentials (Milakov and Gimelshein,
2018), a last one, whose reads come from the cache of the GPU, adds up the terms and overwrites the student's logits
with the gradient; reverse KL and Jensen-Shannon divergence need a pass in between, because their gradient contains
their value. So logits are read from memory once and the gradient is written once. What torch compiles from the same
formulas (`chunked.chunk_terms`, `losses`) makes more passes and takes twice the time (docs/results.md).

Shapes: C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from joulelab.distill.losses import LOWEST_LOG

_WORDS = 4096
_WARPS = 8
_KINDS = {"forward": 0, "reverse": 1, "jsd": 2}


@triton.jit
def _softplus(x):  # type: ignore[no-untyped-def]
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _log_probabilities(logits, columns, shared, top, inverse, log_total, lowest):  # type: ignore[no-untyped-def]
    """Finite, also of columns that are not compared and of tokens that a teacher excludes with -inf."""
    return tl.maximum(tl.where(columns < shared, (logits - top) * inverse - log_total, lowest), lowest)


@triton.jit  # type: ignore[untyped-decorator]
def _terms(  # type: ignore[no-untyped-def]
    student, teacher, targets, weights, divergences, entropies, words, teacher_words, shared, temperature, kl_weight,
    ce_weight, scale, beta, odds, log_beta, log_rest, lowest,
    has_kl: tl.constexpr, has_ce: tl.constexpr, kind: tl.constexpr, all_shared: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    student += row.to(tl.int64) * words
    teacher += row.to(tl.int64) * teacher_words
    column = tl.arange(0, block)
    inverse = 1.0 / temperature
    minus_infinity = -float("inf")
    # Sums of exponentials relative to the largest logit so far: of the student at 1, and of student and teacher at the
    # temperature over the columns that they share.
    plain_top = tl.full([], minus_infinity, tl.float32)
    top = tl.full([], minus_infinity, tl.float32)
    teacher_top = tl.full([], minus_infinity, tl.float32)
    plain_total = tl.zeros([], tl.float32)
    total = tl.zeros([], tl.float32)
    teacher_total = tl.zeros([], tl.float32)
    for begin in range(0, words, block):
        columns = begin + column
        z = tl.load(student + columns, mask=columns < words, other=minus_infinity).to(tl.float32)
        if has_ce:
            plain_higher = tl.maximum(plain_top, tl.max(z, 0))
            plain_total = plain_total * tl.exp(plain_top - plain_higher) + tl.sum(tl.exp(z - plain_higher), 0)
            plain_top = plain_higher
        if has_kl:
            if has_ce and all_shared:
                higher = plain_higher
            else:
                z = tl.where(columns < shared, z, minus_infinity)
                higher = tl.maximum(top, tl.max(z, 0))
            total = total * tl.exp((top - higher) * inverse) + tl.sum(tl.exp((z - higher) * inverse), 0)
            top = higher
            t = tl.load(teacher + columns, mask=columns < shared, other=minus_infinity).to(tl.float32)
            higher = tl.maximum(teacher_top, tl.max(t, 0))
            teacher_total = teacher_total * tl.exp((teacher_top - higher) * inverse)
            teacher_total += tl.sum(tl.exp((t - higher) * inverse), 0)
            teacher_top = higher
    weight = tl.load(weights + row).to(tl.float32)
    target = -1
    if has_ce:
        target = tl.load(targets + row).to(tl.int32)
        entropy = tl.zeros([], tl.float32)
        if target >= 0:
            entropy = tl.log(plain_total) + plain_top - tl.load(student + target).to(tl.float32)
        tl.store(entropies + row, entropy)
        ce_weight = tl.where(target >= 0, ce_weight, 0.0)
    log_total = tl.log(total)
    teacher_log_total = tl.log(teacher_total)
    divergence = tl.zeros([], tl.float32)
    student_sum = tl.zeros([], tl.float32)
    if has_kl and kind > 0:
        teacher_sum = tl.zeros([], tl.float32)
        for begin in range(0, words, block):
            columns = begin + column
            z = tl.load(student + columns, mask=columns < words, other=minus_infinity).to(tl.float32)
            t = tl.load(teacher + columns, mask=columns < shared, other=minus_infinity).to(tl.float32)
            log_q = _log_probabilities(z, columns, shared, top, inverse, log_total, lowest)
            log_p = _log_probabilities(t, columns, shared, teacher_top, inverse, teacher_log_total, lowest)
            if kind == 1:
                student_sum += tl.sum(tl.exp(log_q) * (log_q - log_p), 0)
            else:
                student_sum += tl.sum(tl.exp(log_q) * (-log_rest - _softplus(odds - (log_q - log_p))), 0)
                teacher_sum += tl.sum(tl.exp(log_p) * (-log_beta - _softplus(log_q - log_p - odds)), 0)
        divergence = student_sum if kind == 1 else (1.0 - beta) * student_sum + beta * teacher_sum
    tl.debug_barrier()  # the target's logit is read before it is overwritten
    for begin in range(0, words, block):
        columns = begin + column
        z = tl.load(student + columns, mask=columns < words, other=minus_infinity).to(tl.float32)
        gradient = tl.zeros([block], tl.float32)
        if has_kl:
            t = tl.load(teacher + columns, mask=columns < shared, other=minus_infinity).to(tl.float32)
            log_q = _log_probabilities(z, columns, shared, top, inverse, log_total, lowest)
            log_p = _log_probabilities(t, columns, shared, teacher_top, inverse, teacher_log_total, lowest)
            q = tl.exp(log_q)
            # The slope is the derivative by z / T. By the chain rule T^2 d/dz is T times that.
            if kind == 0:
                p = tl.exp(log_p)
                divergence += tl.sum(p * (log_p - log_q), 0)
                slope = q - p
            elif kind == 1:
                slope = q * (log_q - log_p - student_sum)
            else:
                slope = (1.0 - beta) * q * (-log_rest - _softplus(odds - (log_q - log_p)) - student_sum)
            gradient += weight * kl_weight * temperature * slope
        if has_ce:
            hit = tl.where(columns == target, 1.0, 0.0)
            gradient += ce_weight * (tl.exp(z - plain_top) / plain_total - hit)
        tl.store(student + columns, (gradient * scale).to(student.dtype.element_ty), mask=columns < words)
    if has_kl:
        tl.store(divergences + row, divergence * weight * temperature * temperature)


def overwrite_with_gradient(
    student_CV: Tensor, teacher_CV: Tensor | None, targets_C: Tensor | None, weights_C: Tensor,
    *, kl: float, ce: float, temperature: float, scale: float, divergence: str = "forward", beta: float = 0.5,
    shared: int | None = None,
) -> Tensor:  # fmt: skip
    """T^2 times the divergence (with the weight of its position) and CE of each position; the student's logits become
    `scale` times the gradient of their weighted sum. Both matrices are contiguous. `shared`: the columns that student
    and teacher have in common; None: all."""
    positions, words = student_CV.shape
    has_kl, has_ce = teacher_CV is not None and kl > 0, targets_C is not None
    shared = words if shared is None else min(shared, words)
    teacher_CV = student_CV if teacher_CV is None else teacher_CV
    found_2C = student_CV.new_zeros(2, positions, dtype=torch.float32)
    log_beta, log_rest = math.log(beta), math.log1p(-beta)
    _terms[(positions,)](
        student_CV, teacher_CV, weights_C if targets_C is None else targets_C, weights_C, found_2C[0], found_2C[1],
        words, teacher_CV.shape[1], shared, temperature, kl, ce, scale, beta, log_beta - log_rest, log_beta, log_rest,
        LOWEST_LOG, has_kl=has_kl, has_ce=has_ce, kind=_KINDS[divergence], all_shared=shared == words, block=_WORDS,
        num_warps=_WARPS,
    )  # fmt: skip
    return found_2C
