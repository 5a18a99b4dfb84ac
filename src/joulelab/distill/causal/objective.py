"""What the loop differentiates where tokens are learnt: the data's own, a teacher's distributions, or both.

One objective for all of it, so that sft and kd differ in their targets and in nothing else.

Shapes: B rows, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from joulelab.data.chat.attention import PackedAttention
from joulelab.data.chat.packing import CausalBatch
from joulelab.distill.causal.models import lm_head_weight
from joulelab.distill.logit_cache.kd_loss import CachedTargets, DenseTargets, KdLoss
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker

Targets = CachedTargets | DenseTargets


class TokenObjective:
    """alpha CE + (1 - alpha) T^2 KL over the trained tokens; head and loss in chunks, never all logits at once."""

    def __init__(
        self,
        model: nn.Module,
        attention: PackedAttention,
        loss: KdLoss,
        said: Callable[[CausalBatch], Targets] | None = None,
    ) -> None:
        """`model` is the bare one, whose head is read; the loop may call a wrapped one. `said` is the teacher."""
        self._bare, self._attention, self._loss, self._said = model, attention, loss, said

    def __call__(self, model: nn.Module, batch: CausalBatch, phase: PhaseMaker) -> ObjectiveOutput:
        targets = None
        if self._said is not None:
            with phase("forward.teacher"):
                targets = self._said(batch)
        with phase("forward.student"):
            hidden_BTD = model(**self._attention.inputs(batch), hidden_only=True)
        with phase("forward.loss"):
            sums = self._loss(hidden_BTD, lm_head_weight(self._bare), targets, batch.labels, count=batch.count)
        parts = {} if self._said is None else {"ce": sums.ce, "kl": sums.kl}
        return ObjectiveOutput(sums.loss, batch.count, parts)

    def modules(self) -> Mapping[str, nn.Module]:
        return {}

    def after_step(self, model: nn.Module) -> None: ...
