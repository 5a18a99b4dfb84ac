"""Distillation losses: small pure functions that return a sum over the batch.

Sums, because the training loop divides by the true count of samples or tokens: a mean inside would make the gradient
depend on how the data is split into micro-batches. The teacher's side never carries gradients.

Shapes: B batch, C classes, H width of features; N positions, V vocabulary, D hidden width. A chunk of positions is C in
the divergences, which are computed chunk by chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

NO_TARGET = -100
"""Marks a position without a target; torch's cross-entropy skips it too."""
LOWEST_LOG = -1e4
"""Replaces the log-probability -inf: its exponential is 0 as well, and 0 times it is 0 and not NaN."""
_TINY = 1e-12  # under the root: two equal samples have distance 0, where the root has no derivative

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


# classes


def cross_entropy_sum(logits_BC: Tensor, labels_B: Tensor) -> Tensor:
    return F.cross_entropy(logits_BC.float(), labels_B, reduction="sum")


def soft_target_kl_sum(
    student_BC: Tensor, teacher_BC: Tensor, temperature: float, times_T_squared: bool = True
) -> Tensor:
    """T^2 KL(teacher || student) at temperature T (Hinton et al., 2015); T^2 keeps the gradient's size independent of
    T."""
    student_log = F.log_softmax(student_BC.float() / temperature, dim=-1).clamp(min=LOWEST_LOG)
    teacher_log = teacher_log_softmax(teacher_BC, temperature)
    # The gradient of KL at temperature T by a logit is (softmax(z/T) - softmax(t/T)) / T, and for
    # large T the bracket shrinks by another 1 / T: about (z - t) / (V T^2) (Hinton et al., 2015,
    # section 2.1). T^2 restores the size, so that alpha keeps its meaning when T is tuned.
    scale = temperature**2 if times_T_squared else 1.0
    # `log_target`: p log p is computed as exp(l) l, which is exactly 0 for l = `LOWEST_LOG` instead
    # of 0 times -inf.
    return scale * F.kl_div(student_log, teacher_log, reduction="sum", log_target=True)


# features


def pool(hidden_BTH: Tensor, mask_BT: Tensor, how: str) -> Tensor:
    """One vector per text: the first token's (`cls`), or the mean over the tokens that are not padding (`mean`)."""
    if how == "cls":
        return hidden_BTH[:, 0]
    weights_BT1 = mask_BT.unsqueeze(-1).to(hidden_BTH.dtype)
    return (hidden_BTH * weights_BT1).sum(dim=1) / weights_BT1.sum(dim=1).clamp(min=1)


def feature_mse_sum(student: Tensor, teacher: Tensor, normalize: bool = False) -> Tensor:
    """Squared distance of features ([B, H], or maps [B, C, H, W]), averaged over all but the batch so that it does not
    grow with the model. `normalize`: of the features' directions only, each sample's scaled to length 1 first."""
    student_BH, teacher_BH = student.float().flatten(1), teacher.float().flatten(1)
    if normalize:
        student_BH, teacher_BH = F.normalize(student_BH, dim=-1), F.normalize(teacher_BH, dim=-1)
    return (student_BH - teacher_BH).square().mean(dim=-1).sum()


def cosine_distance_sum(student_ND: Tensor, teacher_ND: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """1 - cos of the angle between hidden states, weighted by position where weights are given."""
    distance_N = 1.0 - F.cosine_similarity(student_ND.float(), teacher_ND.float(), dim=-1)
    return distance_N.sum() if weights_N is None else torch.dot(distance_N, weights_N)


# relations between samples (Park et al., 2019): distances between pairs and angles between triplets, under the Huber
# loss. These depend on which samples share a micro-batch; they are the only losses here that do. They are means over
# pairs or triplets, times the batch size, so that they have the same scale as the sums above.


def distance_relation_sum(student_BH: Tensor, teacher_BH: Tensor) -> Tensor:
    """Over the ordered pairs of different samples, each distance divided by the batch's mean; 0 for a batch of one."""
    others_BB = ~torch.eye(len(student_BH), dtype=torch.bool, device=student_BH.device)
    with torch.no_grad():
        teacher_BB = _relative_distances(teacher_BH.float(), others_BB)
    student_BB = _relative_distances(student_BH.float(), others_BB)
    return _masked_mean(F.smooth_l1_loss(student_BB, teacher_BB, reduction="none"), others_BB) * len(student_BH)


def angle_relation_sum(student_BH: Tensor, teacher_BH: Tensor) -> Tensor:
    """Over the ordered triplets of different samples: the cosine of the angle at the middle one."""
    with torch.no_grad():
        teacher_BBB = _cosines(teacher_BH.float())
    student_BBB = _cosines(student_BH.float())
    others_BB = ~torch.eye(len(student_BH), dtype=torch.bool, device=student_BH.device)
    # [j, i, k]: i and k seen from j, all three different
    distinct_BBB = others_BB[:, :, None] & others_BB[:, None, :] & others_BB[None, :, :]
    return _masked_mean(F.smooth_l1_loss(student_BBB, teacher_BBB, reduction="none"), distinct_BBB) * len(student_BH)


def _relative_distances(features_BH: Tensor, others_BB: Tensor) -> Tensor:
    """From differences, not from dot products: those lose small distances to rounding."""
    squares_BB = (features_BH[:, None] - features_BH[None, :]).square().sum(dim=-1)
    # Divided by the batch's mean distance below, so that only relative distances are compared:
    # widths and scales of teacher and student differ (Park et al., 2019, eq. 6).
    distances_BB = squares_BB.clamp(min=_TINY).sqrt() * others_BB
    return distances_BB / _masked_mean(distances_BB, others_BB).clamp(min=_TINY)


def _cosines(features_BH: Tensor) -> Tensor:
    """[j, i, k] -> cos of the angle between i and k as seen from j."""
    # normalize clamps the length at 1e-12: i = j has no direction, gives 0, and is masked out.
    directions_BBH = F.normalize(features_BH[None, :] - features_BH[:, None], dim=-1)
    with torch.autocast(features_BH.device.type, enabled=False):  # the products would be rounded to bf16
        return directions_BBH @ directions_BBH.transpose(1, 2)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Without indexing by the mask: on a GPU the unknown length of the result would make the host wait."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


# tokens


def response_kl_sum(student_NV: Tensor, teacher_NV: Tensor, temperature: float) -> Tensor:
    return soft_target_kl_sum(student_NV, teacher_NV, temperature)


def token_cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV.float(), targets_N, ignore_index=NO_TARGET, reduction="sum")


