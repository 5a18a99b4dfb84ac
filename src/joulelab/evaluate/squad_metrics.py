"""SQuAD evaluation: answers from start and end scores, exact match and F1 per question, and the prediction files.

The score of a span is the sum of its start and end logits. Windows of a long paragraph overlap; a token may start an
answer only in the window in which it has most context on both sides, because elsewhere the model saw less of it. The
procedure is that of BERT's SQuAD script (Devlin et al., 2018).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from joulelab.data.squad.questions import Question
from joulelab.data.squad.windows import (
    CLS,
    NOT_CONTEXT,
    SquadFeatures,
    iterate_in_order,
    model_inputs,
    takes_token_types,
)
from joulelab.evaluate.classification import Predictions
from joulelab.evaluate.exact_answers import best_scores, gold_texts
from joulelab.runs.paths import read_json, write_json
from joulelab.runs.record import Result
from joulelab.stats import Interval, mean_t

Floats = NDArray[np.float32]
# If two windows give a token the same context, the longer one is used; too small to outweigh one token of context.
_LENGTH_BONUS = 0.01


@dataclass(frozen=True)
class SearchLimits:
    n_best_size: int
    max_answer_length: int  # in tokens


@dataclass(frozen=True, eq=False)
class ScoredWindow:
    """Scores of one window of a question; T tokens."""

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
    """The best spans, best first, and the score of "no answer"."""

    spans: tuple[Candidate, ...]
    null_score: float

    @property
    def null_margin(self) -> float:
        """Score of "no answer" minus that of the best span; infinite if there is no span."""
        return self.null_score - self.spans[0].score if self.spans else float("inf")


def find_candidates(windows: Sequence[ScoredWindow], context: str, limits: SearchLimits) -> Candidates:
    found = [
        Candidate(context[start:end], score, start, end)
        for window, allowed in zip(windows, most_context(windows), strict=True)
        for score, start, end in _spans(window, allowed, limits)
    ]
    best: dict[str, Candidate] = {}
    for candidate in sorted(found, key=lambda span: (-span.score, span.start, span.end)):
        best.setdefault(candidate.text, candidate)
    # A question is answerable if any window has the answer, so the lowest "no answer" score counts.
    null_score = min(float(window.start[CLS]) + float(window.end[CLS]) for window in windows)
    return Candidates(tuple(best.values())[: limits.n_best_size], null_score)


def most_context(windows: Sequence[ScoredWindow]) -> list[NDArray[np.bool_]]:
    """For each window, which of its tokens have more context here than in any other window."""
    parts = [(window.first_token, window.context.stop - window.context.start) for window in windows]
    tokens = max(first + length for first, length in parts)
    amounts = np.full((len(windows), tokens), -1.0)
    for place, (first, length) in enumerate(parts):
        left = np.arange(length)
        # Context of a token in a window is the smaller of its distances to both ends.
        amounts[place, first : first + length] = np.minimum(left, left[::-1]) + _LENGTH_BONUS * length
    winner = amounts.argmax(axis=0)
    return [winner[first : first + length] == place for place, (first, length) in enumerate(parts)]


def _spans(window: ScoredWindow, allowed: NDArray[np.bool_], limits: SearchLimits) -> Iterator[tuple[float, int, int]]:
    """Score and character range of the pairs of the n best starts and the n best ends."""
    part = window.context
    start, end, characters = window.start[part], window.end[part], window.characters[part]
    begins = _top_indices(np.where(allowed, start, -np.inf), limits.n_best_size)
    for first in (int(place) for place in begins if allowed[place]):
        for last in map(int, _top_indices(end, limits.n_best_size)):
            if first <= last < first + limits.max_answer_length:
                yield float(start[first]) + float(end[last]), int(characters[first, 0]), int(characters[last, 1])


def _top_indices(values: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    return np.argsort(-values, kind="stable")[:count].astype(np.int64)


@dataclass(frozen=True)
class BestThreshold:
    score: float  # mean over the questions
    threshold: float  # "no answer" where its margin is above this


def best_threshold(margins: Sequence[float], if_answered: Sequence[float], if_silent: Sequence[float]) -> BestThreshold:
    """The threshold for "no answer" with the best score on these questions, from each question's margin and its scores
    with and without an answer.

    It is chosen on the evaluated questions, so it is an upper bound. With threshold t the questions with a margin of at
    most t are answered, so only the margins themselves and "answer nothing" need to be tried.
    """
    order = np.argsort(np.asarray(margins), kind="stable")
    sorted_margins = np.asarray(margins, dtype=float)[order]
    gains = (np.asarray(if_answered, dtype=float) - np.asarray(if_silent, dtype=float))[order]
    totals = float(np.sum(if_silent)) + np.concatenate([[0.0], np.cumsum(gains)])
    # Questions with equal margins are answered together, so a threshold cannot separate them.
    possible = np.concatenate([[True], sorted_margins[:-1] < sorted_margins[1:], [True]])
    answered = int(np.argmax(np.where(possible, totals, -np.inf)))
    finite = sorted_margins[np.isfinite(sorted_margins)]
    below_all = float(finite[0]) - 1.0 if len(finite) else 0.0
    threshold = below_all if answered == 0 else float(sorted_margins[answered - 1])
    return BestThreshold(float(totals[answered]) / len(order), threshold)


PREDICTIONS, N_BEST, SCORES = "predictions.json", "nbest_predictions.json", "scores.json"


@dataclass(frozen=True, eq=False)
class SquadScores:
    """The answers of a model and their scores."""

    questions: Sequence[Question]
    candidates: Sequence[Candidates]
    version_2: bool
    null_score_diff_threshold: float

    @cached_property
    def answers(self) -> list[str]:
        """The answer to each question; empty for "not answerable", which only version 2.0 has."""
        return ["" if self._silent(found) else found.spans[0].text for found in self.candidates]

    @cached_property
    def by_question(self) -> list[tuple[float, float]]:
        """Exact match and F1 of each."""
        return [best_scores(predicted, gold) for predicted, gold in zip(self.answers, self._gold, strict=True)]

    @property
    def exact(self) -> list[float]:
        return [exact for exact, _ in self.by_question]

    @property
    def f1(self) -> list[float]:
        return [f1 for _, f1 in self.by_question]

    def results(self) -> dict[str, Result]:
        """For the record. The interval of F1 is Student's t over questions; that of exact match follows from counts."""
        right = int(sum(self.exact))
        f1 = self.f1_interval
        found = {
            "exact_match": Result(value=right / len(self.exact), trials=len(self.exact), successes=right),
            "f1": Result(value=f1.value),
        }
        if math.isfinite(f1.low):  # a single question has no interval
            found |= {"f1.low": Result(value=max(0.0, f1.low)), "f1.high": Result(value=min(1.0, f1.high))}
        if self.version_2:
            for name, best in self.best_thresholds().items():
                found[f"best_{name}"] = Result(value=best.score)
                found[f"best_{name}.threshold"] = Result(value=best.threshold)
        return found

    @property
    def f1_interval(self) -> Interval:
        return mean_t(self.f1)

    def best_thresholds(self) -> dict[str, BestThreshold]:
        margins = [found.null_margin for found in self.candidates]
        answered = [
            best_scores(found.spans[0].text if found.spans else "", gold)
            for found, gold in zip(self.candidates, self._gold, strict=True)
        ]
        silent = [best_scores("", gold) for gold in self._gold]
        return {
            name: best_threshold(margins, [score[place] for score in answered], [score[place] for score in silent])
            for place, name in enumerate(("exact_match", "f1"))
        }

    def save(self, folder: Path) -> None:
        ids = [question.id for question in self.questions]
        write_json(folder / PREDICTIONS, dict(zip(ids, self.answers, strict=True)))
        write_json(folder / N_BEST, {name: self._n_best(c) for name, c in zip(ids, self.candidates, strict=True)})
        write_json(folder / SCORES, {name: result.model_dump() for name, result in self.results().items()})
        # Right or wrong per question, in the format that paired comparisons read.
        right = np.array(self.exact, dtype=np.int64)
        Predictions(np.array(ids), np.ones_like(right), right).save(folder)

    @cached_property
    def _gold(self) -> list[tuple[str, ...]]:
        return [gold_texts([answer.text for answer in question.answers]) for question in self.questions]

    def _silent(self, found: Candidates) -> bool:
        """Whether there is no span, or "no answer" wins by more than the threshold."""
        return not found.spans or (self.version_2 and found.null_margin > self.null_score_diff_threshold)

    def _n_best(self, found: Candidates) -> list[dict[str, Any]]:
        """Texts with their softmax probability among those listed, including "no answer" in version 2.0."""
        entries: list[dict[str, Any]] = [
            {"text": span.text, "score": span.score, "start": span.start, "end": span.end} for span in found.spans
        ]
        if self.version_2 or not entries:
            entries.append({"text": "", "score": found.null_score, "start": None, "end": None})
        entries.sort(key=lambda entry: -entry["score"])
        weights = [math.exp(entry["score"] - entries[0]["score"]) for entry in entries]
        return [{**entry, "probability": weight / sum(weights)} for entry, weight in zip(entries, weights, strict=True)]


