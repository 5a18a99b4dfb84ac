"""Rows of token ids, all of one length, for the language tasks: synthetic, or text of the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joulelab import lookup
from joulelab.data.batches import Rows
from joulelab.data.splits import SYNTHETIC_SIZES, Split, parse_split
from joulelab.data.synthetic import SyntheticText
from joulelab.data.text import MOST_OF_A_HUB_SET, Documents, open_documents
from joulelab.data.tokenize import Encoding, Vocabulary, own_vocabulary, pack
from joulelab.errors import ConfigError
from joulelab.zoo.request import SYNTHETIC, WorkloadRequest
from joulelab.zoo.tasks.tokenizers import choose_tokenizer, end_of_text

HELD_OUT_SHARE = 0.05
"""Of the rows, the last ones, where the data has no validation split of its own."""
VALIDATION = Split("validation")


@dataclass(frozen=True)
class TokenRows:
    rows: Rows
    """Which rows belong to the split."""
    sequences: Callable[[Rows], NDArray[np.int64]]
    """Their ids, [rows, tokens]."""


@dataclass(frozen=True)
class LanguageRows:
    train: TokenRows
    held_out: TokenRows | None
    """None where the text is too short to hold any of it out."""
    vocabulary: Vocabulary
    notes: tuple[str, ...] = ()


def open_rows(request: WorkloadRequest, config: Any, tokens: int, sentinels: int = 0) -> LanguageRows:
    """Rows of `tokens` ids for a model of this configuration; `sentinels` ids are kept free of text for the task."""
    if request.dataset != SYNTHETIC:
        return _from_text(request, config, tokens, sentinels)
    vocabulary = own_vocabulary(int(config.vocab_size), end_of_text(config), sentinels)
    train, held_out = (_synthetic(vocabulary, tokens, split) for split in (request.wanted_split, VALIDATION))
    return LanguageRows(train, held_out, vocabulary)


def _synthetic(vocabulary: Vocabulary, tokens: int, split: Split) -> TokenRows:
    if split.name not in SYNTHETIC_SIZES:
        raise lookup.unknown("split of the synthetic set", split.name, SYNTHETIC_SIZES)
    # splits differ in their seed, so that no sequence is in two of them
    seed = list(SYNTHETIC_SIZES).index(split.name)
    text = SyntheticText(vocabulary.plain.stop, tokens, seed, reserved=vocabulary.plain.start)
    return TokenRows(split.rows(SYNTHETIC_SIZES[split.name]), text.sequences)


def _from_text(request: WorkloadRequest, config: Any, tokens: int, sentinels: int) -> LanguageRows:
    documents, split = open_documents(request.dataset), request.wanted_split
    chosen = choose_tokenizer(request, config, sentinels)
    train = _packed(documents, split, chosen.encoding, tokens)
    held_out: TokenRows | None
    if VALIDATION.name in documents.source.splits() and split.name != VALIDATION.name:
        few = f"validation[:{SYNTHETIC_SIZES['validation']}]"
        held_out = _packed(documents, parse_split(few), chosen.encoding, tokens)
    else:
        train, held_out = _hold_out(train)
    notes = [chosen.note]
    if documents.is_cut_short(split):
        notes.append(f"of {documents.name} the first {MOST_OF_A_HUB_SET:,} documents are used; name a slice for others")
    return LanguageRows(train, held_out, chosen.vocabulary, tuple(notes))


def _packed(documents: Documents, split: Split, encoding: Encoding, tokens: int) -> TokenRows:
    line = pack(documents, split, encoding)
    count = len(line) // tokens
    if not count:
        raise ConfigError(
            f"{documents.name} ({split}) has {len(line):,} tokens; one row takes {tokens:,}",
            "bring more text, or ask for fewer tokens per row",
        )
    table = line[: count * tokens].reshape(count, tokens)
    return TokenRows(np.arange(count), lambda rows: table[rows].astype(np.int64))


def _hold_out(whole: TokenRows) -> tuple[TokenRows, TokenRows | None]:
    if len(whole.rows) < 2:
        return whole, None
    kept = len(whole.rows) - max(1, round(HELD_OUT_SHARE * len(whole.rows)))
    return TokenRows(whole.rows[:kept], whole.sequences), TokenRows(whole.rows[kept:], whole.sequences)
