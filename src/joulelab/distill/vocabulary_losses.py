"""Losses over a vocabulary, as small pure functions that return sums over positions.

Sums, because the loop divides by the true count: a mean inside would make the gradient depend on how data is split.

Shapes: N positions, V vocabulary, D hidden. The teacher's side never carries gradients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joulelab.distill.losses import soft_target_kl_sum

NO_TARGET = -100
"""In place of a target where none is asked for; torch's cross-entropy skips it too."""


def response_kl_sum(student_NV: Tensor, teacher_NV: Tensor, temperature: float) -> Tensor:
    return soft_target_kl_sum(student_NV, teacher_NV, temperature)


def token_cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV.float(), targets_N, ignore_index=NO_TARGET, reduction="sum")


def logit_mse_sum(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """Squared distance summed over the vocabulary, not averaged: so did DistilBERT's authors."""
    return logits_apart(student_NV.float(), teacher_NV.float()).square().sum()


def logits_apart(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """Student minus teacher; 0 where the teacher rules a word out with -inf, from which every logit is equally far."""
    return torch.where(teacher_NV.isneginf(), 0.0, student_NV - teacher_NV)


def cosine_distance_sum(student_ND: Tensor, teacher_ND: Tensor, counted_N: Tensor | None = None) -> Tensor:
    """1 - cos of the angle between hidden states; positions count as much as `counted_N` says, or all alike."""
    distance_N = 1.0 - F.cosine_similarity(student_ND.float(), teacher_ND.float(), dim=-1)
    return distance_N.sum() if counted_N is None else torch.dot(distance_N, counted_N)
