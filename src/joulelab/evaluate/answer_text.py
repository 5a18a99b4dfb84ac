"""Two answers as texts: the same or not, and how many words they share, as SQuAD counts it.

Case, punctuation, English articles and spacing do not count. An empty text means "the paragraph does not tell".
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLE = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    # punctuation first and joined up: "U.S." is "us", as in SQuAD's own scores
    bare = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", bare).split())


def exact_match(said: str, true: str) -> float:
    return float(normalise(said) == normalise(true))


def f1(said: str, true: str) -> float:
    """Harmonic mean of precision and recall over words; of a text without words only its like is right."""
    said_words, true_words = normalise(said).split(), normalise(true).split()
    if not said_words or not true_words:
        return float(said_words == true_words)
    shared = sum((Counter(said_words) & Counter(true_words)).values())
    return 2 * shared / (len(said_words) + len(true_words))


def gold_texts(answers: Sequence[str]) -> tuple[str, ...]:
    """What counts as right: each marked answer; where nothing was marked, or only articles and dots, the empty text."""
    return tuple(text for text in answers if normalise(text)) or ("",)


def best_scores(said: str, gold: Sequence[str]) -> tuple[float, float]:
    """Exact match and F1 against the marked answer that fits best, each for itself."""
    return max(exact_match(said, true) for true in gold), max(f1(said, true) for true in gold)
