"""Documents as one long line of tokens, each closed by an end-of-text, to be cut into rows of any length.

A small text is kept in memory. A large one is written once to a flat file and read through a memory map: opening it is
quick, ranks share one copy in the page cache, and the next run with the same text and tokenizer finds it there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joulelab.data.splits import Split
from joulelab.data.text_documents import Documents
from joulelab.errors import ConfigError, JoulelabError
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
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        return np.uint16 if self.ids <= 2**16 else np.uint32


def pack(documents: Documents, split: Split, encoding: Encoding) -> NDArray[Any]:
    """Every token of the split, one after another."""
    pieces = _pieces(documents.read(split), encoding)
    if documents.size_bytes is not None and documents.size_bytes <= SMALL_BYTES:
        return np.concatenate([np.empty(0, encoding.dtype), *pieces])
    key = json.dumps([documents.identity, str(split), encoding.name, encoding.end_id])
    return _kept(f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.tokens", pieces, encoding.dtype)


def _pieces(texts: Iterator[str], encoding: Encoding) -> Iterator[NDArray[Any]]:
    while some := list(islice(texts, _TEXTS_PER_CALL)):
        ends = np.array([encoding.end_id])
        rows = [row for ids in encoding.encode(some) for row in (np.asarray(ids, dtype=np.int64), ends)]
        piece = np.concatenate(rows)
        if piece.min() < 0 or piece.max() >= encoding.ids:
            # it would wrap round in 16 bits and train on nonsense without a word
            raise ConfigError(
                f"the tokenizer {encoding.name} made the id {piece.max()}; the model knows 0..{encoding.ids - 1}",
                "the tokenizer and the model belong to different vocabularies",
            )
        yield piece.astype(encoding.dtype)


def _kept(name: str, pieces: Iterator[NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    file = cache_folder() / "text" / name
    try:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            _write(file, pieces)
    except OSError as error:
        raise JoulelabError(
            f"the tokens cannot be kept in {file.parent}: {error}", "JOULELAB_CACHE names another folder"
        ) from error
    if file.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.memmap(file, dtype=dtype, mode="r")


def _write(file: Path, pieces: Iterator[NDArray[Any]]) -> None:
    """Under another name first: a file of this name is whole, whoever else writes it at the same time."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            for piece in pieces:
                piece.tofile(out)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
