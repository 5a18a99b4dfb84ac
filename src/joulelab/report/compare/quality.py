"""Quality metrics: which results of a run measure the quality of its model, and how they are printed.

Pipelines choose the names of their results (`student.accuracy`, `student.exact_match`, `model.evaluate.loss`). The
first word is the model's role; the rest is the measure, which teacher and student share and runs are compared by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from joulelab.runs.record import Result, RunRecord
from joulelab.stats import Z95, Interval, wilson

_WHOSE = ("student", "policy", "model", "teacher")
_SHARES = ("accuracy", "exact_match", "f1", "macro_f1", "win_rate")
_SCORES = ("score", "reward", "bleu", "rouge", "grade")
_FALLING = ("loss", "perplexity")
# Losses known to be a mean cross-entropy per token; the unit of others does not follow from their names.
_NATS = ("mlm_loss", "clm_loss")
# Names that fit into `a higher ...`.
_TITLES = {
    "exact_match": "exact match",
    "exact_answers": "share of exact answers",
    "next_token": "share of right next tokens",
    "bits_per_byte": "number of bits per byte",
    "f1": "F1",
    "macro_f1": "macro F1",
    "win_rate": "win rate",
    "judge.win_rate": "win rate",
    "judge.grade": "mean grade of the judge",
    "judge.unjudged": "number of answers without a verdict",
}
# Results that describe the training, the data or another result, not the quality of the model.
# Tasks of lm-evaluation-harness are compared only on request (`--quality`).
_OTHER_RESULTS = (
    *("train", "validate", "data", "program", "start", "completions", "low", "high", "threshold", "phases", "harness"),
)
# Results of the run as a whole: the data it made, its budget, the alignment of two tokenizers, its cached logits.
_OF_THE_RUN = ("synthetic", "preferences", "budget", "alignment", "logits")
# Language models are compared by held-out loss; `exact_answers` only on request.
AGREEMENT = "student.agreement"
"""Share of positions or items for which student and teacher predict the same."""
_NOT_QUALITY = ("agreement", "over_teacher", "calibration_error", "exact_answers", "unjudged")
# Values of a training stage's own objective: the student's, or those of the model it starts from.
_TRAINING = ("first_loss", "final_loss")


@dataclass(frozen=True)
class Measure:
    """A quality metric: `accuracy`, `exact_match`, `mlm_loss`."""

    name: str
    lower_is_better: bool
    percent: bool

    @property
    def title(self) -> str:
        if self.of_training:
            return "training loss"
        if self.name.endswith("loss"):
            return "held-out loss"
        if self.name.startswith("harness."):
            return f"{self.name.removeprefix('harness.').removesuffix('.value').replace('.', ' ')} score"
        return _TITLES.get(self.name, self.name.replace("_", " ").replace(".", " "))

    @property
    def heading(self) -> str:
        """The title of a column or an axis: `Bits per byte`."""
        words = self.title.removeprefix("number of ")
        return words[:1].upper() + words[1:]

    @property
    def of_training(self) -> bool:
        """A loss on the training data, by the objective of the method."""
        parts = self.name.split(".")
        return parts[-1] in _TRAINING or (parts[-1].endswith("loss") and "train" in parts)

    @property
    def unit(self) -> str:
        return "%" if self.percent else "nats" if self.name.endswith(_NATS) else ""

    @property
    def per_token(self) -> bool:
        """A mean over tokens, which models with different tokenizers do not have in common."""
        return self.name.startswith(_NATS) or self.name == "next_token"

    @property
    def difference_unit(self) -> str:
        return "points" if self.percent else self.unit

    @property
    def axis(self) -> str:
        unit = "nats per token" if self.unit == "nats" else self.unit
        return f"{self.heading} ({unit})" if unit else self.heading

    @property
    def sign(self) -> int:
        """Factor that makes larger differences better."""
        return -1 if self.lower_is_better else 1

    def number(self, value: float) -> str:
        return f"{100 * value:.1f}" if self.percent else f"{value:.3f}"

    def text(self, value: float, interval: Interval | None = None) -> str:
        """`81.2 % [80.0, 82.3]`, `3.214 nats`"""
        ends = f" [{self.number(interval.low)}, {self.number(interval.high)}]" if interval else ""
        return f"{self.number(value)}{f' {self.unit}' if self.unit else ''}{ends}"

    def change(self, difference: float) -> str:
        # adding 0 turns a negative zero into a plain one
        return f"{round(100 * difference, 1) + 0.0:+.1f}" if self.percent else f"{round(difference, 3) + 0.0:+.3f}"

    def possible(self, difference: Interval) -> Interval:
        """Two shares differ by at most 100 points; an interval without ends stays so."""
        if not self.percent or not difference.bounded:
            return difference
        return Interval(difference.value, max(-1.0, difference.low), min(1.0, difference.high))

    def change_interval(self, interval: Interval) -> str:
        return f"[{self.change(interval.low)}, {self.change(interval.high)}]"


@dataclass(frozen=True)
class Quality:
    """A run's value of a measure."""

    measure: Measure
    result: Result

    @property
    def interval(self) -> Interval | None:
        """The interval of the test set: its items are a sample, however many seeds were trained."""
        value, error = self.result.value, self.result.standard_error
        if self.result.trials is None and error is not None:
            return Interval(value, value - Z95 * error, value + Z95 * error)
        return share_interval(value, self.result.trials)

    def text(self, with_interval: bool = True) -> str:
        return self.measure.text(self.result.value, self.interval if with_interval else None)


