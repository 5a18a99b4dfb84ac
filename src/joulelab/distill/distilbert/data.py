"""Documents as tokens, which of them are held out, and the sequences to train on.

Long documents are split, poor sequences dropped; or documents are concatenated and cut into full rows. Only the offsets
of the sequences are kept in memory; tokens are read from the store when a batch is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from joulelab.data import sources
from joulelab.data.masking import read_counts, write_counts
from joulelab.data.splits import parse_split
from joulelab.data.text import open_documents
from joulelab.data.token_store import TokenStore, is_store, open_store
from joulelab.data.tokenize import binarize, describe, usual_workers
from joulelab.distill.distilbert.config import LmData
from joulelab.errors import ConfigError
from joulelab.zoo.pretrained import load_tokenizer

_TOKENS, _COUNTS = "tokens", "counts.npy"
_ROWS_AT_A_TIME = 10_000
_TOKENS_AT_A_TIME = 1 << 24

Ids = NDArray[np.int64]


# documents


@dataclass(frozen=True, eq=False)
class Corpus:
    store: TokenStore
    train: Ids
    """Numbers of the documents to train on."""
    held_out: Ids
    counts_V: Ids
    """Occurrences of each token in the training documents."""


def write_corpus(
    folder: Path, config: LmData, tokenizer_name: str, family: str, count: Callable[[int, int], None]
) -> None:
    """Tokenize the text, unless it is a token store already, and count tokens; `count(documents, tokens)` reports
    progress."""
    given = _given_store(config)
    if given is None:
        documents = open_documents(config.source)
        tokenizer = describe(load_tokenizer(tokenizer_name), tokenizer_name, family)
        texts = documents.read(parse_split(config.split))
        store = binarize(texts, folder / _TOKENS, tokenizer, workers=usual_workers(documents.size_bytes), tick=count)
    else:
        store = open_store(given)
    train, _ = split_documents(len(store), config.validation_size)
    counts_V = read_counts(Path(config.token_counts)) if config.token_counts else _count_tokens(store, train)
    write_counts(counts_V, folder / _COUNTS)
    open_corpus(folder, config)  # fails here, in the stage that made it, if counts and vocabulary do not match


def open_corpus(folder: Path, config: LmData) -> Corpus:
    store = open_store(_given_store(config) or folder / _TOKENS)
    counts_V = read_counts(folder / _COUNTS)
    if len(counts_V) < store.vocab_size:
        raise ConfigError(
            f"token counts of {len(counts_V):,} tokens for a vocabulary of {store.vocab_size:,}",
            "count again: `joulelab prepare token-counts`",
        )
    return Corpus(store, *split_documents(len(store), config.validation_size), counts_V[: store.vocab_size])


def _given_store(config: LmData) -> Path | None:
    """The token store that the user named, if it is one."""
    path = sources.parse(config.source).path
    return path if path is not None and path.is_dir() and is_store(path) else None


def split_documents(documents: int, held_out: int) -> tuple[Ids, Ids]:
    """(to train on, held out); held-out documents are spaced evenly, because files are often sorted."""
    if held_out >= documents:
        raise ConfigError(
            f"{held_out} of {documents} documents were to be held out: none is left to train on",
            "lower data.validation_size, or use more text",
        )
    places = np.unique(np.linspace(0, documents - 1, held_out + 2)[1:-1].round().astype(np.int64))
    return np.setdiff1d(np.arange(documents), places), places


def _count_tokens(store: TokenStore, rows: Ids) -> Ids:
    counts_V = np.zeros(store.vocab_size, dtype=np.int64)
    for start in range(0, len(rows), _ROWS_AT_A_TIME):
        ids = np.concatenate([store.row(int(row)) for row in rows[start : start + _ROWS_AT_A_TIME]])
        counts_V += np.bincount(ids, minlength=store.vocab_size)
    return counts_V


# sequences


class Sequences(Protocol):
    @property
    def lengths(self) -> Ids: ...

    def at(self, number: int) -> Ids: ...


@dataclass(frozen=True)
class Limits:
    """Which sequences are trained on."""

    max_tokens: int
    min_tokens: int
    """Sequences of this many tokens or fewer are dropped."""
    max_unknown_share: float
    """Sequences with this share of unknown tokens or more are dropped."""


@dataclass(frozen=True, eq=False)
class CutSequences:
    """Segments of the store's tokens; the tokenizer's first and last special tokens are added where a split removed
    them."""

    store: TokenStore
    starts: Ids
    stops: Ids
    adds_first: NDArray[np.bool_]
    adds_last: NDArray[np.bool_]

    @property
    def lengths(self) -> Ids:
        return self.stops - self.starts + self.adds_first + self.adds_last

    def at(self, number: int) -> Ids:
        ids = np.asarray(self.store.tokens[self.starts[number] : self.stops[number]], dtype=np.int64)
        first, last = boundary_tokens(self.store)
        front = [first] if self.adds_first[number] else []
        back = [last] if self.adds_last[number] else []
        return np.concatenate([front, ids, back]).astype(np.int64)

    def only(self, kept: NDArray[np.bool_]) -> CutSequences:
        return CutSequences(
            self.store, self.starts[kept], self.stops[kept], self.adds_first[kept], self.adds_last[kept]
        )


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Sequences concatenated and cut into rows of one length; the remainder at the end is dropped."""

    cut: CutSequences
    tokens: int
    ends: Ids
    """Where each sequence ends in the concatenation."""

    @property
    def lengths(self) -> Ids:
        return np.full(int(self.ends[-1]) // self.tokens, self.tokens, dtype=np.int64)

    def at(self, number: int) -> Ids:
        start, stop = number * self.tokens, (number + 1) * self.tokens
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        joined = np.concatenate([self.cut.at(place) for place in range(first, last + 1)])
        before = int(self.ends[first - 1]) if first else 0
        return joined[start - before : stop - before]


def sequences_of(corpus: Corpus, documents: Ids, config: LmData) -> Sequences:
    limits = Limits(config.max_model_input_size, config.min_tokens, config.max_unknown_share)
    cut = cut_sequences(corpus.store, documents, limits)
    return pack_rows(cut, config.max_model_input_size) if config.packing else cut


def cut_sequences(store: TokenStore, rows: Ids, limits: Limits) -> CutSequences:
    """The documents `rows` as sequences of at most max_tokens, without those too short or with too many unknowns."""
    cut = _split(store, rows, limits.max_tokens)
    unknown = _count_unknown(cut)
    kept = (cut.lengths > limits.min_tokens) & (unknown < limits.max_unknown_share * cut.lengths)
    if not kept.any():
        raise ConfigError(
            f"none of {len(cut.starts)} sequences has more than {limits.min_tokens} tokens and less than "
            f"{100 * limits.max_unknown_share:g} % unknown ones",
            "check the tokenizer and the text",
        )
    return cut.only(kept)


def pack_rows(cut: CutSequences, tokens: int) -> PackedRows:
    packed = PackedRows(cut, tokens, np.cumsum(cut.lengths))
    if not len(packed.lengths):
        raise ConfigError(
            f"{int(packed.ends[-1])} tokens do not fill one row of {tokens}", "lower data.max_model_input_size"
        )
    return packed


def boundary_tokens(store: TokenStore) -> tuple[int | None, int | None]:
    """First and last token of a sequence: BERT's [CLS] and [SEP], RoBERTa's <s> and </s>, GPT-2's end of text."""
    special = store.specials
    return special.get("cls", special.get("bos")), special.get("sep", special.get("eos"))


def _split(store: TokenStore, rows: Ids, max_tokens: int) -> CutSequences:
    starts, stops = store.offsets[rows], store.offsets[rows + 1]
    first, last = boundary_tokens(store)
    room = max_tokens - (first is not None) - (last is not None)
    lengths = stops - starts
    pieces = np.where(lengths > max_tokens, -(-lengths // room), (lengths > 0).astype(np.int64))
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = np.repeat(starts, pieces) + number * room
    whole = np.repeat(lengths <= max_tokens, pieces)
    end = np.where(whole, np.repeat(stops, pieces), np.minimum(begin + room, np.repeat(stops, pieces)))
    nothing = np.zeros(len(begin), dtype=bool)
    adds_first = ~whole & (store.tokens[begin] != first) if first is not None else nothing
    adds_last = ~whole & (store.tokens[end - 1] != last) if last is not None else nothing
    return CutSequences(store, begin, end, adds_first, adds_last)


def _count_unknown(cut: CutSequences) -> Ids:
    """Unknown tokens are rare, so their positions are found once and counted between the ends of each sequence."""
    unknown, tokens = cut.store.specials.get("unk"), cut.store.tokens
    if unknown is None or unknown == cut.store.specials.get("eos"):  # GPT-2 encodes every byte; its unk is its eos
        return np.zeros(len(cut.starts), dtype=np.int64)
    blocks = range(0, len(tokens), _TOKENS_AT_A_TIME)
    found = [np.flatnonzero(tokens[at : at + _TOKENS_AT_A_TIME] == unknown) + at for at in blocks]
    places = np.concatenate(found) if found else np.empty(0, np.int64)
    return np.searchsorted(places, cut.stops) - np.searchsorted(places, cut.starts)
