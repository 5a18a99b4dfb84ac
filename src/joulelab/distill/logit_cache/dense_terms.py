"""A student's loss against all of a teacher's distribution, or against the text alone, for one chunk of positions.

Shapes: C positions, V student's vocabulary, W words of both, E teacher's features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joulelab.distill.chunked import Projection
from joulelab.distill.logit_cache.sparse_terms import KdWeights, Labels, times_in_place
from joulelab.distill.losses import DIVERGENCES, teacher_log_softmax


def dense_chunk(
    own_CD: Tensor,
    own: Projection,
    labels: Labels,
    said_CE: Tensor,
    said: Projection,
    vocabulary: int,
    divergence: str,
    weights: KdWeights,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Sums of (CE, T^2 times the divergence), and the gradient of their weighted sum by the logits."""
    T = weights.temperature
    own_CV = F.linear(own_CD, own.weight_VD, own.bias_V).float()
    said_log_CW = teacher_log_softmax(F.linear(said_CE, said.weight_VD, said.bias_V)[:, :vocabulary], T)
    apart_C, slope_CW = DIVERGENCES[divergence](F.log_softmax(own_CV[:, :vocabulary] / T, -1), said_log_CW)
    ce, grad_CV = _label_terms(own_CV, labels, weights.ce)
    padding = own_CV.shape[1] - slope_CW.shape[1]
    grad_CV = grad_CV + F.pad(labels.counted(weights.kl * T) * slope_CW, (0, padding))
    divergence_sum = T * T * (labels.counted(1.0) * apart_C[:, None]).sum()
    return torch.stack([ce, divergence_sum]), times_in_place(grad_CV, scale).to(own_CD.dtype)


def label_chunk(
    own_CD: Tensor, own: Projection, labels: Labels, weights: KdWeights, scale: float
) -> tuple[Tensor, Tensor]:
    """Without a teacher: sums of (CE, 0)."""
    own_CV = F.linear(own_CD, own.weight_VD, own.bias_V).float()
    ce, grad_CV = _label_terms(own_CV, labels, weights.ce)
    return torch.stack([ce, torch.zeros_like(ce)]), times_in_place(grad_CV, scale).to(own_CD.dtype)


def _label_terms(own_CV: Tensor, labels: Labels, weight: float) -> tuple[Tensor, Tensor]:
    own_log_CV = F.log_softmax(own_CV, -1)
    if not torch.compiler.is_compiling():
        # a pass over all these numbers costs about a tenth of the product that made them: as few as can be
        words_C1 = labels.words_C[:, None]
        ce = -(labels.counted(1.0) * own_log_CV.gather(1, words_C1)).sum()
        grad_CV = own_log_CV.exp_().scatter_add_(1, words_C1, own_log_CV.new_full(words_C1.shape, -1.0))
        return ce, times_in_place(grad_CV, labels.counted(weight))
    # compared, not scattered: this way all of it is one kernel when compiled
    hit_CV = torch.arange(own_CV.shape[1], device=own_CV.device) == labels.words_C[:, None]
    ce = -(labels.counted(1.0) * torch.where(hit_CV, own_log_CV, 0.0)).sum()
    return ce, labels.counted(weight) * (own_log_CV.exp() - hit_CV.float())
