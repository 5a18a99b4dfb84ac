"""Masked language modelling: what was masked is predicted, and nothing else is projected to the vocabulary.

Shapes: B rows, T tokens, K masked positions of a row, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from joulelab.data.batches import Rows, ShuffledRows, TensorBatch
from joulelab.data.masking import mask_rows
from joulelab.data.tokenize import Vocabulary
from joulelab.zoo import architectures
from joulelab.zoo.objective import ObjectiveOutput, PlainObjective
from joulelab.zoo.request import WorkloadRequest
from joulelab.zoo.tasks.token_loss import require_room, summed_cross_entropy
from joulelab.zoo.tasks.token_rows import TokenRows, open_rows
from joulelab.zoo.tasks.unpadded import use_unpadded_attention
from joulelab.zoo.workload import Workload


def prepare(request: WorkloadRequest) -> Workload:
    """Of the entry's options: `head`, the modules after the encoder in their order; `idle`, words in the names of
    parameters that this task never reaches; `settings`, what a length of input asks of the architecture."""
    options, tokens = request.entry.options, request.shape["tokens"]
    fitting = options["settings"](request.size.settings, tokens) if "settings" in options else {}
    model: Any = at_positions(architectures.build(request, **fitting), options["head"])
    use_unpadded_attention(model)
    require_room(request, model.config, tokens)
    model.config.use_cache = False
    # A parameter without a gradient would keep ranks waiting for it.
    for name, parameter in model.named_parameters():
        if any(word in name for word in options.get("idle", ())):
            parameter.requires_grad_(False)
    data = open_rows(request, model.config, tokens)
    held_out = _batches(request, data.held_out, data.vocabulary) if data.held_out else None
    batches = _batches(request, data.train, data.vocabulary)
    return Workload(model, PlainObjective(masked_loss), batches, held_out, notes=data.notes)


def masked_loss(model: nn.Module, batch: TensorBatch) -> ObjectiveOutput:
    logits_BKV = model(input_ids=batch["input_ids"], positions=batch["positions"])
    return ObjectiveOutput(summed_cross_entropy(logits_BKV, batch["targets"]), batch.count)


class AtPositions(nn.Module):
    """Mixed into a masked language model of transformers: `model(ids, positions=...)` gives logits there alone.

    At 15 % of the positions the projection to the vocabulary, its logits and their gradient cost 15 %.
    """

    head_modules: tuple[str, ...]

    def forward(self, input_ids: Tensor | None = None, positions: Tensor | None = None, **kwargs: Any) -> Any:
        if positions is None:
            return super().forward(input_ids=input_ids, **kwargs)
        encoder: Any = self.base_model
        hidden_BTD = encoder(input_ids=input_ids).last_hidden_state
        features_BK = hidden_BTD.gather(1, positions.unsqueeze(-1).expand(-1, -1, hidden_BTD.shape[-1]))
        for name in self.head_modules:
            features_BK = getattr(self, name)(features_BK)
        return features_BK


def at_positions(model: nn.Module, head: tuple[str, ...]) -> nn.Module:
    """The same model under the same class name with the same parameters: it saves, loads and shards as before."""
    kind = type(model)
    model.__class__ = type(kind.__name__, (AtPositions, kind), {"head_modules": head})
    return model


def _batches(request: WorkloadRequest, source: TokenRows, vocabulary: Vocabulary) -> ShuffledRows:
    def make(rows: Rows, draw: int) -> TensorBatch:
        masked = mask_rows(source.sequences(rows), vocabulary, draw)
        tensors = {
            "input_ids": torch.from_numpy(masked.input_ids),
            "positions": torch.from_numpy(masked.positions),
            "targets": torch.from_numpy(masked.targets),
        }
        return TensorBatch(tensors, len(rows), tokens=masked.input_ids.size, count=masked.targets.size)

    return ShuffledRows(source.rows, request.rows_per_batch, request.seed, make)
