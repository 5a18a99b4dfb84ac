"""Which of a teacher's answers are kept, and a count of every reason for dropping one.

Filters stand in a fixed order, and an answer is counted under the first that drops it, so that the counts add up:
answers = kept + truncated + too_short + too_long + duplicates + unjudged + low_score.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import Completion, Prompt
from joulelab.meter.figures import Frozen

_WAYS_OUT = {
    "truncated": "raise generation.answer.max_new_tokens, or set generation.keep_truncated=true",
    "too_short": "lower generation.min_tokens",
    "too_long": "raise generation.max_tokens",
    "duplicates": "draw with a higher generation.answer.temperature, or set generation.keep_duplicates=true",
    "unjudged": "the judge gave no grade: ask a larger judge, or use another one (preferences.judge)",
    "low_score": "lower generation.min_score",
}
REASONS = tuple(_WAYS_OUT)
"""Why an answer was dropped, in the order in which they are asked."""


@dataclass(frozen=True)
class Filters:
    min_tokens: int = 1
    """Answers with fewer generated tokens are dropped; the closing token does not count as one."""
    max_tokens: int | None = None
    """Answers with more are dropped."""
    keep_truncated: bool = False
    """Keep answers that were cut off (`finish_reason` length)."""
    keep_duplicates: bool = False
    """Keep answers whose words were said before, to whatever prompt."""
    min_score: float | None = None
    """Answers a judge scores below this are dropped, and those it could not score."""

    def __post_init__(self) -> None:
        if self.min_tokens < 0 or (self.max_tokens is not None and self.max_tokens < max(1, self.min_tokens)):
            raise ConfigError(
                f"answers of at least {self.min_tokens} and at most {self.max_tokens} tokens do not exist",
                "set max_tokens to min_tokens or more",
            )


@dataclass(frozen=True)
class Kept:
    prompt: Prompt
    answer: Completion
    score: float | None = None


class SyntheticReport(Frozen):
    prompts: int
    answers: int
    prompt_tokens: int
    generated_tokens: int
    """Of all answers, dropped ones too: they were paid for."""
    kept: int
    kept_tokens: int
    truncated: int = 0
    too_short: int = 0
    too_long: int = 0
    duplicates: int = 0
    unjudged: int = 0
    low_score: int = 0


def keep(
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[Completion]],
    filters: Filters,
    scores: Sequence[Sequence[float | None]] | None = None,
) -> tuple[list[Kept], SyntheticReport]:
    """`scores` in the same shape as `answers`; needed where `min_score` is set."""
    if filters.min_score is not None and scores is None:
        raise ConfigError("min_score is set and nobody judged the answers", "judge them first, or leave min_score out")
    seen: set[str] = set()
    kept: list[Kept] = []
    dropped: dict[str, int] = {}
    for one in _every(prompts, answers, scores):
        reason = _reason_against(one, filters, seen)
        if reason is None:
            kept.append(one)
            seen.add(_words(one.answer.text))
        else:
            dropped[reason] = dropped.get(reason, 0) + 1
    report = SyntheticReport(
        prompts=len(prompts),
        answers=sum(len(some) for some in answers),
        prompt_tokens=sum((some[0].prompt_tokens or 0) for some in answers if some),
        generated_tokens=sum(answer.tokens for some in answers for answer in some),
        kept=len(kept),
        kept_tokens=sum(one.answer.tokens for one in kept),
        **dropped,
    )
    return kept, report


def require_some(kept: Sequence[Kept], report: SyntheticReport) -> None:
    if not kept:
        counts = {name: getattr(report, name) for name in REASONS}
        told = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)
        raise ConfigError(
            f"not one of {report.answers:,} answers was kept: {told}",
            _WAYS_OUT[max(counts, key=counts.__getitem__)],
        )


def _every(
    prompts: Sequence[Prompt], answers: Sequence[Sequence[Completion]], scores: Sequence[Sequence[float | None]] | None
) -> Iterator[Kept]:
    for number, (prompt, some) in enumerate(zip(prompts, answers, strict=True)):
        own = scores[number] if scores is not None else [None] * len(some)
        for answer, score in zip(some, own, strict=True):
            yield Kept(prompt, answer, score)


def _reason_against(one: Kept, filters: Filters, seen: set[str]) -> str | None:
    answer = one.answer
    # a finished answer ends with a closing token, which says nothing
    tokens = answer.tokens - (answer.finish_reason == "stop")
    checks = (
        ("truncated", answer.finish_reason == "length" and not filters.keep_truncated),
        ("too_short", tokens < filters.min_tokens or not answer.text.strip()),
        ("too_long", filters.max_tokens is not None and tokens > filters.max_tokens),
        ("duplicates", not filters.keep_duplicates and _words(answer.text) in seen),
        ("unjudged", filters.min_score is not None and one.score is None),
        ("low_score", filters.min_score is not None and one.score is not None and one.score < filters.min_score),
    )
    return next((name for name, holds in checks if holds), None)


def _words(text: str) -> str:
    """Case and spacing make no new answer."""
    return re.sub(r"\s+", " ", text).strip().casefold()
