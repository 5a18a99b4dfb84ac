"""Stage data.synthetic: a teacher's answers, filtered, as documents to train on.

Filters have a fixed order, and an answer is counted under the first that drops it, so that the counts add up: answers =
kept + truncated + too_short + too_long + duplicates + unjudged + low_score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from joulelab.data.chat.conversations import ASSISTANT
from joulelab.data.chat.encoding import EncodedDocument, pad_id_of, write_documents
from joulelab.distill.causal.context import TRAIN, CausalContext
from joulelab.distill.causal.preference_data import answer_scores, judge_answers, judge_inputs
from joulelab.distill.causal.teacher import REPORT, TeacherSource, energy_gap, read_candidates
from joulelab.distill.runner import StageSpec
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import Completion, Prompt, answer_ids, as_messages, encode_prompt
from joulelab.meter.figures import Frozen
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import Stage
from joulelab.runs.storage import read_json, write_json

STAGE = StageSpec("data.synthetic", "data", "filter")
READABLE = "kept.jsonl"
_HINTS = {
    "truncated": "raise generation.answer.max_new_tokens, or set generation.keep_truncated=true",
    "too_short": "lower generation.min_tokens",
    "too_long": "raise generation.max_tokens",
    "duplicates": "raise generation.answer.temperature, or set generation.keep_duplicates=true",
    "unjudged": "the judge returned no grade: use a larger judge, or another one (preferences.judge)",
    "low_score": "lower generation.min_score",
}
REASONS = tuple(_HINTS)
"""Why an answer was dropped, in the order of the filters."""


# filters


@dataclass(frozen=True)
class AnswerFilters:
    min_tokens: int = 1
    """Answers with fewer generated tokens are dropped; the token that ends an answer does not count."""
    max_tokens: int | None = None
    """Answers with more are dropped."""
    keep_truncated: bool = False
    """Keep truncated answers (`finish_reason` length)."""
    keep_duplicates: bool = False
    """Keep answers with the same words as an earlier one, to whatever prompt."""
    min_score: float | None = None
    """Answers that a judge scores below this, or could not score, are dropped."""

    def __post_init__(self) -> None:
        if self.min_tokens < 0 or (self.max_tokens is not None and self.max_tokens < max(1, self.min_tokens)):
            raise ConfigError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}; no answer can pass",
                "set max_tokens to min_tokens or more",
            )


@dataclass(frozen=True)
class KeptAnswer:
    prompt: Prompt
    answer: Completion
    score: float | None = None


class SyntheticReport(Frozen):
    prompts: int
    answers: int
    prompt_tokens: int
    generated_tokens: int
    """Of all answers, dropped ones included: they used energy too."""
    kept: int
    kept_tokens: int
    truncated: int = 0
    too_short: int = 0
    too_long: int = 0
    duplicates: int = 0
    unjudged: int = 0
    low_score: int = 0


def filter_answers(
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[Completion]],
    filters: AnswerFilters,
    scores: Sequence[Sequence[float | None]] | None = None,
) -> tuple[list[KeptAnswer], SyntheticReport]:
    """`scores` in the same shape as `answers`; required if `min_score` is set."""
    if filters.min_score is not None and scores is None:
        raise ConfigError("min_score is set, and the answers are not judged", "judge them first, or unset min_score")
    seen: set[str] = set()
    kept: list[KeptAnswer] = []
    dropped: dict[str, int] = {}
    for one in _all_answers(prompts, answers, scores):
        reason = _drop_reason(one, filters, seen)
        if reason is None:
            kept.append(one)
            seen.add(_normalized(one.answer.text))
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


def require_kept(kept: Sequence[KeptAnswer], report: SyntheticReport) -> None:
    if not kept:
        counts = {name: getattr(report, name) for name in REASONS}
        reasons = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)
        raise ConfigError(
            f"all {report.answers:,} answers were dropped: {reasons}", _HINTS[max(counts, key=counts.__getitem__)]
        )


def _all_answers(
    prompts: Sequence[Prompt], answers: Sequence[Sequence[Completion]], scores: Sequence[Sequence[float | None]] | None
) -> Iterator[KeptAnswer]:
    for number, (prompt, some) in enumerate(zip(prompts, answers, strict=True)):
        own = scores[number] if scores is not None else [None] * len(some)
        for answer, score in zip(some, own, strict=True):
            yield KeptAnswer(prompt, answer, score)


def _drop_reason(one: KeptAnswer, filters: AnswerFilters, seen: set[str]) -> str | None:
    answer = one.answer
    tokens = answer.tokens - (answer.finish_reason == "stop")  # without the token that ends it
    checks = (
        ("truncated", answer.finish_reason == "length" and not filters.keep_truncated),
        ("too_short", tokens < filters.min_tokens or not answer.text.strip()),
        ("too_long", filters.max_tokens is not None and tokens > filters.max_tokens),
        ("duplicates", not filters.keep_duplicates and _normalized(answer.text) in seen),
        ("unjudged", filters.min_score is not None and one.score is None),
        ("low_score", filters.min_score is not None and one.score is not None and one.score < filters.min_score),
    )
    return next((name for name, holds in checks if holds), None)


def _normalized(text: str) -> str:
    """Answers that differ in case and spacing only are duplicates."""
    return re.sub(r"\s+", " ", text).strip().casefold()


# training rows


def training_row(one: KeptAnswer) -> dict[str, Any]:
    messages = as_messages(one.prompt)
    if messages is None:
        return {"prompt": one.prompt, "response": one.answer.text}
    return {"messages": [*messages, {"role": ASSISTANT, "content": one.answer.text}]}


def write_training_rows(path: Path, kept: Iterable[KeptAnswer]) -> int:
    """JSON lines with `messages`, or with `prompt` and `response`, for any tool; renamed when complete. Returns the
    number of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    count = 0
    with temporary.open("w", encoding="utf-8") as file:
        for one in kept:
            file.write(json.dumps(training_row(one), ensure_ascii=False) + "\n")
            count += 1
    temporary.replace(path)
    return count


