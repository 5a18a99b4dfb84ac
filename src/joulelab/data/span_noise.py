"""Spans left out of a text, for models that learn to write them back: T5's sentinels and BART's infilling.

How many tokens are left out and in how many spans is planned ahead and the same for every row; where they lie is drawn.
Then every row has the same lengths, with no padding on either side.

Shapes: B rows, R tokens of the whole text, S spans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from joulelab.errors import ConfigError

MEAN_SPAN = 3
"""Tokens of a span on average, in T5 and BART alike."""
INFILLED_SHARE = 0.3
"""Of a text that BART leaves out."""
MOST_SENTINELS = 100
"""As many as T5's vocabulary has."""

Ids = NDArray[np.int64]


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