def load_results(folder: Path) -> dict[str, Result]:
    """The scores that were saved with the predictions."""
    return {name: Result.model_validate(value) for name, value in read_json(folder / SCORES).items()}


Tick = Callable[[int, int], None]
Scores = NDArray[np.float32]
"""Start and end logit of every token of the set, in the order of its flat arrays."""


@torch.inference_mode()
def score_tokens(
    model: nn.Module, features: SquadFeatures, batch_size: int, device: torch.device, tick: Tick
) -> Scores:
    """Run the whole set. `tick(samples, tokens)` is called with the progress and may raise to stop."""
    model.eval()
    types = takes_token_types(model)
    scores = np.empty((features.tokens_total, 2), dtype=np.float32)
    samples, tokens = 0, 0
    for rows, batch in iterate_in_order(features, batch_size):
        output = model(**model_inputs(batch.to(device), types))
        found = torch.stack([output.start_logits, output.end_logits], dim=-1).float().cpu().numpy()
        for place, row in enumerate(rows):
            part = features.span(int(row))
            scores[part] = found[place, : part.stop - part.start]
        samples, tokens = samples + batch.samples, tokens + batch.tokens
        tick(samples, tokens)
    return scores


def find_answers(
    features: SquadFeatures, questions: Sequence[Question], scores: Scores, limits: SearchLimits
) -> list[Candidates]:
    """Candidates of each question, in order."""
    windows: list[list[ScoredWindow]] = [[] for _ in questions]
    for row, number in enumerate(features.question_of):
        part = features.span(row)
        window = ScoredWindow(
            scores[part, 0], scores[part, 1], features.characters[part], int(features.first_tokens[row])
        )
        windows[int(number)].append(window)
    return [find_candidates(seen, question.context, limits) for seen, question in zip(windows, questions, strict=True)]
