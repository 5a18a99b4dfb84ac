"""A piece of text under which a teacher's answer is kept: by its content, so that no order can misalign it.

A packed row holds several documents that do not see each other. What the teacher says about one depends on its own
tokens alone, so each document of a row is a piece with its own key: another shuffle, another packing or another seed
finds the same answers again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joulelab.errors import ConfigError

KEY_BYTES = 16
Bools = NDArray[np.bool_]


def row_key(ids: NDArray[Any], trained: Bools | None = None) -> bytes:
    """Of the token ids and of which are trained; the first never is. Without `trained`: all the others are."""
    asked = np.ones(len(ids), dtype=np.bool_) if trained is None else np.asarray(trained, dtype=np.bool_)
    if len(asked) != len(ids):
        raise ConfigError(f"{len(ids)} ids and {len(asked)} marks of which are trained; expected as many")
    digest = hashlib.blake2b(np.uint64(len(ids)).tobytes(), digest_size=KEY_BYTES)
    digest.update(np.asarray(ids).astype("<u4").tobytes())
    digest.update(np.packbits(asked[1:]).tobytes())
    return digest.digest()


@dataclass(frozen=True)
class Piece:
    """A document's part of a row."""

    key: bytes
    row: int
    start: int
    stop: int
    targets: int
    """How many of its tokens are trained."""


def pieces_of(ids_BT: NDArray[Any], trained_BT: Bools, documents_BT: NDArray[Any] | None = None) -> list[Piece]:
    """The pieces with targets, in reading order; rows that are not packed are a piece each.

    Trained tokens, read along the rows, are the targets of these pieces one after another.
    """
    pieces = []
    for row, (ids_T, trained_T) in enumerate(zip(ids_BT, trained_BT, strict=True)):
        documents_T = np.zeros(len(ids_T)) if documents_BT is None else documents_BT[row]
        for start, stop in _runs(documents_T):
            targets = int(np.count_nonzero(trained_T[start + 1 : stop]))
            if targets:
                key = row_key(ids_T[start:stop], trained_T[start:stop])
                pieces.append(Piece(key, row, start, stop, targets))
    return pieces


def _runs(documents_T: NDArray[Any]) -> list[tuple[int, int]]:
    """(start, stop) of equal numbers next to each other; padding has a negative number."""
    edges = np.flatnonzero(np.diff(documents_T)) + 1
    bounds = [0, *edges.tolist(), len(documents_T)]
    return [(a, b) for a, b in pairwise(bounds) if b > a and documents_T[a] >= 0]


def first_of_each(keys: Sequence[bytes]) -> list[int]:
    """Places of the keys that did not come before: two documents with the same text are one."""
    seen: dict[bytes, int] = {}
    for place, key in enumerate(keys):
        seen.setdefault(key, place)
    return list(seen.values())
