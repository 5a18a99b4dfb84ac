"""Padded tensors of windows, in an order that is a pure function of (seed, epoch), and which of them a model takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from joulelab.data.batch_source import Rows, TensorBatch
from joulelab.data.batches import batch_order
from joulelab.data.squad_store import SquadFeatures


class SquadBatches:
    """Batches by (epoch, index); windows of similar length go together, as padding costs joules and teaches nothing."""

    def __init__(self, features: SquadFeatures, batch_size: int, seed: int) -> None:
        self._features, self._batch_size, self._seed = features, batch_size, seed
        self._epoch: int | None = None
        self._order: list[Rows] = []

    @property
    def batches_per_epoch(self) -> int:
        return -(-len(self._features) // self._batch_size)

    def at(self, epoch: int, index: int) -> TensorBatch:
        if not 0 <= index < self.batches_per_epoch:
            raise IndexError(f"batch {index} of an epoch of {self.batches_per_epoch}")
        if epoch != self._epoch:
            self._order = batch_order(self._features.lengths, self._batch_size, self._seed, epoch)
            self._epoch = epoch
        return collate(self._features, self._order[index])


def iterate_in_order(features: SquadFeatures, batch_size: int) -> Iterator[tuple[Rows, TensorBatch]]:
    """For evaluation: every window once, longest first, so that a batch too large for the memory fails at once."""
    longest_first = np.argsort(-features.lengths, kind="stable").astype(np.int64)
    for start in range(0, len(longest_first), batch_size):
        rows = longest_first[start : start + batch_size]
        yield rows, collate(features, rows)


def collate(features: SquadFeatures, rows: Rows) -> TensorBatch:
    lengths = features.lengths[rows]
    shape = (len(rows), int(lengths.max()))
    ids_BT, types_BT = np.full(shape, features.pad_id, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    answerable_BT = np.zeros(shape, dtype=bool)
    for place, row in enumerate(rows):
        part, length = features.span(int(row)), lengths[place]
        ids_BT[place, :length], types_BT[place, :length] = features.tokens[part], features.types[part]
        answerable_BT[place, :length] = features.answerable(int(row))
    arrays = {
        "input_ids": ids_BT,
        "attention_mask": (np.arange(shape[1]) < lengths[:, None]).astype(np.int64),
        "token_type_ids": types_BT,
        "answerable": answerable_BT,
        "spans": np.array(features.spans[rows]),
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return TensorBatch(tensors, samples=len(rows), tokens=int(lengths.sum()), count=len(rows))


def takes_token_types(model: nn.Module) -> bool:
    """BERT does, DistilBERT does not; both eat the same batches."""
    return "token_type_ids" in inspect.signature(model.forward).parameters


def model_inputs(batch: TensorBatch, token_types: bool) -> dict[str, Tensor]:
    names = ("input_ids", "attention_mask", *(("token_type_ids",) if token_types else ()))
    return {name: batch[name] for name in names}
