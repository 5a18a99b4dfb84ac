"""From start and end scores of a question's windows to its n best answers as texts.

A span's score is the sum of its two logits. Windows overlap; a token may begin an answer only in the window in which it
has most context on both sides, since elsewhere the model has seen less of what the token means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from joulelab.data.squad.windows import CLS, NOT_CONTEXT

Floats = NDArray[np.float32]
# Between windows that give a token equally much context, the longer one is taken; too small to outweigh one token.
_LENGTH_BONUS = 0.01


@dataclass(frozen=True)
class SearchLimits:
    n_best_size: int
    max_answer_length: int  # in tokens


@dataclass(frozen=True, eq=False)
class ScoredWindow:
    """One window of a question as the model saw it; T tokens."""

    start: Floats  # T
    end: Floats  # T
    characters: NDArray[np.int32]  # T x 2
    first_token: int

    @property
    def context(self) -> slice:
        inside = np.flatnonzero(self.characters[:, 0] != NOT_CONTEXT)
        return slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else slice(0, 0)


@dataclass(frozen=True)
class Candidate:
    text: str
    score: float
    start: int  # characters of the paragraph
    end: int


@dataclass(frozen=True)
class Candidates:
    """The best spans, best first, and what the model gives to "no answer"."""

    spans: tuple[Candidate, ...]
    null_score: float

    @property
    def null_margin(self) -> float:
        """By how much "no answer" beats the best span; infinite where there is no span at all."""
        return self.null_score - self.spans[0].score if self.spans else float("inf")


def find_candidates(windows: Sequence[ScoredWindow], context: str, limits: SearchLimits) -> Candidates:
    found = [
        Candidate(context[start:end], score, start, end)
        for window, allowed in zip(windows, best_places(windows), strict=True)
        for score, start, end in _spans(window, allowed, limits)
    ]
    best: dict[str, Candidate] = {}
    for candidate in sorted(found, key=lambda span: (-span.score, span.start, span.end)):
        best.setdefault(candidate.text, candidate)
    # a question is answered as soon as one window has the answer, so the least sure "none here" counts
    null_score = min(float(window.start[CLS]) + float(window.end[CLS]) for window in windows)
    return Candidates(tuple(best.values())[: limits.n_best_size], null_score)


def best_places(windows: Sequence[ScoredWindow]) -> list[NDArray[np.bool_]]:
    """For each window, which of its context tokens have more context here than in any other window."""
    parts = [(window.first_token, window.context.stop - window.context.start) for window in windows]
    tokens = max(first + length for first, length in parts)
    amounts = np.full((len(windows), tokens), -1.0)
    for place, (first, length) in enumerate(parts):
        left = np.arange(length)
        amounts[place, first : first + length] = np.minimum(left, left[::-1]) + _LENGTH_BONUS * length
    winner = amounts.argmax(axis=0)
    return [winner[first : first + length] == place for place, (first, length) in enumerate(parts)]


def _spans(window: ScoredWindow, allowed: NDArray[np.bool_], limits: SearchLimits) -> Iterator[tuple[float, int, int]]:
    """Score and characters of the pairs out of the n best starts and the n best ends."""
    part = window.context
    start, end, characters = window.start[part], window.end[part], window.characters[part]
    begins = _highest(np.where(allowed, start, -np.inf), limits.n_best_size)
    for first in (int(place) for place in begins if allowed[place]):
        for last in map(int, _highest(end, limits.n_best_size)):
            if first <= last < first + limits.max_answer_length:
                yield float(start[first]) + float(end[last]), int(characters[first, 0]), int(characters[last, 1])


def _highest(values: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    return np.argsort(-values, kind="stable")[:count].astype(np.int64)
