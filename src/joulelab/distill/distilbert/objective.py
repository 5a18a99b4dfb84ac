"""The student's loss as a language model's student: each term, and the teacher, only if a weight asks for it.

Every term is a sum over positions times a constant: its alpha over the share of tokens that are its positions. The
loop divides by the tokens of the whole step. So each term is the mean over its own positions, over an epoch exactly and
in a step up to the number of positions that were sampled, and any split of the step has the same gradient.

Shapes: B rows, T tokens, N positions projected to the vocabulary, D student's and E teacher's hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from joulelab.distill.chunked import Positions, Projection, TermWeights, VocabularyLoss, matmul_dtype, padded_projection
from joulelab.distill.distilbert.batches import LmBatch
from joulelab.distill.distilbert.config import LmDistillation
from joulelab.distill.distilbert.models import decoder_of
from joulelab.distill.losses import cosine_distance_sum, logit_mse_sum, response_kl_sum, token_cross_entropy_sum
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker


@dataclass(frozen=True)
class Scales:
    """Factor of each summed term."""

    vocabulary: TermWeights
    cos: float
    logged: Mapping[str, tuple[str, float]]
    """Term of the vocabulary -> its name in the logs, and the factor that makes its sum a mean over its positions."""

    @classmethod
    def of(cls, config: LmDistillation, targets_share: float) -> Scales:
        compared = 1 / targets_share if config.restrict_ce_to_mask else 1.0
        predicted = 1 / targets_share
        weights = TermWeights(
            kl=config.alpha_ce * compared,
            mse=config.alpha_mse * compared,
            ce=(config.alpha_mlm + config.alpha_clm) * predicted,
            temperature=config.temperature,
        )
        tokens = "mlm" if config.mlm else "clm"
        return cls(
            weights, config.alpha_cos, {"kl": ("kl", compared), "mse": ("mse", compared), "ce": (tokens, predicted)}
        )


class FrozenTeacher:
    """Computes its outputs without gradients; its projection is cast and padded once."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """`dtype`: of its weights and its computation; None: that of the training."""
        self.model = model.eval().requires_grad_(False)
        if dtype is not None:
            self.model.to(dtype)
        self._has_dtype = dtype is not None
        self._projection: Projection | None = None

    @torch.no_grad()
    def __call__(self, batch: LmBatch, project: bool) -> tuple[Tensor | None, Tensor]:
        device = batch["input_ids"].device.type
        with torch.autocast(device, enabled=torch.is_autocast_enabled(device) and not self._has_dtype):
            outputs: tuple[Tensor | None, Tensor] = self.model(
                **batch.inputs, for_loss=True, positions=batch.rows, project=project
            )
        return outputs

    def projection(self, features: Tensor) -> Projection:
        dtype = matmul_dtype(features)
        if self._projection is None or self._projection.weight_VD.dtype != dtype:
            self._projection = padded_projection(*decoder_of(self.model), dtype)
        return self._projection


class LmObjective:
    """alpha_ce T^2 KL + alpha_mlm or alpha_clm CE + alpha_mse MSE + alpha_cos (1 - cos)."""

    def __init__(
        self, student: nn.Module, teacher: FrozenTeacher | None, scales: Scales, chunk: int, compile_mode: str = "off"
    ) -> None:
        """`student` is the model itself: the loop may call it through a wrapper that hides its parts."""
        self._student, self._teacher, self._scales = student, teacher, scales
        self._vocabulary = VocabularyLoss(scales.vocabulary, chunk, compile_mode)
        self._cosine: Callable[..., Tensor] = cosine_distance_sum
        if compile_mode != "off":
            self._cosine = torch.compile(cosine_distance_sum)

    def modules(self) -> Mapping[str, nn.Module]:
        return {}  # the teacher is not trained and not checkpointed

    def after_step(self, model: nn.Module) -> None:
        pass

    def __call__(self, model: nn.Module, batch: LmBatch, phase: PhaseMaker) -> ObjectiveOutput:
        projects = bool(self._scales.vocabulary.names)
        teacher_NE, teacher_BTE = None, None
        if self._teacher is not None:
            with phase("forward.teacher"):
                teacher_NE, teacher_BTE = self._teacher(batch, self._scales.vocabulary.needs_teacher)
        with phase("forward.student"):
            student_ND, student_BTD = model(**batch.inputs, for_loss=True, positions=batch.rows, project=projects)
        with phase("forward.loss"):
            loss, parts = self._loss(batch, student_ND, student_BTD, teacher_NE, teacher_BTE)
        return ObjectiveOutput(loss, batch.count, parts)

    def _loss(
        self,
        batch: LmBatch,
        student_ND: Tensor | None,
        student_BTD: Tensor,
        teacher_NE: Tensor | None,
        teacher_BTE: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses: list[Tensor] = []
        parts: dict[str, Tensor] = {}
        if student_ND is not None:
            projection = None
            if teacher_NE is not None and self._teacher is not None:
                projection = self._teacher.projection(student_ND)
            decoder = decoder_of(self._student)
            loss, sums = self._vocabulary(student_ND, *decoder, batch.positions, teacher_NE, projection)
            losses.append(loss)
            for term, value in sums.items():
                name, to_mean = self._scales.logged[term]
                parts[name] = to_mean * value
        if self._scales.cos > 0 and teacher_BTE is not None:
            mask_BT = batch.tensors.get("attention_mask")
            weights_N = None if mask_BT is None else mask_BT.flatten().float()
            distance = self._cosine(student_BTD.flatten(0, 1), teacher_BTE.flatten(0, 1), weights_N)
            losses.append(self._scales.cos * distance)
            parts["cos"] = distance.detach()
        return torch.stack(losses).sum(), parts


def plain_loss(student: nn.Module, teacher: nn.Module | None, batch: LmBatch, scales: Scales) -> Tensor:
    """The same loss with all logits of both models in memory: the reference of the tests and of the benchmark."""
    weights, positions = scales.vocabulary, batch.positions
    student_ND, student_BTD = student(**batch.inputs, for_loss=True, positions=batch.rows)
    student_NV = _used(functional.linear(student_ND, *decoder_of(student)), positions)
    loss = weights.ce * token_cross_entropy_sum(student_NV, positions.targets_N[: positions.count])
    if teacher is None:
        return loss
    with torch.no_grad():
        teacher_ND, teacher_BTD = teacher(**batch.inputs, for_loss=True, positions=batch.rows)
        teacher_NV = _used(functional.linear(teacher_ND, *decoder_of(teacher)), positions)
    student_ND, teacher_ND = student_BTD.flatten(0, 1), teacher_BTD.flatten(0, 1)
    if "attention_mask" in batch.tensors:  # selecting rows by a mask makes a GPU wait, so full rows are left alone
        used, real_N = positions.weights_N[: positions.count] > 0, batch["attention_mask"].flatten() > 0
        student_NV, teacher_NV = student_NV[used], teacher_NV[used]
        student_ND, teacher_ND = student_ND[real_N], teacher_ND[real_N]
    if weights.kl > 0:
        loss = loss + weights.kl * response_kl_sum(student_NV, teacher_NV, weights.temperature)
    if weights.mse > 0:
        loss = loss + weights.mse * logit_mse_sum(student_NV, teacher_NV)
    return loss + scales.cos * cosine_distance_sum(student_ND, teacher_ND) if scales.cos > 0 else loss


def _used(logits_NV: Tensor, positions: Positions) -> Tensor:
    ordered_NV = logits_NV if positions.order_N is None else logits_NV[positions.order_N]
    return ordered_NV[: positions.count]
