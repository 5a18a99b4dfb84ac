"""Masked positions drawn on the host, afresh for every batch, as BERT's are: 15 % of a row, 80/10/10.

Each row has exactly the same number of them, so that shapes never change and a compiled model is compiled once.

Shapes: B rows, T tokens, K masked positions of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from joulelab.data.vocabulary import Vocabulary
from joulelab.errors import ConfigError

SHARE = 0.15
"""Of a row's tokens, to be predicted."""
SHOWN_AS_MASK, SHOWN_AS_ANOTHER = 0.8, 0.1
"""Of those; the rest stay as they are, so that a model cannot trust what it sees."""

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Masked:
    input_ids: Ids
    """[B, T]."""
    positions: Ids
    """[B, K], in order."""
    targets: Ids
    """[B, K]: what stood there."""


def masked_per_row(tokens: int) -> int:
    return max(1, round(SHARE * tokens))


def mask_rows(ids_BT: Ids, vocabulary: Vocabulary, draw: int) -> Masked:
    if vocabulary.mask_id is None:
        raise ConfigError("this tokenizer has no mask token", "name a tokenizer of a masked language model")
    random = np.random.default_rng(draw)
    positions_BK = _choose(ids_BT, vocabulary.end_id, random)
    targets_BK = np.take_along_axis(ids_BT, positions_BK, axis=1)
    fate_BK = random.random(positions_BK.shape)
    another_BK = random.integers(vocabulary.plain.start, vocabulary.plain.stop, size=positions_BK.shape)
    shown_BK = np.where(fate_BK < SHOWN_AS_MASK + SHOWN_AS_ANOTHER, another_BK, targets_BK)
    shown_BK = np.where(fate_BK < SHOWN_AS_MASK, vocabulary.mask_id, shown_BK)
    input_ids_BT = ids_BT.copy()
    np.put_along_axis(input_ids_BT, positions_BK, shown_BK, axis=1)
    return Masked(input_ids_BT, positions_BK, targets_BK)


def _choose(ids_BT: Ids, end_id: int, random: np.random.Generator) -> Ids:
    """The K smallest of one random number per token, in order; ends of documents come last of all."""
    lots_BT = random.random(ids_BT.shape)
    lots_BT[ids_BT == end_id] += 1.0
    count = masked_per_row(ids_BT.shape[1])
    return np.sort(np.argpartition(lots_BT, count - 1, axis=1)[:, :count], axis=1).astype(np.int64)
