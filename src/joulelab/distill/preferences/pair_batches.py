"""Pairs in the order of training: a pure function of seed and epoch, pairs of like length together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from joulelab.data.batches import TensorBatch
from joulelab.distill.preferences.pair_rows import PairRows
from joulelab.distill.preferences.pairs import Pair
from joulelab.errors import ConfigError

_WINDOW = 16
"""Batches among which pairs are sorted by length: wide enough to spare padding, narrow enough to stay a shuffle."""
Reference = Callable[[Sequence[Pair]], NDArray[np.float64]]


class Pairs(Protocol):
    def __len__(self) -> int: ...

    @property
    def lengths(self) -> NDArray[np.int64]: ...

    def pair(self, number: int) -> Pair: ...


class PairBatches:
    """A last batch that would be smaller than the others is left out; a set smaller than one batch is one batch."""

    def __init__(
        self, pairs: Pairs, batch_size: int, seed: int, reference: Reference | None = None, rows: PairRows | None = None
    ) -> None:
        """`reference` gives [pairs, 2] log-probabilities, as `ReferenceLogs` does; nothing: a live one is asked."""
        if batch_size < 1 or not len(pairs):
            raise ConfigError(f"{len(pairs)} pairs in batches of {batch_size}; expected at least 1 of each")
        self._pairs, self._batch_size, self._seed = pairs, batch_size, seed
        self._reference, self._rows = reference, rows or PairRows()
        self._epoch, self._order = -1, np.arange(len(pairs))

    @property
    def batches_per_epoch(self) -> int:
        return max(1, len(self._pairs) // self._batch_size)

    def at(self, epoch: int, index: int) -> TensorBatch:
        if not 0 <= index < self.batches_per_epoch:
            raise IndexError(f"batch {index} of an epoch of {self.batches_per_epoch}")
        if epoch != self._epoch:
            self._order, self._epoch = self._shuffled(epoch), epoch
        start = index * self._batch_size
        pairs = [self._pairs.pair(int(at)) for at in self._order[start : start + self._batch_size]]
        return self._rows.batch(pairs, self._reference(pairs) if self._reference else None)

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        random = np.random.default_rng([self._seed, epoch])
        drawn = random.permutation(len(self._pairs))[: self.batches_per_epoch * self._batch_size]
        lengths = self._pairs.lengths.sum(1)
        window = _WINDOW * self._batch_size
        some = [drawn[at : at + window] for at in range(0, len(drawn), window)]
        by_length = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in some])
        if len(by_length) < self._batch_size:
            return by_length
        batches = by_length.reshape(-1, self._batch_size)
        return batches[random.permutation(len(batches))].reshape(-1)
