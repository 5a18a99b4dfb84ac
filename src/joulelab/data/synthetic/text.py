"""Token sequences with a rule to learn: few of the vocabulary's ids are in use, and each has a favourite successor."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

IN_USE = 64
"""Distinct ids; learning which they are already takes the loss from ln(vocabulary) to ln(64)."""
FAITHFUL = 0.8
"""How often an id is followed by its favourite successor."""
SAMPLES = {"train": 100_000, "validation": 2_000, "test": 2_000}
_LANGUAGE_SEED = 597  # the language is the same in every run; only what is said in it varies


class SyntheticText:
    """Sequence `row` is a pure function of (seed, row)."""

    def __init__(self, vocabulary: int, tokens: int, seed: int, reserved: int = 10) -> None:
        """Ids below `reserved` are left to special tokens."""
        random = np.random.default_rng(_LANGUAGE_SEED)
        count = min(IN_USE, vocabulary - reserved)
        self._ids = reserved + random.choice(vocabulary - reserved, size=count, replace=False)
        self._successor = random.permutation(count)
        self._tokens, self._seed = tokens, seed

    def sequences(self, rows: NDArray[np.int64]) -> Ids:
        return np.stack([self._sequence(int(row)) for row in rows]).astype(np.int64)

    def _sequence(self, row: int) -> Ids:
        random = np.random.default_rng([self._seed, row])
        surprise = random.random(self._tokens) > FAITHFUL
        fresh = random.integers(len(self._ids), size=self._tokens)
        surprise[0] = True
        # positions since the last surprise, so that a whole sequence is one gather from the successors' powers
        starts = np.maximum.accumulate(np.where(surprise, np.arange(self._tokens), 0))
        steps = np.arange(self._tokens) - starts
        return self._ids[self._powers(int(steps.max()))[steps, fresh[starts]]]

    def _powers(self, highest: int) -> Ids:
        """Row k: where each id leads after k faithful steps."""
        powers = np.empty((highest + 1, len(self._ids)), dtype=np.int64)
        powers[0] = np.arange(len(self._ids))
        for step in range(highest):
            powers[step + 1] = self._successor[powers[step]]
        return powers
