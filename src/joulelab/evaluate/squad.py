"""Exact match and F1 of a question-answering model, question by question, and the files that say what it answered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from joulelab.data.squad.questions import Question
from joulelab.evaluate.answer_text import best_scores, gold_texts
from joulelab.evaluate.classification import Predictions
from joulelab.evaluate.squad_spans import Candidates
from joulelab.evaluate.squad_threshold import BestThreshold, best_threshold
from joulelab.runs.json_file import read_json, write_json
from joulelab.runs.record import Result
from joulelab.stats import Interval, mean_t

PREDICTIONS, N_BEST, SCORES = "predictions.json", "nbest_predictions.json", "scores.json"


@dataclass(frozen=True, eq=False)
class SquadScores:
    """What the model answered, and how good that is."""

    questions: Sequence[Question]
    candidates: Sequence[Candidates]
    version_2: bool
    null_score_diff_threshold: float

    @cached_property
    def said(self) -> list[str]:
        """The answer to each question; empty for "the paragraph does not tell", which only version 2.0 knows."""
        return ["" if self._silent(found) else found.spans[0].text for found in self.candidates]

    @cached_property
    def by_question(self) -> list[tuple[float, float]]:
        """Exact match and F1 of each."""
        return [best_scores(said, gold) for said, gold in zip(self.said, self._gold, strict=True)]

    @property
    def exact(self) -> list[float]:
        return [exact for exact, _ in self.by_question]

    @property
    def f1(self) -> list[float]:
        return [f1 for _, f1 in self.by_question]

    def results(self) -> dict[str, Result]:
        """For the record. The F1's interval is Student's t over questions; that of the share of exact matches follows
        from its counts."""
        right = int(sum(self.exact))
        f1 = self.f1_interval
        found = {
            "exact_match": Result(value=right / len(self.exact), trials=len(self.exact), successes=right),
            "f1": Result(value=f1.value),
        }
        if math.isfinite(f1.low):  # one question has no spread
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
        write_json(folder / PREDICTIONS, dict(zip(ids, self.said, strict=True)))
        write_json(folder / N_BEST, {name: self._n_best(c) for name, c in zip(ids, self.candidates, strict=True)})
        write_json(folder / SCORES, {name: result.model_dump() for name, result in self.results().items()})
        # right or wrong by question, in the form in which a comparison pairs two models
        right = np.array(self.exact, dtype=np.int64)
        Predictions(np.array(ids), np.ones_like(right), right).save(folder)

    @cached_property
    def _gold(self) -> list[tuple[str, ...]]:
        return [gold_texts([answer.text for answer in question.answers]) for question in self.questions]

    def _silent(self, found: Candidates) -> bool:
        """Where there is no span, or where "no answer" wins clearly enough."""
        return not found.spans or (self.version_2 and found.null_margin > self.null_score_diff_threshold)

    def _n_best(self, found: Candidates) -> list[dict[str, Any]]:
        """Texts with their probability among those listed, "no answer" included in version 2.0."""
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
