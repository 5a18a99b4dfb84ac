"""What masked and causal students lose to a live teacher, for the chunks of `chunked_projection`.

Shapes: N positions, C positions of a chunk, V vocabulary, D student's features, E teacher's features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joulelab.distill.chunked_projection import (
    ChunkedJob,
    Projection,
    chunked_loss,
    compiled,
    computed_in,
)
from joulelab.distill.divergences import forward_kl, teacher_log_softmax
from joulelab.distill.vocabulary_losses import NO_TARGET, logits_apart


@dataclass(frozen=True)
class TermWeights:
    """What a summed term is multiplied by; a term with weight 0 is not computed."""

    kl: float = 0.0
    mse: float = 0.0
    ce: float = 0.0
    temperature: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in ("kl", "mse", "ce") if getattr(self, name) > 0)

    @property
    def compares(self) -> bool:
        return self.kl > 0 or self.mse > 0


@dataclass(frozen=True, eq=False)
class Positions:
    """Which rows of the features enter, in the order in which they are worked off; all counted on the host."""

    targets_N: Tensor
    """What is to be predicted there, or NO_TARGET."""
    counted_N: Tensor
    """1.0 for a token, 0.0 for padding."""
    entering: int
    """Only the first of them count at all."""
    targeted: int
    """Only the first of them have targets."""
    order_N: Tensor | None = None
    """Rows of the features; nothing: as they lie."""


def chunk_terms(
    student_CV: Tensor, teacher_CV: Tensor | None, targets_C: Tensor | None, counted_C: Tensor, weights: TermWeights
) -> tuple[Tensor, Tensor]:
    """Sums of the terms (kl, mse, ce) over a chunk, and the gradient of their weighted sum by the student's logits."""
    own_CV, zero = student_CV.float(), counted_C.new_zeros(())
    kl = mse = ce = zero
    grad_CV = torch.zeros_like(own_CV)
    T = weights.temperature
    if teacher_CV is not None and weights.kl > 0:
        apart_C, slope_CV = forward_kl(F.log_softmax(own_CV / T, -1), teacher_log_softmax(teacher_CV, T))
        kl = T * T * torch.dot(apart_C, counted_C)
        grad_CV = grad_CV + weights.kl * T * slope_CV
    if teacher_CV is not None and weights.mse > 0:
        apart_CV = logits_apart(own_CV, teacher_CV.float())
        mse = torch.dot(apart_CV.square().sum(-1), counted_C)
        grad_CV = grad_CV + 2 * weights.mse * apart_CV
    grad_CV = grad_CV * counted_C[:, None]
    if targets_C is not None and weights.ce > 0:
        asked_C = (targets_C != NO_TARGET).float()
        log_CV = F.log_softmax(own_CV, -1)
        # compared, not scattered: this way all of it is one kernel when compiled
        hit_CV = torch.arange(own_CV.shape[1], device=own_CV.device) == targets_C[:, None]
        ce = -torch.where(hit_CV, log_CV, 0.0).sum()
        grad_CV = grad_CV + weights.ce * (log_CV.exp() - hit_CV.float()) * asked_C[:, None]
    return torch.stack([kl, mse, ce]), grad_CV


def project_chunk(
    own_CD: Tensor,
    own: Projection,
    said_CE: Tensor | None,
    said: Projection | None,
    targets_C: Tensor | None,
    counted_C: Tensor,
    weights: TermWeights,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Sums of the terms, and the logits' gradient in the computation's numbers."""
    student_CV = F.linear(own_CD, own.weight_VD, own.bias_V)
    teacher_CV = None if said_CE is None or said is None else F.linear(said_CE, said.weight_VD, said.bias_V)
    sums, grad_CV = chunk_terms(student_CV, teacher_CV, targets_C, counted_C, weights)
    return sums, (grad_CV * scale).to(own_CD.dtype)


class VocabularyLoss:
    """The weighted sum of the terms over all positions; holds what one training needs, and no state."""

    def __init__(self, weights: TermWeights, chunk: int, compile_mode: str = "off") -> None:
        self.weights = weights
        self.chunk = chunk
        self.step = compiled(project_chunk, compile_mode)

    def __call__(
        self,
        features_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        positions: Positions,
        said_NE: Tensor | None = None,
        said: Projection | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and the terms it is made of, each a sum without its weight."""
        weights, dtype = self.weights, computed_in(features_ND)
        there_NE = None if said_NE is None else said_NE.to(dtype)

        def work(rows: slice, place: Any, own_CD: Tensor, own: Projection, scale: float) -> tuple[Tensor, Tensor]:
            said_CE = None if there_NE is None else there_NE[place]
            targets_C = positions.targets_N[rows] if rows.start < positions.targeted else None
            found: tuple[Tensor, Tensor] = self.step(
                own_CD, own, said_CE, said, targets_C, positions.counted_N[rows], weights, scale
            )
            return found

        terms = (weights.kl, weights.mse, weights.ce)
        job = ChunkedJob(work, terms, positions.entering, self.chunk, dtype, positions.order_N)
        loss, sums = chunked_loss(features_ND, weight_VD, bias_V, job)
        by_name = dict(zip(("kl", "mse", "ce"), sums.unbind(), strict=True))
        return loss, {name: by_name[name] for name in weights.names}