def share_interval(share: float, trials: int | None) -> Interval | None:
    return wilson(share * trials, trials) if trials else None


def quality_of(record: RunRecord, measure: Measure | None = None) -> Quality | None:
    """The value of the run's model, of this measure if one is given; a teacher's only if the run trains no student."""
    found = _qualities(record)
    return next((quality for quality in found if measure is None or quality.measure.name == measure.name), None)


def common_measure(records: Sequence[RunRecord], wanted: str | None = None) -> Measure | None:
    """The measure that most runs have, the first of equals; `wanted` names any result instead."""
    if wanted is not None:
        found = (_named(record, wanted) for record in records)
        return next((measure for measure in found if measure), None)
    measures = [[quality.measure for quality in _qualities(record)] for record in records]
    counts = Counter(measure.name for found in measures for measure in dict.fromkeys(found))
    most = max(counts.values(), default=0)
    return next((measure for found in measures for measure in found if counts[measure.name] == most), None)


def measure_names(records: Sequence[RunRecord]) -> list[str]:
    """Names that `common_measure` accepts."""
    return list(dict.fromkeys(_split(name)[1] for record in records for name in record.results))


def _named(record: RunRecord, wanted: str) -> Measure | None:
    for name, result in record.results.items():
        if wanted in (name, _split(name)[1]):
            return _measure(_split(name)[1], result)
    return None


def _models(record: RunRecord) -> tuple[str, ...]:
    """Whose results are those of the run's model, the first before the others."""
    return tuple(whose for whose in (*_WHOSE, "") if whose != "teacher" or not record.trains_student)


def _qualities(record: RunRecord) -> list[Quality]:
    found = []
    for name, result in record.results.items():
        whose, measure = _split(name)
        of_the_run = not whose and measure.partition(".")[0] in _OF_THE_RUN
        if whose in _models(record) and not of_the_run and _is_quality(measure, result):
            found.append((_models(record).index(whose), _measure(measure, result), result))
    if not found:  # a run that only evaluates: its answers and tasks are the quality
        found = [
            (_models(record).index(whose), _measure(measure, result), result)
            for name, result in record.results.items()
            for whose, measure in [_split(name)]
            if whose in _models(record) and measure.partition(".")[0] in ("exact_answers", "harness")
        ]
    found.sort(key=lambda row: (row[0], _rank(row[1])))
    return [Quality(measure, result) for _, measure, result in found]


def result_of(record: RunRecord, measure: Measure) -> Result | None:
    """Like `quality_of`, also for measures that are not quality metrics."""
    for whose in _models(record):
        name = f"{whose}.{measure.name}" if whose else measure.name
        if name in record.results:
            return record.results[name]
    return None


def _split(name: str) -> tuple[str, str]:
    whose, _, measure = name.partition(".")
    return (whose, measure) if whose in _WHOSE and measure else ("", name)


def _is_quality(measure: str, result: Result) -> bool:
    parts = measure.split(".")
    if (
        any(part in _OTHER_RESULTS or part.startswith("epoch_") for part in parts)
        or parts[-1] in _NOT_QUALITY + _TRAINING
        or _is_energy(parts[-1])
    ):
        return False
    known = parts[-1] in _SHARES + _SCORES or parts[-1].endswith(_FALLING)
    return known or result.trials is not None or result.lower_is_better


def _is_energy(name: str) -> bool:
    """`energy_j`, `j_per_pair`: less is better, and is no quality."""
    return name.endswith("_j") or name.startswith("j_per_")


def _measure(name: str, result: Result) -> Measure:
    last = name.rsplit(".", 1)[-1]
    lower = result.lower_is_better or last.endswith(_FALLING)
    return Measure(name, lower, percent=not lower and (last in _SHARES or result.trials is not None))


def _rank(measure: Measure) -> tuple[int, int]:
    last = measure.name.rsplit(".", 1)[-1]
    if last in _SHARES:
        return 0, _SHARES.index(last)
    return (1, 0) if measure.percent else (2, 0) if last.endswith("loss") else (3, 0)
