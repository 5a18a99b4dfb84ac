"""A question with a better and a worse answer, as tokens, and where such pairs lie on disk.

On disk a pair is three rows of a store: prompt, chosen, rejected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joulelab.data.token_store import RaggedStore, store_writer, token_column
from joulelab.errors import ConfigError, JoulelabError

_HINT = "make the pairs again"
Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pair:
    prompt: Ids
    chosen: Ids
    """The answer's tokens alone, its closing token included."""
    rejected: Ids

    def __post_init__(self) -> None:
        if not (len(self.prompt) and len(self.chosen) and len(self.rejected)):
            lengths = tuple(len(ids) for ids in (self.prompt, self.chosen, self.rejected))
            raise ConfigError(f"a pair of {lengths} tokens (prompt, chosen, rejected); each needs at least 1", _HINT)

    @property
    def key(self) -> str:
        """By content, so that a cached figure can never belong to another pair."""
        digest = hashlib.sha256()
        for ids in (self.prompt, self.chosen, self.rejected):
            digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i8").tobytes())
        return digest.hexdigest()[:32]

    @property
    def tokens(self) -> int:
        """With the prompt once."""
        return len(self.prompt) + len(self.chosen) + len(self.rejected)


@dataclass(frozen=True, eq=False)
class PairStore:
    tokens: RaggedStore
    report: Mapping[str, Any]
    """How the pairs came about: counts of ties and drops, length bias."""

    @classmethod
    def open(cls, folder: Path) -> PairStore:
        store = RaggedStore(folder)
        if len(store) % 3:
            raise JoulelabError(f"{folder.absolute()} has {len(store)} rows, expected three for each pair", _HINT)
        return cls(store, store.attributes.get("report", {}))

    def __len__(self) -> int:
        return len(self.tokens) // 3

    def __iter__(self) -> Iterator[Pair]:
        return (self.pair(number) for number in range(len(self)))

    def pair(self, number: int) -> Pair:
        prompt, chosen, rejected = (self.tokens.row(3 * number + part) for part in range(3))
        return Pair(prompt, chosen, rejected)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[pairs, 3]: tokens of prompt, chosen and rejected."""
        return self.tokens.lengths.reshape(-1, 3)


def write_pairs(
    folder: Path, pairs: Iterable[Pair], *, vocab_size: int, tokenizer: str, report: Mapping[str, Any] | None = None
) -> PairStore:
    found = False
    with store_writer(folder, {"tokens": token_column(vocab_size)}) as writer:
        for pair in pairs:
            found = True
            parts = (pair.prompt, pair.chosen, pair.rejected)
            writer.append([len(ids) for ids in parts], tokens=np.concatenate(parts))
        if not found:
            raise ConfigError(f"not one pair came about{_why(report or {})}", _way_out(report or {}))
        writer.attributes.update(vocab_size=vocab_size, tokenizer=tokenizer, report=dict(report or {}))
    return PairStore.open(folder)


_WAYS_OUT = {
    "ties": "ask for more candidates (generation.answer.n), lower preferences.tie_margin, or use another judge",
    "identical": "ask for more candidates (generation.answer.n), or a higher generation.answer.temperature",
    "unjudged": "the judge gave no grade: ask a larger judge, write another preferences.rubric, or use another judge",
    "too_long": "raise data.row_length, or lower generation.answer.max_new_tokens",
}


def _way_out(report: Mapping[str, Any]) -> str:
    """Of what kept most prompts from becoming a pair."""
    most = max(_WAYS_OUT, key=lambda name: report.get(name) or 0)
    return _WAYS_OUT[most if report.get(most) else "identical"]


def _why(report: Mapping[str, Any]) -> str:
    """What became of the prompts, as far as the report tells."""
    reasons = {name: report.get(name) for name in _WAYS_OUT}
    counted = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in reasons.items() if count)
    return f" of {report['prompts']} prompts: {counted or 'none had two answers'}" if report.get("prompts") else ""
