"""Next-token prediction (GPT-2, OPT), and denoising from sequence to sequence: span corruption (T5), infilling
(BART)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from joulelab.data.batches import Rows, ShuffledRows, TensorBatch
from joulelab.data.masking import SpanPlan, collapse, draw_spans, plan_infilling, plan_sentinels
from joulelab.data.tokenize import Vocabulary
from joulelab.errors import ConfigError
from joulelab.zoo import objective
from joulelab.zoo.objective import ObjectiveOutput, PlainObjective, Workload
from joulelab.zoo.registry import WorkloadRequest
from joulelab.zoo.tasks.token_rows import (
    TokenRows,
    disable_layerdrop,
    open_rows,
    require_positions,
    summed_cross_entropy,
    use_unpadded_attention,
)


def prepare(request: WorkloadRequest) -> Workload:
    model: Any = objective.build(request)
    use_unpadded_attention(model)
    disable_layerdrop(model)
    tokens = request.shape["tokens"]
    require_positions(request, model.config, tokens)
    # one more token than the model reads, so that its last position has a target too
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


# Denoising, sequence to sequence: the input is a text with masked spans, the target is the spans (T5) or the whole text
# (BART).
#
# Shapes: B rows, R tokens of the whole text, S spans, T target tokens, V vocabulary.


Ids = NDArray[np.int64]
Denoising = Callable[[Ids, int], tuple[Ids, Ids]]
"""Maps rows of text and a random generator to inputs and targets."""


def prepare_span_corruption(request: WorkloadRequest) -> Workload:
    """Span corruption (T5): each span is replaced by a sentinel; the target is each sentinel followed by its span."""
    model: Any = objective.build(request)
    plan = plan_sentinels(request.shape["tokens"], request.shape["target_tokens"])

    def make(vocabulary: Vocabulary) -> Denoising:
        if len(vocabulary.sentinels) < plan.spans:
            raise ConfigError(f"the tokenizer leaves {len(vocabulary.sentinels)} ids for {plan.spans} sentinels")
        return lambda ids_BR, draw: corrupt_spans(ids_BR, plan, vocabulary, draw)

    return _prepare(request, model, plan.text, plan.spans, make)


def prepare_infilling(request: WorkloadRequest) -> Workload:
    """Text infilling (BART): each span is replaced by one mask token; the target is the whole text."""
    model: Any = objective.build(request)
    tokens, begin_id = request.shape["tokens"], int(model.config.bos_token_id)
    require_positions(request, model.config, tokens)
    plan = plan_infilling(tokens - 2)  # plus a begin and an end token
    return _prepare(request, model, plan.text, 0, lambda v: lambda ids, draw: infill(ids, plan, v, begin_id, draw))


def denoising_loss(model: nn.Module, batch: TensorBatch) -> ObjectiveOutput:
    logits_BTV = model(
        input_ids=batch["input_ids"], decoder_input_ids=batch["decoder_input_ids"], use_cache=False
    ).logits
    return ObjectiveOutput(summed_cross_entropy(logits_BTV, batch["targets"]), batch.count)


def corrupt_spans(ids_BR: Ids, plan: SpanPlan, vocabulary: Vocabulary, draw: int) -> tuple[Ids, Ids]:
    gone_BR = draw_spans(len(ids_BR), plan, draw)
    sentinels_S = np.array(vocabulary.sentinels)
    inputs = collapse(ids_BR, gone_BR, sentinels_S)
    # in the targets the kept text shrinks to sentinels: one before each span, because the text starts with kept tokens
    targets = collapse(ids_BR, ~gone_BR, sentinels_S)
    return _append_end(inputs, vocabulary.end_id), _append_end(targets, vocabulary.end_id)


def infill(ids_BR: Ids, plan: SpanPlan, vocabulary: Vocabulary, begin_id: int, draw: int) -> tuple[Ids, Ids]:
    if vocabulary.mask_id is None:
        raise ConfigError("this tokenizer has no mask token", "name a tokenizer that has one")
    inputs = collapse(ids_BR, draw_spans(len(ids_BR), plan, draw), np.full(plan.spans, vocabulary.mask_id))
    begin_B1 = np.full((len(ids_BR), 1), begin_id)
    inputs, targets = np.hstack([begin_B1, inputs]), np.hstack([begin_B1, ids_BR])
    return _append_end(inputs, vocabulary.end_id), _append_end(targets, vocabulary.end_id)


def _append_end(ids: Ids, end_id: int) -> Ids:
    return np.hstack([ids, np.full((len(ids), 1), end_id)])


def _prepare(
    request: WorkloadRequest, model: Any, text_tokens: int, sentinels: int, make: Callable[[Vocabulary], Denoising]
) -> Workload:
    use_unpadded_attention(model)
    disable_layerdrop(model)
    data = open_rows(request, model.config, text_tokens, sentinels)
    denoising, start_id = make(data.vocabulary), int(model.config.decoder_start_token_id)
    train, held_out = (
        _denoising_batches(request, rows, denoising, start_id) if rows else None for rows in (data.train, data.held_out)
    )
    assert train is not None
    return Workload(model, PlainObjective(denoising_loss), train, held_out, notes=data.notes)


def _denoising_batches(
    request: WorkloadRequest, source: TokenRows, denoising: Denoising, start_id: int
) -> ShuffledRows:
    def make(rows: Rows, draw: int) -> TensorBatch:
        inputs, targets_BT = denoising(source.sequences(rows), draw)
        shifted_BT = np.hstack([np.full((len(rows), 1), start_id), targets_BT[:, :-1]])
        tensors = {
            "input_ids": torch.from_numpy(inputs),
            "decoder_input_ids": torch.from_numpy(shifted_BT),
            "targets": torch.from_numpy(targets_BT),
        }
        return TensorBatch(tensors, len(rows), tokens=inputs.size + targets_BT.size, count=targets_BT.size)

    return ShuffledRows(source.rows, request.rows_per_batch, request.seed, make)
