"""Next-token prediction: every position is trained on the token after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from joulelab.data.batches import Rows, ShuffledRows, TensorBatch
from joulelab.zoo import architectures
from joulelab.zoo.objective import ObjectiveOutput, PlainObjective
from joulelab.zoo.request import WorkloadRequest
from joulelab.zoo.tasks.token_loss import require_room, summed_cross_entropy
from joulelab.zoo.tasks.token_rows import TokenRows, open_rows
from joulelab.zoo.tasks.unpadded import drop_no_layers, use_unpadded_attention
from joulelab.zoo.workload import Workload


def prepare(request: WorkloadRequest) -> Workload:
    model: Any = architectures.build(request)
    use_unpadded_attention(model)
    drop_no_layers(model)
    tokens = request.shape["tokens"]
    require_room(request, model.config, tokens)
    # one more than the model reads, so that its last position has a target too
    data = open_rows(request, model.config, tokens + 1)
    held_out = _batches(request, data.held_out) if data.held_out else None
    return Workload(model, PlainObjective(next_token_loss), _batches(request, data.train), held_out, notes=data.notes)


def next_token_loss(model: nn.Module, batch: TensorBatch) -> ObjectiveOutput:
    logits_BTV = model(input_ids=batch["input_ids"], use_cache=False).logits
    return ObjectiveOutput(summed_cross_entropy(logits_BTV, batch["targets"]), batch.count)


def _batches(request: WorkloadRequest, source: TokenRows) -> ShuffledRows:
    def make(rows: Rows, draw: int) -> TensorBatch:
        ids = torch.from_numpy(source.sequences(rows))
        input_ids_BT, targets_BT = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        count = targets_BT.numel()
        return TensorBatch({"input_ids": input_ids_BT, "targets": targets_BT}, len(rows), tokens=count, count=count)

    return ShuffledRows(source.rows, request.rows_per_batch, request.seed, make)
