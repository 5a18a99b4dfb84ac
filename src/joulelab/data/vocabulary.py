"""What the ids of a vocabulary mean to a language task: which stand for text, and which have a meaning of their own."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PLAIN = 10
"""Where ids of text begin in the vocabularies that we make ourselves: synthetic text and bytes."""
OWN_END = 2
"""Ends a document there. No model of the zoo pads with it: most pad with 0, some with 1."""
OWN_MASK = 4
"""Stands there for what was masked."""


@dataclass(frozen=True)
class Vocabulary:
    plain: range
    """Ids that stand for text."""
    end_id: int
    """Ends a document."""
    mask_id: int | None = None
    """Stands for what is to be predicted; some tokenizers have none."""
    sentinels: tuple[int, ...] = ()
    """One for each span left out of a text, in the order of the spans."""


def own_vocabulary(size: int, end_id: int | None, sentinels: int = 0) -> Vocabulary:
    """Of a model with `size` ids that no tokenizer belongs to; sentinels lie at its upper end, as T5's do."""
    top = size - sentinels
    end = OWN_END if end_id is None or not 0 <= end_id < size else end_id
    return Vocabulary(range(FIRST_PLAIN, top), end, OWN_MASK, tuple(range(size - 1, top - 1, -1)))
