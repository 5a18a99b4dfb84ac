"""The student's loss for classification: labels, the teacher's responses, features and relations.

A term of weight 0 is not computed, and neither is what only that term needs (hidden states, the teacher itself). Texts
and images differ only in the forward adapter.

Shapes: B batch, C classes, T tokens, H width; feature maps of a CNN are [B, C, H, W].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from joulelab.data.batches import Batch, TensorBatch
from joulelab.distill.classify.config import DistillConfig
from joulelab.distill.losses import (
    angle_relation_sum,
    cross_entropy_sum,
    distance_relation_sum,
    feature_mse_sum,
    pool,
    soft_target_kl_sum,
)
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker

LABELS_ONLY = DistillConfig(alpha=1.0, feat_beta=0.0)

Terms = dict[str, tuple[float, Tensor]]
"""Name -> weight and sum."""


@dataclass(frozen=True)
class ForwardOutput:
    """What the losses use of a forward pass."""

    logits_BC: Tensor
    features: Tensor | None
    """[B, H] of a text model, [B, C, H, W] of a CNN."""


class ForwardAdapter(Protocol):
    """How a batch goes through a model."""

    def __call__(self, model: nn.Module, batch: Any, features: bool) -> ForwardOutput: ...


@dataclass(frozen=True)
class TextForward:
    layer: int
    pooling: str

    def __call__(self, model: nn.Module, batch: Batch, features: bool) -> ForwardOutput:
        output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=features)
        pooled_BH = pool(output.hidden_states[self.layer], batch.attention_mask, self.pooling) if features else None
        # the hint stage trains a body without a head, which has no logits
        return ForwardOutput(output.logits if hasattr(output, "logits") else output[0], pooled_BH)


@dataclass(frozen=True)
class ImageForward:
    layer: int

    def __call__(self, model: nn.Module, batch: TensorBatch, features: bool) -> ForwardOutput:
        output = model(pixel_values=batch["pixels"], output_hidden_states=features)
        maps_BCHW = output.hidden_states[self.layer] if features else None
        return ForwardOutput(output.logits if hasattr(output, "logits") else output[0], maps_BCHW)


class TeacherSource(Protocol):
    """Where the teacher's outputs come from: a cache, or the teacher itself in the same step. The student learns the
    same from both."""

    def outputs(self, batch: Any, features: bool) -> ForwardOutput:
        """Without gradients."""


@dataclass(frozen=True)
class LiveTeacher:
    """Runs in every step: no cache to make or to store, and it sees augmented samples; its energy is used anew in every
    epoch."""

    model: nn.Module
    forward: ForwardAdapter

    def outputs(self, batch: Any, features: bool) -> ForwardOutput:
        with torch.no_grad():
            return self.forward(self.model, batch, features)


class ClassifyObjective:
    """alpha CE + (1 - alpha) T^2 KL + feat_beta MSE(connector(pool(h_s)), pool(h_t)) + relations, summed over the
    batch."""

    def __init__(
        self,
        config: DistillConfig,
        forward: ForwardAdapter,
        teacher: TeacherSource | None = None,
        connector: nn.Module | None = None,
    ) -> None:
        self._config = config
        self._forward = forward
        self._teacher = teacher
        self._connector = connector

    def modules(self) -> Mapping[str, nn.Module]:
        """The connector is trained with the student; a live teacher is not and must stay in evaluation mode."""
        return {} if self._connector is None else {"connector": self._connector}

    def after_step(self, model: nn.Module) -> None:
        pass

    def __call__(self, model: nn.Module, batch: Any, phase: PhaseMaker) -> ObjectiveOutput:
        config = self._config
        teacher: ForwardOutput | None = None
        if self._teacher is not None and config.needs_teacher:
            with phase("forward.teacher"):
                teacher = self._teacher.outputs(batch, config.needs_features)
        with phase("forward.student"):
            student = self._forward(model, batch, config.needs_features)
        with phase("forward.loss"):
            terms = self._terms(student, teacher, _labels(batch))
            loss_sum = torch.stack([weight * value for weight, value in terms.values()]).sum()
        parts = {name: value.detach() for name, (_, value) in terms.items()}
        return ObjectiveOutput(loss_sum, batch.samples, parts)

    def _terms(self, student: ForwardOutput, teacher: ForwardOutput | None, labels_B: Tensor) -> Terms:
        config = self._config
        terms: Terms = {}
        if config.alpha > 0:
            terms["ce"] = (config.alpha, cross_entropy_sum(student.logits_BC, labels_B))
        if teacher is None:
            return terms
        if config.alpha < 1:
            divergence = soft_target_kl_sum(student.logits_BC, teacher.logits_BC, config.temperature, config.kd_T2)
            terms["kl"] = (1 - config.alpha, divergence)
        if config.feat_beta > 0 and self._connector is not None:
            distance = feature_distance_sum(student, teacher, self._connector, config.feat_normalize)
            terms["features"] = (config.feat_beta, distance)
        if config.rel_distance > 0:
            terms["distances"] = (config.rel_distance, distance_relation_sum(*_vectors(student, teacher)))
        if config.rel_angle > 0:
            terms["angles"] = (config.rel_angle, angle_relation_sum(*_vectors(student, teacher)))
        return terms


class HintObjective:
    """FitNets' first stage (Romero et al., 2015): the student up to its hint layer, and the connector, learn the
    teacher's features only."""

    def __init__(
        self, config: DistillConfig, forward: ForwardAdapter, teacher: TeacherSource, connector: nn.Module
    ) -> None:
        self._config, self._forward, self._teacher, self._connector = config, forward, teacher, connector

    def modules(self) -> Mapping[str, nn.Module]:
        return {"connector": self._connector}

    def after_step(self, model: nn.Module) -> None:
        pass

    def __call__(self, model: nn.Module, batch: Any, phase: PhaseMaker) -> ObjectiveOutput:
        with phase("forward.teacher"):
            teacher = self._teacher.outputs(batch, True)
        with phase("forward.student"):
            student = self._forward(model, batch, True)
        with phase("forward.loss"):
            loss_sum = feature_distance_sum(student, teacher, self._connector, self._config.feat_normalize)
        return ObjectiveOutput(loss_sum, batch.samples, {"features": loss_sum.detach()})


def feature_distance_sum(
    student: ForwardOutput, teacher: ForwardOutput, connector: nn.Module, normalize: bool
) -> Tensor:
    assert student.features is not None
    assert teacher.features is not None
    projected, target = to_same_size(connector(student.features), teacher.features)
    return feature_mse_sum(projected, target, normalize)


def to_same_size(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Feature maps averaged down to the smaller of both sizes; vectors are returned unchanged."""
    if student.dim() < 4 or student.shape[-2:] == teacher.shape[-2:]:
        return student, teacher
    height, width = (min(sizes) for sizes in zip(student.shape[-2:], teacher.shape[-2:], strict=True))
    return F.adaptive_avg_pool2d(student, (height, width)), F.adaptive_avg_pool2d(teacher, (height, width))


def _vectors(student: ForwardOutput, teacher: ForwardOutput) -> tuple[Tensor, Tensor]:
    """Relations are between vectors; of a feature map, the mean over its positions."""
    assert student.features is not None
    assert teacher.features is not None
    sides = (student.features, teacher.features)
    first, second = (side.flatten(2).mean(-1) if side.dim() > 2 else side for side in sides)
    return first, second


def _labels(batch: Any) -> Tensor:
    labels: Tensor = batch.labels if hasattr(batch, "labels") else batch["labels"]
    return labels
