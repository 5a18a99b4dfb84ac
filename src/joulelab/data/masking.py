"""Corruption of token rows for pretraining: BERT's masks, T5's and BART's spans, mask weights from token counts.

Every row has the same number of masked tokens and spans, so shapes never change and a compiled model is compiled once.

Shapes: B rows, T tokens, K masked positions of a row; R tokens of the whole text, S spans.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from joulelab.data.token_store import TokenStore, is_pickle
from joulelab.data.tokenize import Vocabulary
from joulelab.errors import ConfigError, NotFoundError

SHARE = 0.15
"""Of a row's tokens, to be predicted."""
SHOWN_AS_MASK, SHOWN_AS_ANOTHER = 0.8, 0.1
"""Of those; the rest stay as they are, so that a model cannot trust what it sees."""

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Masked:
    input_ids: Ids
    """[B, T]."""
    positions: Ids
    """[B, K], in order."""
    targets: Ids
    """[B, K]: what stood there."""


def masked_per_row(tokens: int) -> int:
    return max(1, round(SHARE * tokens))


def mask_rows(ids_BT: Ids, vocabulary: Vocabulary, draw: int) -> Masked:
    if vocabulary.mask_id is None:
        raise ConfigError("this tokenizer has no mask token", "name a tokenizer of a masked language model")
    random = np.random.default_rng(draw)
    positions_BK = _choose(ids_BT, vocabulary.end_id, random)
    targets_BK = np.take_along_axis(ids_BT, positions_BK, axis=1)
    fate_BK = random.random(positions_BK.shape)
    another_BK = random.integers(vocabulary.plain.start, vocabulary.plain.stop, size=positions_BK.shape)
    shown_BK = np.where(fate_BK < SHOWN_AS_MASK + SHOWN_AS_ANOTHER, another_BK, targets_BK)
    shown_BK = np.where(fate_BK < SHOWN_AS_MASK, vocabulary.mask_id, shown_BK)
    input_ids_BT = ids_BT.copy()
    np.put_along_axis(input_ids_BT, positions_BK, shown_BK, axis=1)
    return Masked(input_ids_BT, positions_BK, targets_BK)


def _choose(ids_BT: Ids, end_id: int, random: np.random.Generator) -> Ids:
    """The K smallest of one random number per token, in order; ends of documents come last of all."""
    lots_BT = random.random(ids_BT.shape)
    lots_BT[ids_BT == end_id] += 1.0
    count = masked_per_row(ids_BT.shape[1])
    return np.sort(np.argpartition(lots_BT, count - 1, axis=1)[:, :count], axis=1).astype(np.int64)


# Spans left out of a text, for models that learn to write them back: T5's sentinels and BART's infilling.
#
# How many tokens are left out and in how many spans is planned ahead and the same for every row; where they lie is
# drawn. Then every row has the same lengths, with no padding on either side.
#
# Shapes: B rows, R tokens of the whole text, S spans.


MEAN_SPAN = 3
"""Tokens of a span on average, in T5 and BART alike."""
INFILLED_SHARE = 0.3
"""Of a text that BART leaves out."""
MOST_SENTINELS = 100
"""As many as T5's vocabulary has."""


@dataclass(frozen=True)
class SpanPlan:
    text: int
    """Tokens of the whole text."""
    gone: int
    """Tokens of it that are left out."""
    spans: int

    @property
    def left(self) -> int:
        """Tokens of the shortened text, a mark for every span included."""
        return self.text - self.gone + self.spans


def plan_sentinels(tokens: int, target_tokens: int) -> SpanPlan:
    """The text of which inputs and targets have these lengths, each closed by an end-of-text.

    512 and 114 give the published 568 tokens in 28 spans. Where targets are longer than 100 sentinels allow at the
    usual length of a span, the spans are longer.
    """
    spans = min(MOST_SENTINELS, max(1, round((target_tokens - 1) / (MEAN_SPAN + 1))))
    gone = target_tokens - 1 - spans
    kept = tokens - 1 - spans
    if gone < spans or kept < spans:
        raise ConfigError(
            f"{tokens} tokens with {target_tokens} target tokens leave no room for {spans} spans",
            "ask for longer inputs, or for fewer target tokens",
        )
    return SpanPlan(kept + gone, gone, spans)


def plan_infilling(text: int) -> SpanPlan:
    gone = round(INFILLED_SHARE * text)
    spans = round(gone / MEAN_SPAN)
    if spans < 1:
        raise ConfigError(f"{text} tokens are too few to leave a span out", "ask for at least 8 tokens")
    return SpanPlan(text, gone, spans)


def draw_spans(rows: int, plan: SpanPlan, draw: int) -> NDArray[np.bool_]:
    """Which tokens are left out, [B, R]. A text begins with what stays, and each span is followed by more of it,
    but for the last, which ends the text."""
    random = np.random.default_rng(draw)
    kept_BS = _parts(plan.text - plan.gone, plan.spans, rows, random)
    gone_BS = _parts(plan.gone, plan.spans, rows, random)
    lengths = np.stack([kept_BS, gone_BS], axis=2).reshape(-1)
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(rows, plan.text)


