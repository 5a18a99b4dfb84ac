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
"""Fraction of a row's tokens to predict."""
SHOWN_AS_MASK, SHOWN_AS_RANDOM = 0.8, 0.1
"""Fractions of the predicted tokens; the rest stay unchanged, so that a model cannot rely on what it sees (BERT)."""

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Masked:
    input_ids: Ids
    """[B, T]."""
    positions: Ids
    """[B, K], in order."""
    targets: Ids
    """[B, K]: the original tokens."""


def masked_per_row(tokens: int) -> int:
    return max(1, round(SHARE * tokens))


def mask_rows(ids_BT: Ids, vocabulary: Vocabulary, draw: int) -> Masked:
    if vocabulary.mask_id is None:
        raise ConfigError("this tokenizer has no mask token", "use the tokenizer of a masked language model")
    random = np.random.default_rng(draw)
    positions_BK = _choose(ids_BT, vocabulary.end_id, random)
    targets_BK = np.take_along_axis(ids_BT, positions_BK, axis=1)
    uniform_BK = random.random(positions_BK.shape)
    random_BK = random.integers(vocabulary.plain.start, vocabulary.plain.stop, size=positions_BK.shape)
    # 80 % mask, 10 % random token, 10 % unchanged (Devlin et al., 2018): inputs of later tasks have
    # no mask tokens, so some predicted positions must look like ordinary ones.
    shown_BK = np.where(uniform_BK < SHOWN_AS_MASK + SHOWN_AS_RANDOM, random_BK, targets_BK)
    shown_BK = np.where(uniform_BK < SHOWN_AS_MASK, vocabulary.mask_id, shown_BK)
    input_ids_BT = ids_BT.copy()
    np.put_along_axis(input_ids_BT, positions_BK, shown_BK, axis=1)
    return Masked(input_ids_BT, positions_BK, targets_BK)


def _choose(ids_BT: Ids, end_id: int, random: np.random.Generator) -> Ids:
    """The positions of the K smallest random numbers, sorted; document ends are chosen last."""
    uniform_BT = random.random(ids_BT.shape)
    # A document's end is predictable from nothing; it is masked only if a row has hardly anything else.
    uniform_BT[ids_BT == end_id] += 1.0
    count = masked_per_row(ids_BT.shape[1])
    # The K smallest of independent uniform numbers are a sample without replacement; a partition
    # finds them in linear time.
    return np.sort(np.argpartition(uniform_BT, count - 1, axis=1)[:, :count], axis=1).astype(np.int64)


# Span corruption: T5's sentinels (https://arxiv.org/abs/1910.10683) and BART's infilling (https://arxiv.org/abs/1910.13461).
# The number of removed tokens and spans is the same for every row and only their positions are random, so every row has
# the same lengths, without padding in inputs or targets.


MEAN_SPAN = 3
"""Mean tokens per span, in T5 and in BART."""
INFILLED_SHARE = 0.3
"""Fraction of a text that BART removes."""
MOST_SENTINELS = 100
"""The number in T5's vocabulary."""


@dataclass(frozen=True)
class SpanPlan:
    text: int
    """Tokens of the whole text."""
    gone: int
    """Removed tokens."""
    spans: int

    @property
    def left(self) -> int:
        """Tokens of the shortened text, including one mark per span."""
        return self.text - self.gone + self.spans


def plan_sentinels(tokens: int, target_tokens: int) -> SpanPlan:
    """The text whose inputs and targets have these lengths, each including an end-of-text token.

    512 and 114 give the published 568 tokens in 28 spans. If targets are longer than 100 spans of the usual length,
    the spans are longer.
    """
    # A span of 3 tokens takes 4 of the target, its sentinel included, and one target token is the
    # end of text.
    spans = min(MOST_SENTINELS, max(1, round((target_tokens - 1) / (MEAN_SPAN + 1))))
    gone = target_tokens - 1 - spans
    kept = tokens - 1 - spans
    if gone < spans or kept < spans:
        raise ConfigError(
            f"{tokens} tokens with {target_tokens} target tokens leave no room for {spans} spans",
            "use longer inputs or fewer target tokens",
        )
    return SpanPlan(kept + gone, gone, spans)


def plan_infilling(text: int) -> SpanPlan:
    gone = round(INFILLED_SHARE * text)
    spans = round(gone / MEAN_SPAN)
    if spans < 1:
        raise ConfigError(f"{text} tokens are too few to remove a span", "use at least 8 tokens")
    return SpanPlan(text, gone, spans)


def draw_spans(rows: int, plan: SpanPlan, draw: int) -> NDArray[np.bool_]:
    """Which tokens are removed, [B, R]. Kept and removed spans alternate; a text begins with a kept one and ends with a
    removed one."""
    random = np.random.default_rng(draw)
    kept_BS = _parts(plan.text - plan.gone, plan.spans, rows, random)
    gone_BS = _parts(plan.gone, plan.spans, rows, random)
    lengths = np.stack([kept_BS, gone_BS], axis=2).reshape(-1)
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(rows, plan.text)


