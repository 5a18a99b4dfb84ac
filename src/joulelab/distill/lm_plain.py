"""The student's loss the plain way, with all logits of both models in memory: what the chunked losses must equal.

It is the yardstick of tests and of the benchmark; training goes through `lm_objective`.

Shapes: B rows, T tokens, N positions projected to the vocabulary, V vocabulary, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from joulelab.distill.chunked_vocabulary import Positions
from joulelab.distill.lm_batches import LmBatch
from joulelab.distill.lm_heads import decoder_of
from joulelab.distill.lm_objective import Scales
from joulelab.distill.vocabulary_losses import (
    cosine_distance_sum,
    logit_mse_sum,
    response_kl_sum,
    token_cross_entropy_sum,
)


def plain_loss(student: nn.Module, teacher: nn.Module | None, batch: LmBatch, scales: Scales) -> Tensor:
    weights, positions = scales.vocabulary, batch.positions
    own_ND, own_BTD = student(**batch.inputs, for_loss=True, positions=batch.rows)
    own_NV = _entering(functional.linear(own_ND, *decoder_of(student)), positions)
    loss = weights.ce * token_cross_entropy_sum(own_NV, positions.targets_N[: positions.entering])
    if teacher is None:
        return loss
    with torch.no_grad():
        said_ND, said_BTD = teacher(**batch.inputs, for_loss=True, positions=batch.rows)
        said_NV = _entering(functional.linear(said_ND, *decoder_of(teacher)), positions)
    own_ND, said_ND = own_BTD.flatten(0, 1), said_BTD.flatten(0, 1)
    if "attention_mask" in batch.tensors:  # picking rows by a mask makes a GPU wait, so full rows are left alone
        counted, real_N = positions.counted_N[: positions.entering] > 0, batch["attention_mask"].flatten() > 0
        own_NV, said_NV, own_ND, said_ND = own_NV[counted], said_NV[counted], own_ND[real_N], said_ND[real_N]
    if weights.kl > 0:
        loss = loss + weights.kl * response_kl_sum(own_NV, said_NV, weights.temperature)
    if weights.mse > 0:
        loss = loss + weights.mse * logit_mse_sum(own_NV, said_NV)
    return loss + scales.cos * cosine_distance_sum(own_ND, said_ND) if scales.cos > 0 else loss


def _entering(logits_NV: Tensor, positions: Positions) -> Tensor:
    ordered_NV = logits_NV if positions.order_N is None else logits_NV[positions.order_N]
    return ordered_NV[: positions.entering]
