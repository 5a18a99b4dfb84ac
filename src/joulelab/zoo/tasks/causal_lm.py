"""Next-token prediction: every position is trained on the one after it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from joulelab.data.batch_source import Rows, ShuffledRows, TensorBatch
from joulelab.zoo import architectures
from joulelab.zoo.objective import ObjectiveOutput, PlainObjective
from joulelab.zoo.tasks.token_rows import TokenRows, open_rows
from joulelab.zoo.workload import Workload, WorkloadRequest


def prepare(request: WorkloadRequest) -> Workload:
    model = architectures.build(request)
    train, validation = open_rows(request, vocabulary=int(model.config.vocab_size))  # type: ignore[union-attr,arg-type]
    return Workload(model, PlainObjective(next_token_loss), _batches(request, train), _batches(request, validation))


def next_token_loss(model: nn.Module, batch: TensorBatch) -> ObjectiveOutput:
    ids_BT = batch["input_ids"]
    logits_BTV = model(input_ids=ids_BT).logits
    loss_sum = functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="sum")
    return ObjectiveOutput(loss_sum, batch.count)


def _batches(request: WorkloadRequest, source: TokenRows) -> ShuffledRows:
    def make(rows: Rows, draw: int) -> TensorBatch:
        ids_BT = torch.from_numpy(source.sequences(rows))
        samples, tokens = ids_BT.shape
        return TensorBatch({"input_ids": ids_BT}, samples, samples * tokens, count=samples * (tokens - 1))

    return ShuffledRows(source.rows, request.rows_per_batch, request.seed, make)