def collapse(ids_BR: Ids, gone_BR: NDArray[np.bool_], marks_S: Ids) -> Ids:
    """The text with every removed span replaced by one mark, the k-th by `marks_S[k]`."""
    before_BR = np.zeros_like(gone_BR)
    before_BR[:, 1:] = gone_BR[:, :-1]
    # The first token of each removed span becomes its mark, the others disappear.
    starts_BR = gone_BR & ~before_BR
    which_BR = np.maximum(np.cumsum(starts_BR, axis=1) - 1, 0)
    shown_BR = np.where(starts_BR, marks_S[which_BR], ids_BR)
    return shown_BR[~gone_BR | starts_BR].reshape(len(ids_BR), -1)


def _parts(total: int, parts: int, rows: int, random: np.random.Generator) -> Ids:
    """`total` split at random into `parts` parts of at least 1, for each row."""
    # Distinct cut points between 1 and total - 1: all compositions of `total` are equally likely, and no part is
    # empty.
    order = np.argsort(random.random((rows, total - 1)), axis=1)[:, : parts - 1] + 1
    edges = np.concatenate(
        [np.zeros((rows, 1), dtype=np.int64), np.sort(order, axis=1), np.full((rows, 1), total)], axis=1
    )
    return np.diff(edges, axis=1).astype(np.int64)


# Token counts, and mask weights from them: predicting "the" a thousand times teaches little. With count c, a token is
# masked with a probability proportional to max(c, 1)^-0.7, the smoothing of XLM and DistilBERT; special tokens never.


_TOKENS_PER_STEP = 2**22  # bincount converts 16-bit ids to 64 bits


def count_tokens(
    store: TokenStore, vocab_size: int | None = None, tick: Callable[[int], None] = lambda tokens: None
) -> NDArray[np.int64]:
    """Occurrences of every id of the vocabulary; pass `vocab_size` if the model has more ids than the tokenizer."""
    size = store.vocab_size if vocab_size is None else vocab_size
    counts = np.zeros(max(size, store.vocab_size), dtype=np.int64)
    for start in range(0, store.tokens_total, _TOKENS_PER_STEP):
        counts += np.bincount(store.tokens[start : start + _TOKENS_PER_STEP], minlength=len(counts))
        tick(min(start + _TOKENS_PER_STEP, store.tokens_total))
    if counts[size:].any():
        raise ConfigError(
            f"{store.folder} contains the id {int(np.flatnonzero(counts)[-1])}, outside a vocabulary of {size}",
            f"the tokenizer {store.tokenizer} has {store.vocab_size} ids: omit --vocab_size",
        )
    return counts[:size]


def mask_weights(
    counts: NDArray[np.integer], smoothing: float, specials: Mapping[str, int] | Iterable[int]
) -> NDArray[np.float64]:
    """Relative probability of masking each id; 0 for special tokens."""
    if smoothing < 0:
        raise ConfigError(f"mlm_smoothing is {smoothing}; expected 0 (uniform) or more", "the usual value is 0.7")
    # A token of the vocabulary that does not occur would otherwise have infinite weight.
    weights: NDArray[np.float64] = np.maximum(counts, 1).astype(np.float64) ** -smoothing
    never = specials.values() if isinstance(specials, Mapping) else specials
    weights[np.array(sorted(set(never)), dtype=np.int64)] = 0.0
    if not weights.any():
        raise ConfigError("all tokens are special tokens: there is nothing to mask", "check the tokenizer")
    return weights


def write_counts(counts: NDArray[np.int64], file: Path) -> None:
    """As .npy, or as JSON if the name ends in .json."""
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
    """The file for counts named `named`: older commands pass .pickle, which is neither written nor opened."""
    return named if named.suffix in (".npy", ".json") else named.with_name(_without_pickle(named.name) + ".npy")


def require_counts(named: Path) -> Path:
    """The existing file of counts; errors distinguish a pickle from a missing file."""
    file = counts_file(named)
    if file.is_file():
        return file
    again = "joulelab prepare token-counts --data_file STORE --token_counts_dump OUT.npy"
    if is_pickle(named):
        raise ConfigError(
            f"{named.absolute()} is a pickle; expected counts as .npy or .json",
            f"opening a pickle can run code, so joulelab does not; count again: {again}",
        )
    raise NotFoundError(f"there are no token counts {file.absolute()}", f"create them: {again}", str(named))


def read_counts(named: Path) -> NDArray[np.int64]:
    file = require_counts(named)
    try:
        text = file.read_text(encoding="utf-8") if file.suffix == ".json" else None
        counts = np.array(json.loads(text)) if text is not None else np.load(file, allow_pickle=False)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file.absolute()} cannot be read: {error}", "count again") from error
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ConfigError(f"{file.absolute()} does not contain one count per id", "count again")
    return counts.astype(np.int64)


def _without_pickle(name: str) -> str:
    return name.removesuffix(".pickle").removesuffix(".pkl")
