"""Distillation losses: small pure functions that return a sum over the batch, one value per sample added up.

Shapes: B batch, C classes, H width. The teacher's side never carries gradients.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def cross_entropy_sum(logits_BC: Tensor, labels_B: Tensor) -> Tensor:
    return F.cross_entropy(logits_BC.float(), labels_B, reduction="sum")


def soft_target_kl_sum(student_BC: Tensor, teacher_BC: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student) at temperature T; T^2 keeps the gradient's size independent of T."""
    student_log = F.log_softmax(student_BC.float() / temperature, dim=-1)
    teacher_log = F.log_softmax(teacher_BC.float() / temperature, dim=-1)
    return temperature**2 * F.kl_div(student_log, teacher_log, reduction="sum", log_target=True)


def feature_mse_sum(student_BH: Tensor, teacher_BH: Tensor) -> Tensor:
    """Squared distance of pooled features, averaged over the width so that it does not grow with the model."""
    return (student_BH.float() - teacher_BH.float()).square().mean(dim=-1).sum()
