"""Sequences to train on, cut out of a store of tokenised documents: long ones split, poor ones dropped; or full rows.

Only where each sequence lies is kept in memory; its tokens are read when its batch is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from joulelab.data.token_store import TokenStore
from joulelab.errors import ConfigError

Ids = NDArray[np.int64]
_TOKENS_AT_A_TIME = 1 << 24


class Sequences(Protocol):
    @property
    def lengths(self) -> Ids: ...

    def at(self, number: int) -> Ids: ...


@dataclass(frozen=True)
class Limits:
    """Which sequences are fit to train on."""

    max_tokens: int
    min_tokens: int
    """This many or fewer are dropped."""
    max_unknown_share: float
    """This share of unknown tokens or more is dropped."""


@dataclass(frozen=True, eq=False)
class Cut:
    """Stretches of the store's tokens, each closed in the tokenizer's opening and closing tokens where a split
    took them away."""

    store: TokenStore
    starts: Ids
    stops: Ids
    opened: NDArray[np.bool_]
    """An opening token is put in front."""
    closed: NDArray[np.bool_]

    @property
    def lengths(self) -> Ids:
        return self.stops - self.starts + self.opened + self.closed

    def at(self, number: int) -> Ids:
        ids = np.asarray(self.store.tokens[self.starts[number] : self.stops[number]], dtype=np.int64)
        first, last = ends_of(self.store)
        front = [first] if self.opened[number] else []
        back = [last] if self.closed[number] else []
        return np.concatenate([front, ids, back]).astype(np.int64)

    def only(self, kept: NDArray[np.bool_]) -> Cut:
        return Cut(self.store, self.starts[kept], self.stops[kept], self.opened[kept], self.closed[kept])


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences laid end to end and cut into rows of one length; what is left over at the end is dropped."""

    cut: Cut
    tokens: int
    ends: Ids
    """Where each sequence ends in the long line."""

    @property
    def lengths(self) -> Ids:
        return np.full(int(self.ends[-1]) // self.tokens, self.tokens, dtype=np.int64)

    def at(self, number: int) -> Ids:
        start, stop = number * self.tokens, (number + 1) * self.tokens
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        line = np.concatenate([self.cut.at(place) for place in range(first, last + 1)])
        before = int(self.ends[first - 1]) if first else 0
        return line[start - before : stop - before]


def cut_sequences(store: TokenStore, rows: Ids, limits: Limits) -> Cut:
    """The documents `rows` as sequences of at most max_tokens, without those too short or too full of unknowns."""
    cut = _split(store, rows, limits.max_tokens)
    unknown = _count_unknown(cut)
    kept = (cut.lengths > limits.min_tokens) & (unknown < limits.max_unknown_share * cut.lengths)
    if not kept.any():
        raise ConfigError(
            f"of {len(cut.starts)} sequences none has more than {limits.min_tokens} tokens and less than "
            f"{100 * limits.max_unknown_share:g} % unknown ones",
            "check the tokenizer and the text",
        )
    return cut.only(kept)


def pack_rows(cut: Cut, tokens: int) -> Packed:
    packed = Packed(cut, tokens, np.cumsum(cut.lengths))
    if not len(packed.lengths):
        raise ConfigError(
            f"{int(packed.ends[-1])} tokens do not fill one row of {tokens}", "lower data.max_model_input_size"
        )
    return packed


def ends_of(store: TokenStore) -> tuple[int | None, int | None]:
    """What opens and closes a sequence: BERT's [CLS] and [SEP], RoBERTa's <s> and </s>, GPT-2's end of text."""
    special = store.specials
    return special.get("cls", special.get("bos")), special.get("sep", special.get("eos"))


def _split(store: TokenStore, rows: Ids, max_tokens: int) -> Cut:
    starts, stops = store.offsets[rows], store.offsets[rows + 1]
    first, last = ends_of(store)
    room = max_tokens - (first is not None) - (last is not None)
    lengths = stops - starts
    pieces = np.where(lengths > max_tokens, -(-lengths // room), (lengths > 0).astype(np.int64))
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = np.repeat(starts, pieces) + number * room
    whole = np.repeat(lengths <= max_tokens, pieces)
    end = np.where(whole, np.repeat(stops, pieces), np.minimum(begin + room, np.repeat(stops, pieces)))
    nothing = np.zeros(len(begin), dtype=bool)
    opened = ~whole & (store.tokens[begin] != first) if first is not None else nothing
    closed = ~whole & (store.tokens[end - 1] != last) if last is not None else nothing
    return Cut(store, begin, end, opened, closed)


def _count_unknown(cut: Cut) -> Ids:
    """Unknown tokens are rare, so their places are found once and counted between the ends of each sequence."""
    unknown, tokens = cut.store.specials.get("unk"), cut.store.tokens
    if unknown is None or unknown == cut.store.specials.get("eos"):  # GPT-2 knows every byte and names its end so
        return np.zeros(len(cut.starts), dtype=np.int64)
    blocks = range(0, len(tokens), _TOKENS_AT_A_TIME)
    found = [np.flatnonzero(tokens[at : at + _TOKENS_AT_A_TIME] == unknown) + at for at in blocks]
    places = np.concatenate(found) if found else np.empty(0, np.int64)
    return np.searchsorted(places, cut.stops) - np.searchsorted(places, cut.starts)
