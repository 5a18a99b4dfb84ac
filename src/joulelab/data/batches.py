"""Batches by position: the order in which rows are read, and the padded tensors made of them.

The order is a pure function of (lengths, batch size, seed, epoch). A trainer that resumes needs only the epoch and the
index of the next batch: there is no sampler state to save, and a resumed run sees the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import TypeVar

from joulelab.data.tokenized_text import TokenizedSet
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
    """Named tensors of one batch. `count` is computed on the host while the tensors are built: reading it from a GPU
    would make the host wait."""

    tensors: Mapping[str, Tensor]
    samples: int
    tokens: int = 0
    count: int = 0
    """What the loss is a mean over: masked positions, target tokens, samples."""
    expand: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    """Runs once on the device after the copy: large synthetic inputs are generated there instead of being copied."""

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

    A smaller last batch is dropped, because its shape would be compiled and measured separately; a set smaller than
    one batch is one batch.
    """

    def __init__(self, rows: Rows, batch_size: int, seed: int, make: Callable[[Rows, int], B]) -> None:
        """`make` gets the rows and a seed for this batch, for everything that the rows do not determine."""
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


# Texts of similar length share a batch, because padding uses energy and trains nothing. Rows are sorted by length only
# within this many batches: enough to make padding small, little enough that the texts of a batch change every epoch.
_BATCHES_SORTED_TOGETHER = 20


@dataclass(frozen=True, eq=False)
class Batch:
    input_ids: torch.Tensor  # [B, T] int64
    attention_mask: torch.Tensor  # [B, T] int64, 1 for a token, 0 for padding
    labels: torch.Tensor  # [B] int64
    rows: Rows  # which rows of the set these are
    tokens: int  # without padding

    @property
    def samples(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device | str) -> Batch:
        return Batch(
            input_ids=self.input_ids.to(device, non_blocking=True),
            attention_mask=self.attention_mask.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
            rows=self.rows,
            tokens=self.tokens,
        )


def batch_order(
    lengths: NDArray[np.int64], batch_size: int, seed: int, epoch: int, group_by_length: bool = True
) -> list[Rows]:
    """Row numbers of each batch: every row once, and at most one batch is smaller than the others."""
    _check_batch_size(batch_size)
    # A generator per epoch, seeded by both numbers: the order of epoch 7 does not require the
    # orders of epochs 0 to 6.
    random = np.random.default_rng([seed, epoch])
    shuffled = random.permutation(len(lengths)).astype(np.int64)
    if not group_by_length:
        return _cut(shuffled, batch_size)
    batches: list[Rows] = []
    for chunk in _cut(shuffled, batch_size * _BATCHES_SORTED_TOGETHER):
        batches.extend(_cut(chunk[np.argsort(lengths[chunk], kind="stable")], batch_size))
    # Shuffled again, or training would see short batches before long ones within every chunk.
    return [batches[index] for index in random.permutation(len(batches))]


class BatchStream:
    """Batches by (epoch, index); the order of one epoch is cached, because a trainer reads its batches in sequence."""

    def __init__(self, dataset: TokenizedSet, batch_size: int, seed: int, group_by_length: bool = True) -> None:
        _check_batch_size(batch_size)
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.group_by_length = group_by_length
        self._epoch: int | None = None
        self._order: list[Rows] = []

    @property
    def batches_per_epoch(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def order(self, epoch: int) -> list[Rows]:
        if epoch != self._epoch:
            lengths = self.dataset.lengths
            self._order = batch_order(lengths, self.batch_size, self.seed, epoch, self.group_by_length)
            self._epoch = epoch
        return self._order

    def at(self, epoch: int, index: int) -> Batch:
        if not 0 <= index < self.batches_per_epoch:
            raise IndexError(f"batch {index} of an epoch of {self.batches_per_epoch}")
        return collate(self.dataset, self.order(epoch)[index])


def iterate_in_order(dataset: TokenizedSet, batch_size: int) -> Iterator[Batch]:
    """For evaluation: every row once, longest first, so that a batch that does not fit into memory fails first."""
    _check_batch_size(batch_size)
    longest_first = np.argsort(-dataset.lengths, kind="stable").astype(np.int64)
    for rows in _cut(longest_first, batch_size):
        yield collate(dataset, rows)


def collate(dataset: TokenizedSet, rows: Rows) -> Batch:
    texts = [dataset.tokens[dataset.span(int(number))] for number in rows]
    lengths = np.array([len(text) for text in texts])
    input_ids = np.full((len(texts), int(lengths.max())), dataset.pad_id, dtype=np.int64)
    for index, text in enumerate(texts):
        input_ids[index, : len(text)] = text
    mask = (np.arange(input_ids.shape[1]) < lengths[:, None]).astype(np.int64)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(mask),
        labels=torch.from_numpy(dataset.labels[rows]),
        rows=rows,
        tokens=int(lengths.sum()),
    )


def padded_share(lengths: NDArray[np.int64], batches: Sequence[Rows]) -> float:
    """The share of positions that are padding when each batch is padded to its longest row."""
    positions = sum(len(rows) * int(lengths[rows].max()) for rows in batches)
    real = sum(int(lengths[rows].sum()) for rows in batches)
    return 1.0 - real / positions if positions else 0.0


def _cut(rows: Rows, size: int) -> list[Rows]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise ConfigError(f"the batch size is {batch_size}; expected 1 or more", "set a batch size of at least 1")
