"""The student's loss for classification: labels, the teacher's responses, its features; each only if asked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from joulelab.data.batches import Batch
from joulelab.distill.classify_config import DistillConfig
from joulelab.distill.losses import cross_entropy_sum, feature_mse_sum, soft_target_kl_sum
from joulelab.distill.pooling import pool
from joulelab.distill.teacher_cache import TeacherCache
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker

LABELS_ONLY = DistillConfig(kd_alpha=1.0, feat_beta=0.0)


class ClassifyObjective:
    """kd_alpha CE + (1 - kd_alpha) T^2 KL + feat_beta MSE(connector(pool(h_s)), pool(h_t)), summed over the batch."""

    def __init__(self, config: DistillConfig, cache: TeacherCache | None, connector: nn.Module | None) -> None:
        self._config = config
        self._cache = cache
        self._connector = connector

    def modules(self) -> Mapping[str, nn.Module]:
        return {} if self._connector is None else {"connector": self._connector}

    def after_step(self, model: nn.Module) -> None:
        pass

    def __call__(self, model: nn.Module, batch: Batch, phase: PhaseMaker) -> ObjectiveOutput:
        config = self._config
        with phase("forward.student"):
            output = model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                output_hidden_states=config.feat_beta > 0,
            )
        with phase("forward.loss"):
            terms: dict[str, tuple[float, Tensor]] = {}
            device = batch.input_ids.device
            if config.kd_alpha > 0:
                terms["ce"] = (config.kd_alpha, cross_entropy_sum(output.logits, batch.labels))
            if config.kd_alpha < 1 and self._cache is not None:
                said_BC = self._cache.logits(batch.rows, device)
                terms["kl"] = (1 - config.kd_alpha, soft_target_kl_sum(output.logits, said_BC, config.kd_T))
            if config.feat_beta > 0 and self._cache is not None and self._connector is not None:
                own_BH = pool(output.hidden_states[config.s_layer], batch.attention_mask, config.feat_pool)
                hint_BH = self._cache.features(batch.rows, device)
                terms["features"] = (config.feat_beta, feature_mse_sum(self._connector(own_BH), hint_BH))
            loss_sum = torch.stack([weight * value for weight, value in terms.values()]).sum()
        parts = {name: value.detach() for name, (_, value) in terms.items()}
        return ObjectiveOutput(loss_sum, batch.samples, parts)


def make_connector(student_width: int, teacher_width: int) -> nn.Module:
    """Identity where the widths agree, else a linear map from the student's width to the teacher's."""
    return nn.Identity() if student_width == teacher_width else nn.Linear(student_width, teacher_width)