def collapse(ids_BR: Ids, gone_BR: NDArray[np.bool_], marks_S: Ids) -> Ids:
    """The text with every span that is gone shown as one mark, the k-th as `marks_S[k]`."""
    before_BR = np.zeros_like(gone_BR)
    before_BR[:, 1:] = gone_BR[:, :-1]
    starts_BR = gone_BR & ~before_BR
    which_BR = np.maximum(np.cumsum(starts_BR, axis=1) - 1, 0)
    shown_BR = np.where(starts_BR, marks_S[which_BR], ids_BR)
    return shown_BR[~gone_BR | starts_BR].reshape(len(ids_BR), -1)


def _parts(total: int, parts: int, rows: int, random: np.random.Generator) -> Ids:
    """`total` cut at random into that many parts of at least 1, for each row."""
    order = np.argsort(random.random((rows, total - 1)), axis=1)[:, : parts - 1] + 1
    edges = np.concatenate(
        [np.zeros((rows, 1), dtype=np.int64), np.sort(order, axis=1), np.full((rows, 1), total)], axis=1
    )
    return np.diff(edges, axis=1).astype(np.int64)


# How often each id occurs, and from it which tokens to mask: rare ones more than their share, special ones never.
#
# A model that guesses "the" a thousand times learns little. With counts c, a token is masked with a probability
# proportional to max(c, 1)^-0.7, the smoothing of XLM and DistilBERT.


_TOKENS_PER_STEP = 2**22  # 16-bit ids widen to 64 bits while they are counted


def count_tokens(
    store: TokenStore, vocab_size: int | None = None, tick: Callable[[int], None] = lambda tokens: None
) -> NDArray[np.int64]:
    """Occurrences of every id of the vocabulary; `vocab_size` where the model has more ids than the tokenizer."""
    size = store.vocab_size if vocab_size is None else vocab_size
    counts = np.zeros(max(size, store.vocab_size), dtype=np.int64)
    for start in range(0, store.tokens_total, _TOKENS_PER_STEP):
        counts += np.bincount(store.tokens[start : start + _TOKENS_PER_STEP], minlength=len(counts))
        tick(min(start + _TOKENS_PER_STEP, store.tokens_total))
    if counts[size:].any():
        raise ConfigError(
            f"{store.folder} holds the id {int(np.flatnonzero(counts)[-1])}; a vocabulary of {size} ends before it",
            f"the tokenizer {store.tokenizer} has {store.vocab_size} ids: leave --vocab_size out",
        )
    return counts[:size]


def mask_weights(
    counts: NDArray[np.integer], smoothing: float, specials: Mapping[str, int] | Iterable[int]
) -> NDArray[np.float64]:
    """A weight per id: how likely it is masked, against the others; special tokens have 0."""
    if smoothing < 0:
        raise ConfigError(f"mlm_smoothing is {smoothing}; expected 0 (all alike) or more", "the usual value is 0.7")
    weights: NDArray[np.float64] = np.maximum(counts, 1).astype(np.float64) ** -smoothing
    never = specials.values() if isinstance(specials, Mapping) else specials
    weights[np.array(sorted(set(never)), dtype=np.int64)] = 0.0
    if not weights.any():
        raise ConfigError("every token is a special one: nothing is left to mask", "check the tokenizer")
    return weights


def write_counts(counts: NDArray[np.int64], file: Path) -> None:
    """As .npy, or as JSON where the name says so."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as out:
            if file.suffix == ".json":
                out.write(json.dumps(counts.tolist()).encode())
            else:
                np.save(out, counts, allow_pickle=False)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def counts_file(named: Path) -> Path:
    """Where counts go that the user called `named`: the old scripts say .pickle, which we neither write nor open."""
    return named if named.suffix in (".npy", ".json") else named.with_name(_without_pickle(named.name) + ".npy")


def require_counts(named: Path) -> Path:
    """The file that is meant; a pickle is told from a file that is not there."""
    file = counts_file(named)
    if file.is_file():
        return file
    again = "joulelab prepare token-counts --data_file STORE --token_counts_dump OUT.npy"
    if is_pickle(named):
        raise ConfigError(
            f"{named.absolute()} is a pickle; expected counts as .npy or .json",
            f"a pickle can run code when it is opened, so we do not; count again: {again}",
        )
    raise NotFoundError(f"there are no token counts {file.absolute()}", f"`{again}` makes them")


def read_counts(named: Path) -> NDArray[np.int64]:
    file = require_counts(named)
    try:
        text = file.read_text(encoding="utf-8") if file.suffix == ".json" else None
        counts = np.array(json.loads(text)) if text is not None else np.load(file, allow_pickle=False)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file.absolute()} cannot be read: {error}", "make the counts again") from error
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ConfigError(f"{file.absolute()} does not hold one count per id", "make the counts again")
    return counts.astype(np.int64)


def _without_pickle(name: str) -> str:
    return name.removesuffix(".pickle").removesuffix(".pkl")
