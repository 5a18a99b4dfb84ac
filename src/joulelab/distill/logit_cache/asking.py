"""What a teacher is still to be asked: batches of rows, the same ones however the work is split or resumed.

Batches are cut before it is known what is there, and one that lacks an answer is asked about as a whole: the last bits
of a number depend on its neighbours in the batch, and a cache made in shares, or in two attempts, is to be the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from joulelab.data.chat.packing import PADDING, PackedRows
from joulelab.distill.logit_cache.keys import KEY_BYTES, pieces_of
from joulelab.distill.logit_cache.shards import open_shard, shard_files
from joulelab.runs.sharding import ALL, Shard


@dataclass(frozen=True, eq=False)
class ToAsk:
    batches: Sequence[NDArray[np.int64]]
    """Numbers of rows."""
    elsewhere: frozenset[bytes]
    """Keys that others keep, or will: an answer is kept once, by whoever has the first batch it is in."""
    samples: int
    """Rows that an earlier attempt has asked about, and their tokens."""
    tokens: int


def batches_to_ask(
    folder: Path, rows: PackedRows, batch_size: int, share: Shard = ALL, others: Iterable[Path] = ()
) -> ToAsk:
    """Of our share, what neither `folder` nor the caches that others made hold."""
    there, told = kept_keys([folder]), kept_keys(others)
    keys = {number: found for number in range(len(rows)) if (found := row_keys(rows, number))}
    numbers = list(keys)
    batches = [numbers[start : start + batch_size] for start in range(0, len(numbers), batch_size)]
    ours = share.units([keys[batch[0]][0].hex() for batch in batches])
    told |= _first_in_others(batches, keys, set(ours))
    wanted, done = [], []
    for batch in (batches[place] for place in ours):
        every = [key for number in batch for key in keys[number]]
        if any(key not in there and key not in told for key in every):
            wanted.append(np.array(batch, dtype=np.int64))
        elif any(key in there for key in every):
            done += batch
    tokens = sum(int(np.count_nonzero(rows.row(number).document != PADDING)) for number in done)
    return ToAsk(wanted, frozenset(told), len(done), tokens)


def row_keys(rows: PackedRows, number: int) -> list[bytes]:
    """Of the documents in a row that have something to learn."""
    row = rows.row(number)
    return [piece.key for piece in pieces_of(row.ids[None], row.trained[None], row.document[None])]


def kept_keys(folders: Iterable[Path]) -> set[bytes]:
    shards = (open_shard(path) for folder in folders for path in shard_files(folder))
    # numpy drops zeros at the end
    return {key.ljust(KEY_BYTES, b"\0") for shard in shards for key in shard.index["key"].tolist()}


def _first_in_others(batches: Sequence[Sequence[int]], keys: dict[int, list[bytes]], ours: set[int]) -> set[bytes]:
    """A text that stands in two batches belongs to the first of them."""
    owner: dict[bytes, int] = {}
    for place, batch in enumerate(batches):
        for number in batch:
            for key in keys[number]:
                owner.setdefault(key, place)
    return {key for key, place in owner.items() if place not in ours}
