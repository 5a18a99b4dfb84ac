"""Losses over a vocabulary, as small pure functions that return sums over positions.

Sums, because the loop divides by the true count: a mean inside would make the gradient depend on how data is split.

Shapes: N positions, V vocabulary, D hidden. The teacher's side never carries gradients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

NO_TARGET = -100
"""In place of a target where none is asked for; torch's cross-entropy skips it too."""


def response_kl_sum(student_NV: Tensor, teacher_NV: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student) at temperature T; T^2 keeps the gradient's size independent of T."""
    student_log = F.log_softmax(student_NV.float() / temperature, dim=-1)
    teacher_log = F.log_softmax(teacher_NV.float() / temperature, dim=-1)
    return temperature**2 * F.kl_div(student_log, teacher_log, reduction="sum", log_target=True)


def token_cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV.float(), targets_N, ignore_index=NO_TARGET, reduction="sum")


def logit_mse_sum(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """Squared distance summed over the vocabulary, not averaged: so did DistilBERT's authors."""
    return (student_NV.float() - teacher_NV.float()).square().sum()


def cosine_distance_sum(student_ND: Tensor, teacher_ND: Tensor, counted_N: Tensor | None = None) -> Tensor:
    """1 - cos of the angle between hidden states; positions count as much as `counted_N` says, or all alike."""
    distance_N = 1.0 - F.cosine_similarity(student_ND.float(), teacher_ND.float(), dim=-1)
    return distance_N.sum() if counted_N is None else torch.dot(distance_N, counted_N)
