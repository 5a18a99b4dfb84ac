"""Preferences as an objective of the one training loop: a batch of pairs in, a loss summed over pairs out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from joulelab.data.batches import TensorBatch
from joulelab.distill.preferences.losses import PreferenceLoss, preference_loss
from joulelab.distill.preferences.policy import answer_log_probabilities
from joulelab.distill.preferences.target_log_probabilities import Projecting
from joulelab.errors import ConfigError
from joulelab.zoo.objective import ObjectiveOutput, PhaseMaker


class PreferenceObjective:
    """DPO, IPO (over means or sums) or length-normalised DPO against cached figures of the reference, or a live one.

    Parts in the log, each a mean over pairs: `margin` (times beta, as DPO's reward margin), `accuracy` (share of pairs
    with a margin above 0), `chosen` and `rejected` (what each answer gained over the reference, in nats).
    """

    def __init__(
        self,
        student: nn.Module,
        kind: PreferenceLoss = "dpo",
        beta: float = 0.1,
        how: Projecting | None = None,
        live_reference: nn.Module | None = None,
    ) -> None:
        """`student` is the model itself, opened for losses: the loop may call it through a wrapper."""
        if beta <= 0:
            raise ConfigError(f"beta is {beta}; expected more than 0", "0.1 is usual")
        self._student, self._kind, self._beta = student, kind, beta
        self._how, self._live = how or Projecting(), live_reference
        if live_reference is not None:
            live_reference.eval().requires_grad_(False)

    def modules(self) -> Mapping[str, nn.Module]:
        return {}  # the reference is not trained, and a checkpoint need not hold it

    def after_step(self, model: nn.Module) -> None:
        pass

    def __call__(self, model: nn.Module, batch: TensorBatch, phase: PhaseMaker) -> ObjectiveOutput:
        reference_P2 = self._reference(batch, phase)
        with phase("forward.student"):
            policy_P2 = answer_log_probabilities(model, self._student, batch, self._how)
        with phase("forward.loss"):
            loss, margins_P = preference_loss(self._kind, self._beta, policy_P2, reference_P2, batch["answer_tokens"])
            gains_P2 = (policy_P2 - reference_P2).detach()
            parts = {
                "margin": self._beta * margins_P.detach().sum(),
                "accuracy": (margins_P.detach() > 0).float().sum(),
                "chosen": gains_P2[:, 0].sum(),
                "rejected": gains_P2[:, 1].sum(),
            }
        return ObjectiveOutput(loss, batch.count, parts)

    def _reference(self, batch: TensorBatch, phase: PhaseMaker) -> torch.Tensor:
        if self._live is not None:
            with phase("forward.reference"), torch.no_grad():
                return answer_log_probabilities(self._live, self._live, batch, self._how)
        if "reference" not in batch.tensors:
            raise ConfigError(
                "the batch has no figures of the reference, and there is no live one",
                "give PairBatches the ReferenceLogs of the starting student",
            )
        return batch["reference"]
