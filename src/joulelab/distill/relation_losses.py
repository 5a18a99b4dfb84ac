"""Relation distillation (Park et al., 2019): the student copies how samples lie to each other, not where they lie.

Distances between pairs, each over the batch's mean distance, and angles between triplets are compared under the Huber
loss; widths of student and teacher need not agree. A relation needs company: these are the losses that depend on which
samples meet in a micro-batch, the named exceptions to the rule that any split of the data gives the same gradient. They
are means over pairs or triplets, times the batch's size, so that they weigh like the sums beside them.

Shapes: B batch, H width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_TINY = 1e-12  # under the root: two equal samples have distance 0, where the root has no slope


def distance_relation_sum(student_BH: Tensor, teacher_BH: Tensor) -> Tensor:
    """Over the ordered pairs of different samples; nothing to compare in a batch of one."""
    others_BB = ~torch.eye(len(student_BH), dtype=torch.bool, device=student_BH.device)
    with torch.no_grad():
        wanted_BB = _relative_distances(teacher_BH.float(), others_BB)
    found_BB = _relative_distances(student_BH.float(), others_BB)
    return _mean_over(F.smooth_l1_loss(found_BB, wanted_BB, reduction="none"), others_BB) * len(student_BH)


def angle_relation_sum(student_BH: Tensor, teacher_BH: Tensor) -> Tensor:
    """Over the ordered triplets of different samples: the cosine of the angle at the middle one."""
    with torch.no_grad():
        wanted_BBB = _cosines(teacher_BH.float())
    found_BBB = _cosines(student_BH.float())
    others_BB = ~torch.eye(len(student_BH), dtype=torch.bool, device=student_BH.device)
    # [j, i, k]: i and k are seen from j, and all three differ
    distinct_BBB = others_BB[:, :, None] & others_BB[:, None, :] & others_BB[None, :, :]
    return _mean_over(F.smooth_l1_loss(found_BBB, wanted_BBB, reduction="none"), distinct_BBB) * len(student_BH)


def _relative_distances(features_BH: Tensor, others_BB: Tensor) -> Tensor:
    """By differences, not by dot products: those lose small distances to rounding."""
    squares_BB = (features_BH[:, None] - features_BH[None, :]).square().sum(dim=-1)
    distances_BB = squares_BB.clamp(min=_TINY).sqrt() * others_BB
    return distances_BB / _mean_over(distances_BB, others_BB).clamp(min=_TINY)


def _cosines(features_BH: Tensor) -> Tensor:
    """[j, i, k] -> cos of the angle between i and k as seen from j."""
    seen_BBH = F.normalize(features_BH[None, :] - features_BH[:, None], dim=-1)
    with torch.autocast(features_BH.device.type, enabled=False):  # the products would be rounded to bf16
        return seen_BBH @ seen_BBH.transpose(1, 2)


def _mean_over(values: Tensor, mask: Tensor) -> Tensor:
    """Without indexing by the mask: on a GPU its unknown length would make the host wait."""
    return (values * mask).sum() / mask.sum().clamp(min=1)
