"""The student's loss for question answering: marked answers and the teacher's start and end distributions.

Losses are sums over windows, each window the mean of its start and its end. The softmax is over the positions that an
answer can have, the paragraph and the class token; padding and the question are excluded, as they are when an answer is
searched.

Shapes: B windows, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from joulelab.data.batches import TensorBatch
from joulelab.data.squad.windows import model_inputs, takes_token_types
from joulelab.distill.losses import cross_entropy_sum, soft_target_kl_sum
from joulelab.distill.squad.config import QaDistill
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker

ANSWERS_ONLY = QaDistill(alpha_ce=0.0, alpha_squad=1.0)
# Finite, so that two masked positions subtract to 0 and not to NaN; its exponential is 0 in float32 at any temperature
# below a million.
_MASKED_LOGIT = -1e9

Span = tuple[Tensor, Tensor]
"""Start and end: logits_BT each."""


def span_ce_sum(student: Span, spans_B2: Tensor, answerable_BT: Tensor) -> Tensor:
    start, end = (
        cross_entropy_sum(_masked(logits_BT, answerable_BT), spans_B2[:, edge])
        for edge, logits_BT in enumerate(student)
    )
    return (start + end) / 2


def span_kl_sum(student: Span, teacher: Span, answerable_BT: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student)."""
    start, end = (
        soft_target_kl_sum(_masked(student_BT, answerable_BT), _masked(teacher_BT, answerable_BT), temperature)
        for student_BT, teacher_BT in zip(student, teacher, strict=True)
    )
    return (start + end) / 2


def _masked(logits_BT: Tensor, answerable_BT: Tensor) -> Tensor:
    return logits_BT.float().masked_fill(~answerable_BT, _MASKED_LOGIT)


class SpanObjective:
    """alpha_ce T^2 KL + alpha_squad CE, summed over the batch's windows; the teacher reads the same batch."""

    def __init__(self, config: QaDistill, token_types: bool, teacher: nn.Module | None = None) -> None:
        """`token_types`: whether the student takes them, which a wrapped or compiled model does not show."""
        if config.needs_teacher and teacher is None:
            raise ValueError("alpha_ce > 0 needs a teacher")
        self._config, self._token_types = config, token_types
        self._teacher = teacher.eval() if teacher is not None and config.needs_teacher else None
        self._teacher_types = self._teacher is not None and takes_token_types(self._teacher)

    def modules(self) -> Mapping[str, nn.Module]:
        return {}  # the teacher is not trained

    def after_step(self, model: nn.Module) -> None:
        pass

    def __call__(self, model: nn.Module, batch: TensorBatch, phase: PhaseMaker) -> ObjectiveOutput:
        teacher: Span | None = None
        if self._teacher is not None:
            with phase("forward.teacher"), torch.no_grad():
                teacher = _span(self._teacher, batch, self._teacher_types)
        with phase("forward.student"):
            student = _span(model, batch, self._token_types)
        with phase("forward.loss"):
            terms = self._terms(student, teacher, batch)
            loss_sum = torch.stack([weight * value for weight, value in terms.values()]).sum()
        parts = {name: value.detach() for name, (_, value) in terms.items()}
        return ObjectiveOutput(loss_sum, batch.count, parts)

    def _terms(self, student: Span, teacher: Span | None, batch: TensorBatch) -> dict[str, tuple[float, Tensor]]:
        config, terms = self._config, {}
        if teacher is not None:
            kl = span_kl_sum(student, teacher, batch["answerable"], config.temperature)
            terms["ce"] = (config.alpha_ce, kl)
        if config.alpha_squad > 0:
            terms["squad"] = (config.alpha_squad, span_ce_sum(student, batch["spans"], batch["answerable"]))
        return terms


def _span(model: nn.Module, batch: TensorBatch, token_types: bool) -> Span:
    output = model(**model_inputs(batch, token_types))
    return output.start_logits, output.end_logits
