"""Tokenized texts with a class each, in a store on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from joulelab.data.labelled_text import LabelledText
from joulelab.data.store import Column, RaggedStore, store_writer, token_column
from joulelab.errors import ConfigError

_TEXTS_PER_CALL = 1_000  # enough for a fast tokenizer to use its threads, little enough to keep memory flat

Encode = Callable[[list[str]], list[list[int]]]


class TokenisedSet(RaggedStore):
    COLUMNS = ("tokens", "labels")
    NOUN = "tokenized set"

    def _read_attributes(self) -> None:
        self.labels: NDArray[np.int64] = self.columns["labels"]
        self.class_names: tuple[str, ...] = tuple(self.attributes["class_names"])
        self.vocab_size: int = self.attributes["vocab_size"]
        self.pad_id: int = self.attributes["pad_id"]

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The hash of each text, by which rows of two sets are matched."""
        return tuple(self.attachment("ids")["ids"])


def write(folder: Path, data: LabelledText, encode: Encode, vocab_size: int, pad_id: int) -> TokenisedSet:
    if len(data) == 0:
        raise ConfigError("there are no texts to tokenize", "ask for at least one row")
    columns = {"tokens": token_column(vocab_size), "labels": Column("<i8", per="row")}
    with store_writer(folder, columns) as writer:
        for start in range(0, len(data), _TEXTS_PER_CALL):
            texts = slice(start, start + _TEXTS_PER_CALL)
            rows = encode(list(data.texts[texts]))
            lengths = [len(row) for row in rows]
            if len(rows) != len(data.texts[texts]):
                raise ValueError(f"encode() returned {len(rows)} rows for {len(data.texts[texts])} texts")
            if 0 in lengths:
                number = start + lengths.index(0)
                raise ConfigError(
                    f"text {number} ({data.ids[number]}) has no tokens", "remove it, or use another tokenizer"
                )
            ids = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=sum(lengths))
            writer.append(lengths, tokens=ids, labels=data.labels[texts])
        writer.attributes.update(class_names=list(data.class_names), vocab_size=vocab_size, pad_id=pad_id)
        writer.attach("ids", {"ids": list(data.ids)})
    return TokenisedSet(folder)


def open_set(folder: Path) -> TokenisedSet:
    return TokenisedSet(folder)