def synthetic_documents(context: CausalContext, data: Artifact, answers: Artifact, teacher: TeacherSource) -> Artifact:
    """The kept answers as documents, with a report of what was dropped."""
    spec, generation = context.spec, context.spec.generation
    scores = judge_answers(context, answers, teacher) if generation.min_score is not None else None
    filters = AnswerFilters(
        min_tokens=generation.min_tokens,
        max_tokens=generation.max_tokens,
        keep_truncated=generation.keep_truncated,
        keep_duplicates=generation.keep_duplicates,
        min_score=generation.min_score,
    )

    def work(folder: Path, stage: Stage) -> None:
        candidates = read_candidates(context, answers)
        judged = answer_scores(context, candidates, scores) if scores is not None else None
        prompts, completions = [one.prompt for one in candidates], [one.answers for one in candidates]
        kept, report = filter_answers(prompts, completions, filters, judged)
        require_kept(kept, report)
        write_training_rows(folder / READABLE, kept)
        store = write_documents(
            folder / TRAIN, _encoded_documents(context, kept),
            vocab_size=context.vocabulary, pad_id=pad_id_of(context.tokenizer), tokenizer=spec.tokenizer,
        )  # fmt: skip
        stage.count(samples=report.kept, tokens=store.tokens_total)
        write_json(folder / REPORT, report)

    inputs: dict[str, Any] = {
        **vars(filters),
        "max_tokens_of_document": spec.data.max_tokens,
        "judge": judge_inputs(context) if generation.min_score is not None else None,
        "tokenizer": context.tokenizer_identity,
    }
    parents = [answers.bill, *([scores.bill] if scores else []), data.bill]
    made = context.runner.make("synthetic", STAGE, work, kind="synthetic-documents", inputs=inputs, parents=parents)
    _report_filtering(context, made, answers, scores)
    return made


def _encoded_documents(context: CausalContext, kept: list[KeptAnswer]) -> Iterator[EncodedDocument]:
    """Only the answer is trained, with the token that ends it if it was finished."""
    for one in kept:
        prompt = encode_prompt(context.tokenizer, one.prompt)
        answer = answer_ids(context.tokenizer, one.prompt, one.answer.text, one.answer.finish_reason == "stop")
        ids = np.array([*prompt, *answer], dtype=np.int64)[: context.spec.data.max_tokens]
        yield EncodedDocument(ids, np.arange(len(ids)) >= len(prompt))


def _report_filtering(context: CausalContext, made: Artifact, answers: Artifact, scores: Artifact | None) -> None:
    report = SyntheticReport.model_validate(read_json(made.folder / REPORT))
    for name, value in report.model_dump().items():
        if isinstance(value, int | float):
            context.runner.report(f"synthetic.{name}", float(value))
    if energy_gap(answers) is None:
        bills = [answers.bill, made.bill, *([scores.bill] if scores else [])]
        context.run.energy_result("synthetic.energy_j", bills)
        context.run.energy_result("synthetic.j_per_kept_sample", bills, report.kept)
        context.run.energy_result("synthetic.j_per_generated_token", bills, report.generated_tokens)
    dropped = {name: getattr(report, name) for name in REASONS}
    reasons = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in dropped.items() if count)
    suffix = f" ({reasons})" if reasons else ""
    context.run.progress.say(f"synthetic: {report.kept} of {report.answers} answers kept{suffix}")
