"""Token sequences with a rule to learn: few of the vocabulary's ids are in use, and each has a favourite successor."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

IN_USE = 64
"""Distinct ids; learning which they are already takes the loss from ln(vocabulary) to ln(64)."""
FAITHFUL = 0.8
"""How often an id is followed by its favourite successor."""
_LANGUAGE_SEED = 597  # the language is the same in every run; only what is said in it varies


class SyntheticText:
    """Sequence `row` is a pure function of (seed, row)."""

    def __init__(self, vocabulary: int, tokens: int, seed: int, reserved: int = 10) -> None:
        """Ids below `reserved` are left to special tokens."""
        random = np.random.default_rng(_LANGUAGE_SEED)
        count = min(IN_USE, vocabulary - reserved)
        self._ids = reserved + random.choice(vocabulary - reserved, size=count, replace=False)
        self._tokens, self._seed = tokens, seed
        self._powers = _powers(random.permutation(count), tokens)

    def sequences(self, rows: NDArray[np.int64]) -> Ids:
        # Each row has a generator of its own; everything after the drawing is done for all rows at once.
        surprise_BT = np.empty((len(rows), self._tokens), dtype=bool)
        fresh_BT = np.empty((len(rows), self._tokens), dtype=np.int64)
        for place, row in enumerate(rows):
            random = np.random.default_rng([self._seed, int(row)])
            surprise_BT[place] = random.random(self._tokens) > FAITHFUL
            fresh_BT[place] = random.integers(len(self._ids), size=self._tokens)
        surprise_BT[:, 0] = True
        # positions since the last surprise, so that a sequence is one gather from the successors' powers
        here_T = np.arange(self._tokens)
        starts_BT = np.maximum.accumulate(np.where(surprise_BT, here_T, 0), axis=1)
        said_BT = np.take_along_axis(fresh_BT, starts_BT, axis=1)
        return self._ids[self._powers[here_T - starts_BT, said_BT]].astype(np.int64)


def _powers(successor: Ids, steps: int) -> Ids:
    """Row k: where each id leads after k faithful steps."""
    powers = np.empty((steps, len(successor)), dtype=np.int64)
    powers[0] = np.arange(len(successor))
    for step in range(1, steps):
        powers[step] = successor[powers[step - 1]]
    return powers
