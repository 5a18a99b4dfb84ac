"""A student's loss against some words of a teacher, and its gradient, for one chunk of positions.

The gradient of KL(teacher || student) by the logits is softmax - teacher: dense, but for the few words that the teacher
names it is the student's own softmax. So the softmax is written once, and then the named words are overwritten with
their right values, which are computed in float32: subtracting from a rounded 0.996 would leave little of a small
difference. Every named word gets its whole value, so words named twice do no harm.

Shapes: C positions, V vocabulary, K named words (the text's own token is the last of them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joulelab.distill.chunked import Projection


@dataclass(frozen=True)
class KdWeights:
    """loss = ce CE + kl T^2 KL, summed over positions."""

    ce: float
    kl: float
    temperature: float


class Labels(NamedTuple):
    """The text's own tokens."""

    words_C: Tensor
    counted_C1: Tensor | None = None
    """1.0, or 0.0 where a chunk is only filled up; nothing: all count."""

    def counted(self, value: float) -> Tensor | float:
        return value if self.counted_C1 is None else value * self.counted_C1


class Named(NamedTuple):
    """A chunk of `targets.SparseTargets`."""

    ids_CK: Tensor
    weights_CK: Tensor
    constant_C: Tensor
    ghost_C: Tensor | None
    gold_C: Tensor | None


def sparse_chunk(
    own_CD: Tensor, own: Projection, labels: Labels, said: Named, vocabulary: int, weights: KdWeights, scale: float
) -> tuple[Tensor, Tensor]:
    """Sums of (CE, T^2 KL), and the gradient of their weighted sum by the logits in the computation's numbers."""
    T = weights.temperature
    ce, slope = labels.counted(weights.ce), labels.counted(weights.kl * T)
    own_CV = F.linear(own_CD, own.weight_VD, own.bias_V).float()
    is_one = T == 1 and vocabulary >= own_CV.shape[1]  # CE and KL then share one softmax
    warm_CV = own_CV if is_one else _shared(own_CV, vocabulary) / T
    norm_C1 = own_CV.logsumexp(-1, keepdim=True)
    warm_norm_C1 = norm_C1 if is_one else warm_CV.logsumexp(-1, keepdim=True)
    grad_CV = times_in_place((warm_CV - warm_norm_C1).exp_(), slope + ce if is_one else slope)
    if not is_one:
        grad_CV = grad_CV + ce * (own_CV - norm_C1).exp()

    named_CK = torch.cat([said.ids_CK, labels.words_C[:, None]], 1)
    at_CK = own_CV.gather(1, named_CK)
    own_log_CK, warm_log_CK = at_CK - norm_C1, at_CK / T - warm_norm_C1
    same_CKK = named_CK[:, :, None] == named_CK[:, None, :]
    gold_C = torch.zeros_like(said.constant_C) if said.gold_C is None else said.gold_C
    said_CK = torch.cat([said.weights_CK, gold_C[:, None]], 1)
    kl_C = said.constant_C + _gold_constant(said_CK, same_CKK) - (said_CK * warm_log_CK).sum(-1)
    asked_CK = slope * said_CK + ce * _last_only(said_CK)
    right_CK = ce * own_log_CK.exp() + slope * warm_log_CK.exp()
    right_CK = right_CK - torch.where(same_CKK, asked_CK[:, None, :], 0.0).sum(-1)

    if said.ghost_C is not None:
        rest_CV = warm_CV.scatter(1, said.ids_CK, -torch.inf)
        rest_norm_C1 = rest_CV.logsumexp(-1, keepdim=True)
        rest_norm_C1 = rest_norm_C1.masked_fill(rest_norm_C1.isneginf(), 0.0)  # of no word at all: -inf minus -inf
        has_rest_C1, ghost_C1 = said.ghost_C[:, None] > 0, said.ghost_C[:, None]
        kl_C = kl_C - torch.where(has_rest_C1, ghost_C1 * (rest_norm_C1 - warm_norm_C1), 0.0).sum(-1)
        lumped_C1 = slope * torch.where(has_rest_C1, ghost_C1, 0.0)
        grad_CV = grad_CV - lumped_C1 * (rest_CV - rest_norm_C1).exp()
        # the text's own token is part of the rest unless the teacher names it
        in_rest_C1 = ~same_CKK[:, -1, :-1].any(-1, keepdim=True)
        own_rest_C1 = torch.where(in_rest_C1, lumped_C1 * (at_CK[:, -1:] / T - rest_norm_C1).exp(), 0.0)
        right_CK = right_CK - own_rest_C1 * _last_only(said_CK)

    grad_CV = times_in_place(grad_CV, scale).to(own_CD.dtype)
    grad_CV.scatter_(1, named_CK, (right_CK * scale).to(own_CD.dtype))
    counted = labels.counted(1.0)
    return torch.stack([-(counted * own_log_CK[:, -1:]).sum(), T * T * (counted * kl_C[:, None]).sum()]), grad_CV


def times_in_place(own_CV: Tensor, factor: Tensor | float) -> Tensor:
    """Of a tensor that nobody else holds; a factor of 1 spares the pass."""
    return own_CV if isinstance(factor, float | int) and factor == 1 else own_CV.mul_(factor)


def _shared(own_CV: Tensor, vocabulary: int) -> Tensor:
    """Logits that pad the student's head take no part in a comparison with the teacher."""
    if vocabulary >= own_CV.shape[1]:
        return own_CV
    words_V = torch.arange(own_CV.shape[1], device=own_CV.device)
    return torch.where(words_V < vocabulary, own_CV, -torch.inf)


def _last_only(like_CK: Tensor) -> Tensor:
    """1 in the last column, which is the text's own token."""
    words = like_CK.shape[1]
    return (torch.arange(words, device=like_CK.device) == words - 1).float()


def _gold_constant(said_CK: Tensor, same_CKK: Tensor) -> Tensor:
    """What p log p grows by when the text's own token gets the rest of the probability on top of its own."""
    before_C = torch.where(same_CKK[:, -1, :-1], said_CK[:, :-1], 0.0).sum(-1)
    with_gold_C = before_C + said_CK[:, -1]
    return torch.xlogy(with_gold_C, with_gold_C) - torch.xlogy(before_C, before_C)
