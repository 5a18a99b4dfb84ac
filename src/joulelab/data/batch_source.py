"""What the training loop draws from: batches by position, and what a batch must know about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import TypeVar

from joulelab.errors import ConfigError

Rows = NDArray[np.int64]


class TrainingBatch(Protocol):
    @property
    def samples(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def to(self, device: torch.device) -> Self: ...


B_co = TypeVar("B_co", bound=TrainingBatch, covariant=True)


class BatchSource(Protocol[B_co]):
    """Batches by position, so that a run resumes at the exact batch with no state but (epoch, index)."""

    @property
    def batches_per_epoch(self) -> int: ...

    def at(self, epoch: int, index: int) -> B_co: ...


@dataclass(frozen=True, eq=False)
class TensorBatch:
    """Named tensors that belong together. What the loss needs as a plain number (`count`) was counted on the host,
    while the tensors were made: asking a GPU for it would make the host wait."""

    tensors: Mapping[str, Tensor]
    samples: int
    tokens: int = 0
    count: int = 0
    """What the loss is a mean over: masked positions, target tokens, samples."""
    expand: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    """Run once on the device, after the tensors are there: large synthetic inputs are made there, not carried there."""

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def to(self, device: torch.device) -> TensorBatch:
        tensors: Mapping[str, Tensor] = {
            name: value.to(device, non_blocking=True) for name, value in self.tensors.items()
        }
        return replace(self, tensors=self.expand(tensors) if self.expand else tensors, expand=None)

    def pin_memory(self) -> TensorBatch:
        """Page-locked, so that the copy to a GPU does not make the host wait."""
        return replace(self, tensors={name: value.pin_memory() for name, value in self.tensors.items()})


B = TypeVar("B", bound=TrainingBatch, default=TensorBatch)


class ShuffledRows(Generic[B]):
    """Batches of rows in an order that is a pure function of (seed, epoch); `make` turns rows into a batch.

    A last batch that would be smaller than the others is left out, as its odd shape would compile and measure apart;
    a set smaller than one batch is one batch.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int, make: Callable[[Rows, int], B]) -> None:
        """`make` gets the rows and a number of its own for this batch, to draw from what is not fixed by the rows."""
        if batch_size < 1 or not len(rows):
            raise ConfigError(f"{len(rows)} samples in batches of {batch_size}; expected at least 1 of each")
        self._rows, self._batch_size, self._seed, self._make = rows, batch_size, seed, make
        self._epoch = -1
        self._order = rows

    @property
    def batches_per_epoch(self) -> int:
        return max(1, len(self._rows) // self._batch_size)

    def at(self, epoch: int, index: int) -> B:
        if not 0 <= index < self.batches_per_epoch:
            raise IndexError(f"batch {index} of an epoch of {self.batches_per_epoch}")
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._rows)
            self._epoch = epoch
        start = index * self._batch_size
        draw = int(np.random.SeedSequence([self._seed, epoch, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))
        return self._make(self._order[start : start + self._batch_size], draw)
