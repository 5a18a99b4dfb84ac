"""Packed rows as batches for the one training loop: by position, so that a run resumes without any state of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from joulelab.data.batch_source import Rows, ShuffledRows
from joulelab.data.chat.packing import PADDING, PackedRows

NOT_TRAINED = -100
"""The label that torch's losses leave out."""
_BOUNDS_STEP = 64  # lists of bounds have few different lengths, as each one would be compiled apart


@dataclass(frozen=True, eq=False)
class CausalBatch:
    """B rows of T tokens. Labels lie where their ids lie; the loss compares logits[:, :-1] with labels[:, 1:]."""

    ids: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64, NOT_TRAINED where nothing is to be learned
    positions: Tensor  # [B, T] int64, from 0 in each document
    documents: Tensor  # [B, T] int64, the document's place in the row; PADDING at the row's end
    bounds: Tensor  # int32, where documents begin if all rows lie one after another; its end repeats the last token
    rows: Rows  # which of the packed rows these are
    tokens: int  # without padding
    count: int  # labels to learn

    @property
    def samples(self) -> int:
        """Rows."""
        return len(self.ids)

    def to(self, device: torch.device) -> CausalBatch:
        return self._with_each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> CausalBatch:
        """Page-locked, so that the copy to a GPU does not make the host wait."""
        return self._with_each(Tensor.pin_memory)

    def _with_each(self, change: Callable[[Tensor], Tensor]) -> CausalBatch:
        return replace(
            self,
            ids=change(self.ids),
            labels=change(self.labels),
            positions=change(self.positions),
            documents=change(self.documents),
            bounds=change(self.bounds),
        )


def causal_batch(packed: PackedRows, rows: Rows) -> CausalBatch:
    found = [packed.row(int(number)) for number in rows]
    ids = np.stack([row.ids for row in found])
    trained = np.stack([row.trained for row in found])
    positions = np.stack([row.position for row in found])
    documents = np.stack([row.document for row in found])
    return CausalBatch(
        ids=torch.from_numpy(ids),
        labels=torch.from_numpy(np.where(trained, ids, NOT_TRAINED)),
        positions=torch.from_numpy(positions),
        documents=torch.from_numpy(documents),
        bounds=document_bounds(torch.from_numpy(positions)),
        rows=rows,
        tokens=int(np.count_nonzero(documents != PADDING)),
        count=int(np.count_nonzero(trained)),
    )


def document_bounds(positions: Tensor) -> Tensor:
    """A document begins wherever positions begin anew, padding too."""
    starts = (positions.flatten() == 0).nonzero().flatten()
    size = -(-(len(starts) + 1) // _BOUNDS_STEP) * _BOUNDS_STEP
    bounds = torch.full((size,), positions.numel(), dtype=torch.int32)
    bounds[: len(starts)] = starts.to(torch.int32)
    return bounds


def training_batches(packed: PackedRows, batch_size: int, seed: int) -> ShuffledRows[CausalBatch]:
    """Every row once an epoch, in an order of (seed, epoch); a last batch that would be smaller is left out."""
    every = np.arange(len(packed), dtype=np.int64)
    return ShuffledRows(every, batch_size, seed, lambda rows, draw: causal_batch(packed, rows))


def batches_in_order(packed: PackedRows, batch_size: int) -> Iterator[CausalBatch]:
    """For evaluation, and for a teacher who writes down what it thinks: every row once, the last batch smaller."""
    every = np.arange(len(packed), dtype=np.int64)
    for start in range(0, len(packed), batch_size):
        yield causal_batch(packed, every[start : start + batch_size])
