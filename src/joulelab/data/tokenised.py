"""Tokenised texts as flat arrays on disk, read through a memory map.

One long array of tokens and the offsets of its rows: opening a set is quick however large it is, several processes
share one copy in the page cache, and there is no pickle, so a set from elsewhere is opened without running its code.
The same texts and the same tokenizer give the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from joulelab.data.labelled_text import LabelledText
from joulelab.errors import ConfigError, JoulelabError, NotFoundError
from joulelab.runs.soundness import words_for

FORMAT = 1
_TEXTS_PER_CALL = 1_000  # enough for a fast tokenizer to use its threads, little enough to keep memory flat

Encode = Callable[[list[str]], list[list[int]]]


@dataclass(frozen=True, eq=False)
class TokenisedSet:
    folder: Path
    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    ids: tuple[str, ...]
    class_names: tuple[str, ...]
    vocab_size: int
    pad_id: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def tokens_total(self) -> int:
        return int(self.offsets[-1])

    def row(self, number: int) -> NDArray[Any]:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of a set of {len(self)}")
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]


def write(folder: Path, data: LabelledText, encode: Encode, vocab_size: int, pad_id: int) -> TokenisedSet:
    if len(data) == 0:
        raise ConfigError("there are no texts to tokenise", "ask for at least one row")
    rows = [_checked(row, number, data, vocab_size) for number, row in enumerate(_encoded(data, encode))]
    dtype = np.uint16 if vocab_size < 65_536 else np.int32
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    meta = {
        "format": FORMAT,
        "rows": len(rows),
        "vocab_size": vocab_size,
        "pad_id": pad_id,
        "class_names": list(data.class_names),
    }
    folder.mkdir(parents=True, exist_ok=True)
    # meta.json goes first and comes last: a folder that has one is whole, whatever happened in between.
    (folder / "meta.json").unlink(missing_ok=True)
    _replace_array(folder / "tokens.npy", np.concatenate(rows).astype(dtype))
    _replace_array(folder / "offsets.npy", offsets)
    _replace_array(folder / "labels.npy", np.array(data.labels, dtype=np.int64))
    _replace_json(folder / "ids.json", list(data.ids))
    _replace_json(folder / "meta.json", meta)
    return open_set(folder)


def open_set(folder: Path) -> TokenisedSet:
    if not (folder / "meta.json").is_file():
        raise NotFoundError(
            f"{folder.absolute()} holds no (complete) tokenised set: meta.json is missing", "write it again"
        )
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta["format"] != FORMAT:
            raise ValueError(f"its format is {meta['format']}, expected {FORMAT}")
        opened = TokenisedSet(
            folder=folder,
            tokens=np.load(folder / "tokens.npy", mmap_mode="r", allow_pickle=False),
            offsets=np.load(folder / "offsets.npy", allow_pickle=False),
            labels=np.load(folder / "labels.npy", allow_pickle=False),
            ids=tuple(json.loads((folder / "ids.json").read_text(encoding="utf-8"))),
            class_names=tuple(meta["class_names"]),
            vocab_size=meta["vocab_size"],
            pad_id=meta["pad_id"],
        )
        _refuse_disagreement(opened, meta["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JoulelabError(
            f"the tokenised set {folder.absolute()} is damaged: {words_for(error)}", "write it again"
        ) from error
    return opened


def _encoded(data: LabelledText, encode: Encode) -> Iterator[list[int]]:
    for start in range(0, len(data), _TEXTS_PER_CALL):
        texts = list(data.texts[start : start + _TEXTS_PER_CALL])
        rows = encode(texts)
        if len(rows) != len(texts):
            raise ValueError(f"encode() made {len(rows)} rows of {len(texts)} texts")
        yield from rows


def _checked(row: list[int], number: int, data: LabelledText, vocab_size: int) -> NDArray[np.int64]:
    """A token outside the vocabulary would wrap round in uint16 and train on nonsense without a word."""
    tokens = np.asarray(row, dtype=np.int64)
    if len(tokens) == 0:
        raise ConfigError(f"text {number} ({data.ids[number]}) has no tokens", "remove it, or use another tokenizer")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ConfigError(
            f"text {number} ({data.ids[number]}) has a token outside 0..{vocab_size - 1}",
            "the tokenizer and the vocabulary size belong to different models",
        )
    return tokens


def _refuse_disagreement(opened: TokenisedSet, rows: int) -> None:
    if not len(opened.ids) == len(opened.labels) == len(opened.offsets) - 1 == rows:
        raise ValueError("ids, labels and offsets have different lengths")
    if opened.tokens_total != len(opened.tokens):
        raise ValueError(f"{len(opened.tokens)} tokens, expected {opened.tokens_total}")


def _replace_array(path: Path, array: NDArray[Any]) -> None:
    _replace(path, lambda file: np.save(file, array, allow_pickle=False))


def _replace_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)
    _replace(path, lambda file: file.write(text.encode()))


def _replace(path: Path, write_to: Callable[[IO[bytes]], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write_to(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
