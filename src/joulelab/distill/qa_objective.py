"""The student's loss for question answering: marked answers and the teacher's scores; each only if asked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from joulelab.data.batches import TensorBatch
from joulelab.data.squad.windows import model_inputs, takes_token_types
from joulelab.distill.qa_config import QaDistill
from joulelab.distill.qa_losses import Span, span_ce_sum, span_kl_sum
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker

ANSWERS_ONLY = QaDistill(alpha_ce=0.0, alpha_squad=1.0)


class SpanObjective:
    """alpha_ce T^2 KL + alpha_squad CE, summed over the batch's windows; the teacher reads the very same batch."""

    def __init__(self, config: QaDistill, token_types: bool, teacher: nn.Module | None = None) -> None:
        """`token_types`: whether the student takes them; a wrapped or compiled one does not tell any more."""
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
        said = self._ask_teacher(batch, phase)
        with phase("forward.student"):
            own = _span(model, batch, self._token_types)
        with phase("forward.loss"):
            terms = self._terms(own, said, batch)
            loss_sum = torch.stack([weight * value for weight, value in terms.values()]).sum()
        parts = {name: value.detach() for name, (_, value) in terms.items()}
        return ObjectiveOutput(loss_sum, batch.count, parts)

    def _ask_teacher(self, batch: TensorBatch, phase: PhaseMaker) -> Span | None:
        if self._teacher is None:
            return None
        with phase("forward.teacher"), torch.no_grad():
            return _span(self._teacher, batch, self._teacher_types)

    def _terms(self, own: Span, said: Span | None, batch: TensorBatch) -> dict[str, tuple[float, Tensor]]:
        config, terms = self._config, {}
        if said is not None:
            kl = span_kl_sum(own, said, batch["answerable"], config.temperature)
            terms["ce"] = (config.alpha_ce, kl)
        if config.alpha_squad > 0:
            terms["squad"] = (config.alpha_squad, span_ce_sum(own, batch["spans"], batch["answerable"]))
        return terms


def _span(model: nn.Module, batch: TensorBatch, token_types: bool) -> Span:
    output = model(**model_inputs(batch, token_types))
    return output.start_logits, output.end_logits
