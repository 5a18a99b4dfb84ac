"""Documents as one long line of tokens, each closed by an end-of-text, to be cut into rows of any length.

A small text is kept in memory. A large one is written once to a store in the cache; the next run with the same text and
tokenizer finds it there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joulelab.data.splits import Split
from joulelab.data.store import FORMAT, Column, RaggedStore, is_store, narrow, store_writer, token_column
from joulelab.data.text_documents import Documents
from joulelab.errors import JoulelabError
from joulelab.runs.paths import cache_folder

SMALL_BYTES = 64 * 2**20
"""Text up to this size is tokenised again by every run, in a few seconds."""
_TEXTS_PER_CALL = 1_000  # enough for a fast tokenizer to use its threads, little enough to keep memory flat


@dataclass(frozen=True)
class Encoding:
    """How text becomes ids."""

    name: str
    """Of the tokenizer; other tokens have another name."""
    encode: Callable[[list[str]], Iterable[ArrayLike]]
    end_id: int
    ids: int
    """All ids lie below this."""

    @property
    def column(self) -> Column:
        return token_column(self.ids)


class _CachedTokens(RaggedStore):
    NOUN = "cached text"
    HINT = "remove the folder; the next run writes it again"


def pack(documents: Documents, split: Split, encoding: Encoding) -> NDArray[Any]:
    """Every token of the split, one after another."""
    blocks = _blocks(documents.read(split), encoding)
    if documents.size_bytes is not None and documents.size_bytes <= SMALL_BYTES:
        small = (narrow(ids, encoding.column) for _, ids in blocks)
        return np.concatenate([np.empty(0, encoding.column.dtype), *small])
    key = json.dumps([documents.identity, str(split), encoding.name, encoding.end_id, encoding.ids, FORMAT])
    return _cached(hashlib.sha256(key.encode()).hexdigest()[:24], blocks, encoding.column)


def _blocks(texts: Iterator[str], encoding: Encoding) -> Iterator[tuple[list[int], NDArray[np.int64]]]:
    """Lengths and ids of many documents at a time."""
    end = np.array([encoding.end_id])
    while some := list(islice(texts, _TEXTS_PER_CALL)):
        rows = [np.append(np.asarray(ids, dtype=np.int64), end) for ids in encoding.encode(some)]
        yield [len(row) for row in rows], np.concatenate(rows)


def _cached(name: str, blocks: Iterator[tuple[list[int], NDArray[np.int64]]], column: Column) -> NDArray[Any]:
    folder = cache_folder() / "text" / name
    try:
        if not is_store(folder):
            # Ranks start together and all of them may write: the first one to finish is kept.
            with store_writer(folder, {"tokens": column}, keep_existing=True) as writer:
                for lengths, ids in blocks:
                    writer.append(lengths, tokens=ids)
    except OSError as error:
        raise JoulelabError(
            f"tokens cannot be written to {folder.parent}: {error}", "set JOULELAB_CACHE to another folder"
        ) from error
    return _CachedTokens(folder).tokens
