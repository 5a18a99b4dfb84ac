"""From judged candidates to pairs: the best against the worst of each prompt, and what became of the others.

A judge's taste for length becomes the student's, so it is measured and reported beside the pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from joulelab.distill.preferences.candidates import Candidates, Score
from joulelab.distill.preferences.pairs import Pair
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import Completion, Prompt, answer_ids, encode_prompt
from joulelab.meter.figures import Frozen


@dataclass(frozen=True)
class Preference:
    prompt: Prompt
    chosen: Completion
    rejected: Completion


class PairReport(Frozen):
    """Counts are of prompts unless said otherwise: prompts = pairs + ties + identical + unjudged + too_long."""

    prompts: int
    pairs: int
    ties: int
    """Best and worst within the margin of a tie."""
    identical: int
    """All judged answers were the same text."""
    unjudged: int
    """Fewer than two answers could be judged."""
    too_long: int = 0
    """Did not fit into a row."""
    answers_unjudged: int
    """Of all prompts."""
    chosen_truncated: int
    """Pairs whose better answer was cut off."""
    chosen_tokens_mean: float | None
    rejected_tokens_mean: float | None
    chosen_longer_share: float | None
    """Of the pairs with answers of different length; 0.5 would be no taste for length."""
    length_score_correlation: float | None
    """Between tokens and score within prompts; nothing where either never differs."""


def prefer(
    asked: Sequence[Candidates], scores: Sequence[Sequence[Score]], tie_margin: float = 0.0
) -> tuple[list[Preference], PairReport]:
    if tie_margin < 0:
        raise ConfigError(f"tie_margin is {tie_margin}; expected 0 or more")
    counts = {"ties": 0, "identical": 0, "unjudged": 0}
    found: list[Preference] = []
    for one, own in zip(asked, scores, strict=True):
        judged = _judged(one, own)
        if len(judged) < 2:
            counts["unjudged"] += 1
        elif len({answer.text for answer, _ in judged}) < 2:
            counts["identical"] += 1
        else:
            best, worst = max(judged, key=lambda pair: pair[1]), min(judged, key=lambda pair: pair[1])
            if best[1] - worst[1] <= tie_margin:
                counts["ties"] += 1
            else:
                found.append(Preference(one.prompt, best[0], worst[0]))
    return found, _report(asked, scores, found, counts)


def encode_pairs(
    tokenizer: Any, preferences: Sequence[Preference], report: PairReport, max_tokens: int
) -> tuple[list[Pair], PairReport]:
    """Pairs in the student's tokens; one whose row (prompt and both answers) is too long is left out and counted."""
    pairs = [pair for pair in _encoded(tokenizer, preferences) if pair.tokens <= max_tokens]
    left_out = len(preferences) - len(pairs)
    update = {"pairs": len(pairs), "too_long": report.too_long + left_out}
    return pairs, report.model_copy(update=update)


def _encoded(tokenizer: Any, preferences: Sequence[Preference]) -> Iterator[Pair]:
    for one in preferences:
        chosen, rejected = (
            np.array(answer_ids(tokenizer, one.prompt, answer.text, answer.finish_reason == "stop"), np.int64)
            for answer in (one.chosen, one.rejected)
        )
        yield Pair(np.array(encode_prompt(tokenizer, one.prompt), np.int64), chosen, rejected)


def _judged(one: Candidates, scores: Sequence[Score]) -> list[tuple[Completion, float]]:
    """An empty answer that was cut off has no token to learn from."""
    both = zip(one.answers, scores, strict=True)
    return [
        (answer, score)
        for answer, score in both
        if score is not None and np.isfinite(score) and (answer.text or answer.finish_reason == "stop")
    ]


def _report(
    asked: Sequence[Candidates],
    scores: Sequence[Sequence[Score]],
    found: Sequence[Preference],
    counts: dict[str, int],
) -> PairReport:
    chosen = np.array([one.chosen.tokens for one in found], float)
    rejected = np.array([one.rejected.tokens for one in found], float)
    differ = chosen != rejected
    return PairReport(
        prompts=len(asked),
        pairs=len(found),
        answers_unjudged=sum(score is None for own in scores for score in own),
        chosen_truncated=sum(one.chosen.finish_reason == "length" for one in found),
        chosen_tokens_mean=float(chosen.mean()) if len(found) else None,
        rejected_tokens_mean=float(rejected.mean()) if len(found) else None,
        chosen_longer_share=float((chosen > rejected)[differ].mean()) if differ.any() else None,
        length_score_correlation=_length_correlation(asked, scores),
        **counts,
    )


def _length_correlation(asked: Sequence[Candidates], scores: Sequence[Sequence[Score]]) -> float | None:
    """Each prompt's own mean is taken off first: long answers to hard questions are no taste for length."""
    lengths, values = [], []
    for one, own in zip(asked, scores, strict=True):
        judged = _judged(one, own)
        if len(judged) > 1:
            tokens, score = np.array([(answer.tokens, value) for answer, value in judged], float).T
            lengths.append(tokens - tokens.mean())
            values.append(score - score.mean())
    if not lengths:
        return None
    every_length, every_value = np.concatenate(lengths), np.concatenate(values)
    spread = float(np.sqrt((every_length**2).sum() * (every_value**2).sum()))
    return float((every_length * every_value).sum() / spread) if spread > 0 else None
