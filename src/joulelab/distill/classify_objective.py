"""The student's loss for classification: labels, the teacher's responses, features and relations; each only if asked.

A term of weight 0 is not computed, and what only that term needs (hidden states, the teacher itself) is not asked for.
Shapes: B batch, C classes, H width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from joulelab.distill.classify_config import DistillConfig
from joulelab.distill.classify_teachers import Teacher
from joulelab.distill.classify_view import Look, TextLook, View
from joulelab.distill.connectors import to_same_size
from joulelab.distill.losses import cross_entropy_sum, feature_mse_sum, soft_target_kl_sum
from joulelab.distill.relation_losses import angle_relation_sum, distance_relation_sum
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker

LABELS_ONLY = DistillConfig(kd_alpha=1.0, feat_beta=0.0)

Terms = dict[str, tuple[float, Tensor]]


class ClassifyObjective:
    """kd_alpha CE + (1 - kd_alpha) T^2 KL + feat_beta MSE(connector(pool(h_s)), pool(h_t)) + relations, summed over the
    batch."""

    def __init__(
        self,
        config: DistillConfig,
        teacher: Teacher | None = None,
        connector: nn.Module | None = None,
        look: Look = TextLook(-1, "mean"),  # noqa: B008  # frozen
    ) -> None:
        self._config = config
        self._teacher = teacher
        self._connector = connector
        self._look = look

    def modules(self) -> Mapping[str, nn.Module]:
        """The connector learns along; a live teacher does not, and must not be put into training mode."""
        return {} if self._connector is None else {"connector": self._connector}

    def after_step(self, model: nn.Module) -> None:
        pass

    def __call__(self, model: nn.Module, batch: Any, phase: PhaseMaker) -> ObjectiveOutput:
        config = self._config
        said: View | None = None
        if self._teacher is not None and config.needs_teacher:
            with phase("forward.teacher"):
                said = self._teacher.answer(batch, config.needs_features)
        with phase("forward.student"):
            view = self._look(model, batch, config.needs_features)
        with phase("forward.loss"):
            terms = self._terms(view, said, _labels(batch))
            loss_sum = torch.stack([weight * value for weight, value in terms.values()]).sum()
        parts = {name: value.detach() for name, (_, value) in terms.items()}
        return ObjectiveOutput(loss_sum, batch.samples, parts)

    def _terms(self, view: View, said: View | None, labels_B: Tensor) -> Terms:
        config = self._config
        terms: Terms = {}
        if config.kd_alpha > 0:
            terms["ce"] = (config.kd_alpha, cross_entropy_sum(view.logits_BC, labels_B))
        if said is None:
            return terms
        if config.kd_alpha < 1:
            divergence = soft_target_kl_sum(view.logits_BC, said.logits_BC, config.kd_T, config.kd_T2)
            terms["kl"] = (1 - config.kd_alpha, divergence)
        if config.feat_beta > 0 and self._connector is not None:
            terms["features"] = (config.feat_beta, feature_term(view, said, self._connector, config.feat_normalize))
        return {**terms, **self._relations(view, said)}

    def _relations(self, view: View, said: View) -> Terms:
        config = self._config
        terms: Terms = {}
        if config.rel_distance > 0:
            terms["distances"] = (config.rel_distance, distance_relation_sum(*_vectors(view, said)))
        if config.rel_angle > 0:
            terms["angles"] = (config.rel_angle, angle_relation_sum(*_vectors(view, said)))
        return terms


class HintObjective:
    """FitNets' first stage: the student up to its hint layer, and the connector, learn the teacher's features only."""

    def __init__(self, config: DistillConfig, teacher: Teacher, connector: nn.Module, look: Look) -> None:
        self._config, self._teacher, self._connector, self._look = config, teacher, connector, look

    def modules(self) -> Mapping[str, nn.Module]:
        return {"connector": self._connector}

    def after_step(self, model: nn.Module) -> None:
        pass

    def __call__(self, model: nn.Module, batch: Any, phase: PhaseMaker) -> ObjectiveOutput:
        with phase("forward.teacher"):
            said = self._teacher.answer(batch, True)
        with phase("forward.student"):
            view = self._look(model, batch, True)
        with phase("forward.loss"):
            loss_sum = feature_term(view, said, self._connector, self._config.feat_normalize)
        return ObjectiveOutput(loss_sum, batch.samples, {"features": loss_sum.detach()})


def feature_term(view: View, said: View, connector: nn.Module, normalize: bool) -> Tensor:
    assert view.features is not None
    assert said.features is not None
    own, hint = to_same_size(connector(view.features), said.features)
    return feature_mse_sum(own, hint, normalize)


def _vectors(view: View, said: View) -> tuple[Tensor, Tensor]:
    """Relations are between vectors; a map stands for itself by its mean over places."""
    assert view.features is not None
    assert said.features is not None
    own, hint = (side.flatten(2).mean(-1) if side.dim() > 2 else side for side in (view.features, said.features))
    return own, hint


def _labels(batch: Any) -> Tensor:
    labels: Tensor = batch.labels if hasattr(batch, "labels") else batch["labels"]
    return labels