def logit_mse_sum(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """Squared distance summed over the vocabulary, not averaged, as in DistilBERT's training script."""
    return logit_difference(student_NV.float(), teacher_NV.float()).square().sum()


def logit_difference(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """Student minus teacher; 0 where the teacher excludes a token with -inf, because every logit is infinitely far from
    that."""
    return torch.where(teacher_NV.isneginf(), 0.0, student_NV - teacher_NV)


# divergences with their gradients in closed form: log-probabilities in, the divergence at every position and its
# derivative by the student's logits out. With logits z / T and the divergence times T^2, as distillation has it, the
# derivative by z is T times that. Where the two distributions are equal bit by bit, all three are exactly 0.


def teacher_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Finite, also where a teacher excludes a token with a logit of -inf; without gradients."""
    return F.log_softmax(logits.detach().float() / temperature, -1).clamp_(min=LOWEST_LOG)


def forward_kl(student_log_CV: Tensor, teacher_log_CV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || student): the student covers everything the teacher may write."""
    # d KL(p || q) / d z_j = q_j - p_j for q = softmax(z), because the derivative of log q_i by z_j
    # is [i = j] - q_j and sum p_i = 1.
    teacher_CV = teacher_log_CV.exp()
    return (teacher_CV * (teacher_log_CV - student_log_CV)).sum(-1), student_log_CV.exp() - teacher_CV


def reverse_kl(student_log_CV: Tensor, teacher_log_CV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(student || teacher): the student writes nothing the teacher would not. A token that the teacher excludes
    counts with `LOWEST_LOG`, because the true divergence would be infinite."""
    student_CV, difference_CV = student_log_CV.exp(), student_log_CV - teacher_log_CV
    # d KL(q || p) / d z_j = q_j (log q_j - log p_j - KL): the derivative of q_i is q_i ([i = j] -
    # q_j), and the derivative of log q inside the sum adds up to 0.
    divergence_C = (student_CV * difference_CV).sum(-1)
    return divergence_C, student_CV * (difference_CV - divergence_C[:, None])


def jensen_shannon(student_log_CV: Tensor, teacher_log_CV: Tensor, beta: float = 0.5) -> tuple[Tensor, Tensor]:
    """beta KL(teacher || m) + (1 - beta) KL(student || m) with the mixture m = beta teacher + (1 - beta) student
    (Agarwal et al., 2024, eq. 1). With beta 0.5 it is symmetric and never above ln 2. Divided by beta it approaches the
    forward KL for beta near 0, divided by 1 - beta the reverse KL for beta near 1."""
    difference_CV, odds = student_log_CV - teacher_log_CV, math.log(beta) - math.log1p(-beta)
    # log(student / m) = -log(1 - beta) - log(1 + odds teacher / student), without a sum that would round
    student_part_CV = -math.log1p(-beta) - F.softplus(odds - difference_CV)
    teacher_part_CV = -math.log(beta) - F.softplus(difference_CV - odds)
    student_CV, teacher_CV = student_log_CV.exp(), teacher_log_CV.exp()
    # The terms from m's own derivative cancel, so d JSD / d z_j = (1 - beta) q_j (log(q_j / m_j) - KL(q || m)).
    student_C = (student_CV * student_part_CV).sum(-1)
    divergence_C = (1 - beta) * student_C + beta * (teacher_CV * teacher_part_CV).sum(-1)
    return divergence_C, (1 - beta) * student_CV * (student_part_CV - student_C[:, None])


DIVERGENCES: dict[str, Divergence] = {"forward": forward_kl, "reverse": reverse_kl, "jsd": jensen_shannon}
