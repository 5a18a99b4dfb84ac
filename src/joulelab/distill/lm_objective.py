"""The student's loss as a language model's student: each term only if asked, the teacher only if a term asks for it.

Every term is a sum over positions times a constant: its alpha over the share of tokens that are its positions. The
loop divides by the tokens of the whole step. So each term comes out as the mean over its own positions, over an epoch
exactly and in a step to within how many happened to be there, and any split of the step has the same gradient.

Shapes: B rows, T tokens, N positions projected to the vocabulary, D student's and E teacher's hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from joulelab.distill.chunked_projection import Projection, padded_projection
from joulelab.distill.chunked_vocabulary import TermWeights, VocabularyLoss
from joulelab.distill.lm_batches import LmBatch
from joulelab.distill.lm_config import LmDistillation
from joulelab.distill.lm_heads import decoder_of
from joulelab.distill.vocabulary_losses import cosine_distance_sum
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker


@dataclass(frozen=True)
class Scales:
    """What each summed term is multiplied by."""

    vocabulary: TermWeights
    cos: float
    logged: Mapping[str, tuple[str, float]]
    """Term of the vocabulary -> its name in the logs, and what makes its sum a mean over its own positions."""

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
    """Says what it says without gradients; its projection is laid out once."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """`dtype`: of its weights and its computation; nothing: the surroundings' own."""
        self.model = model.eval().requires_grad_(False)
        if dtype is not None:
            self.model.to(dtype)
        self._own_numbers = dtype is not None
        self._projection: Projection | None = None

    @torch.no_grad()
    def __call__(self, batch: LmBatch, project: bool) -> tuple[Tensor | None, Tensor]:
        kind = batch["input_ids"].device.type
        with torch.autocast(kind, enabled=torch.is_autocast_enabled(kind) and not self._own_numbers):
            found: tuple[Tensor | None, Tensor] = self.model(
                **batch.inputs, for_loss=True, positions=batch.rows, project=project
            )
        return found

    def projection(self, features: Tensor) -> Projection:
        kind = features.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else features.dtype
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
        return {}  # the teacher is not trained, and a checkpoint need not hold it

    def after_step(self, model: nn.Module) -> None:
        pass

    def __call__(self, model: nn.Module, batch: LmBatch, phase: PhaseMaker) -> ObjectiveOutput:
        projects = bool(self._scales.vocabulary.names)
        said_NE, said_BTE = None, None
        if self._teacher is not None:
            with phase("forward.teacher"):
                said_NE, said_BTE = self._teacher(batch, self._scales.vocabulary.compares)
        with phase("forward.student"):
            own_ND, own_BTD = model(**batch.inputs, for_loss=True, positions=batch.rows, project=projects)
        with phase("forward.loss"):
            loss, parts = self._loss(batch, own_ND, own_BTD, said_NE, said_BTE)
        return ObjectiveOutput(loss, batch.count, parts)

    def _loss(
        self,
        batch: LmBatch,
        own_ND: Tensor | None,
        own_BTD: Tensor,
        said_NE: Tensor | None,
        said_BTE: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses: list[Tensor] = []
        parts: dict[str, Tensor] = {}
        if own_ND is not None:
            said: Any = None if said_NE is None or self._teacher is None else self._teacher.projection(own_ND)
            loss, sums = self._vocabulary(own_ND, *decoder_of(self._student), batch.positions, said_NE, said)
            losses.append(loss)
            for term, value in sums.items():
                name, to_mean = self._scales.logged[term]
                parts[name] = to_mean * value
        if self._scales.cos > 0 and said_BTE is not None:
            mask_BT = batch.tensors.get("attention_mask")
            counted_N = None if mask_BT is None else mask_BT.flatten().float()
            apart = self._cosine(own_BTD.flatten(0, 1), said_BTE.flatten(0, 1), counted_N)
            losses.append(self._scales.cos * apart)
            parts["cos"] = apart.detach()
        return torch.stack(losses).sum(), parts
