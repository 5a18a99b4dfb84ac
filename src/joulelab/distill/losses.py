"""Distillation losses: small pure functions that return a sum over the batch, one value per sample added up.

Shapes: B batch, C classes, H width. The teacher's side never carries gradients.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joulelab.distill.divergences import LOWEST_LOG, teacher_log_softmax


def cross_entropy_sum(logits_BC: Tensor, labels_B: Tensor) -> Tensor:
    return F.cross_entropy(logits_BC.float(), labels_B, reduction="sum")


def soft_target_kl_sum(
    student_BC: Tensor, teacher_BC: Tensor, temperature: float, times_T_squared: bool = True
) -> Tensor:
    """T^2 KL(teacher || student) at temperature T; T^2 keeps the gradient's size independent of T."""
    student_log = F.log_softmax(student_BC.float() / temperature, dim=-1).clamp(min=LOWEST_LOG)
    teacher_log = teacher_log_softmax(teacher_BC, temperature)
    scale = temperature**2 if times_T_squared else 1.0
    return scale * F.kl_div(student_log, teacher_log, reduction="sum", log_target=True)


def feature_mse_sum(student: Tensor, teacher: Tensor, normalize: bool = False) -> Tensor:
    """Squared distance of features ([B, H], or maps [B, C, H, W]), averaged over all but the batch so that it does not
    grow with the model. `normalize`: of the features' directions only, each sample's brought to length 1 first."""
    student_BH, teacher_BH = student.float().flatten(1), teacher.float().flatten(1)
    if normalize:
        student_BH, teacher_BH = F.normalize(student_BH, dim=-1), F.normalize(teacher_BH, dim=-1)
    return (student_BH - teacher_BH).square().mean(dim=-1).sum()
