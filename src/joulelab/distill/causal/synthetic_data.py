"""Which of a teacher's answers are kept, and a count of every reason for dropping one.

Filters stand in a fixed order, and an answer is counted under the first that drops it, so that the counts add up:
answers = kept + truncated + too_short + too_long + duplicates + unjudged + low_score.
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
from joulelab.distill.causal import preference_data
from joulelab.distill.causal.context import TRAIN, CausalContext
from joulelab.distill.causal.teacher import REPORT, TeacherSource, energy_gap, read_candidates
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import Completion, Prompt, answer_ids, as_messages, encode_prompt
from joulelab.meter.figures import Frozen
from joulelab.runs.artifacts import Artifact
from joulelab.runs.record import Result
from joulelab.runs.storage import read_json, write_json

_HINTS = {
    "truncated": "raise generation.answer.max_new_tokens, or set generation.keep_truncated=true",
    "too_short": "lower generation.min_tokens",
    "too_long": "raise generation.max_tokens",
    "duplicates": "draw with a higher generation.answer.temperature, or set generation.keep_duplicates=true",
    "unjudged": "the judge gave no grade: ask a larger judge, or use another one (preferences.judge)",
    "low_score": "lower generation.min_score",
}
REASONS = tuple(_HINTS)
"""Why an answer was dropped, in the order in which they are asked."""


@dataclass(frozen=True)
class AnswerFilters:
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
class KeptAnswer:
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


def filter_answers(
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[Completion]],
    filters: AnswerFilters,
    scores: Sequence[Sequence[float | None]] | None = None,
) -> tuple[list[KeptAnswer], SyntheticReport]:
    """`scores` in the same shape as `answers`; needed where `min_score` is set."""
    if filters.min_score is not None and scores is None:
        raise ConfigError("min_score is set and nobody judged the answers", "judge them first, or leave min_score out")
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
        told = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)
        raise ConfigError(
            f"not one of {report.answers:,} answers was kept: {told}",
            _HINTS[max(counts, key=counts.__getitem__)],
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
    # a finished answer ends with a closing token, which says nothing
    tokens = answer.tokens - (answer.finish_reason == "stop")
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
    """Case and spacing make no new answer."""
    return re.sub(r"\s+", " ", text).strip().casefold()


# Kept answers as training rows: JSON lines with `messages`, or with `prompt` and `response`, that any tool reads.


def training_row(one: KeptAnswer) -> dict[str, Any]:
    messages = as_messages(one.prompt)
    if messages is None:
        return {"prompt": one.prompt, "response": one.answer.text}
    return {"messages": [*messages, {"role": ASSISTANT, "content": one.answer.text}]}


def write_training_rows(path: Path, kept: Iterable[KeptAnswer]) -> int:
    """Under another name until it is whole; the number of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    count = 0
    with temporary.open("w", encoding="utf-8") as file:
        for one in kept:
            file.write(json.dumps(training_row(one), ensure_ascii=False) + "\n")
            count += 1
    temporary.replace(path)
    return count


# What is kept of a teacher's answers, as documents to train on.


READABLE = "kept.jsonl"


def synthetic_documents(bench: CausalContext, data: Artifact, answers: Artifact, voice: TeacherSource) -> Artifact:
    """What is kept of the answers, as documents to train on; the counts of what was dropped lie beside them."""
    wanted = bench.spec.generation
    judged = preference_data.judge_answers(bench, answers, voice) if wanted.min_score is not None else None
    filters = AnswerFilters(
        min_tokens=wanted.min_tokens,
        max_tokens=wanted.max_tokens,
        keep_truncated=wanted.keep_truncated,
        keep_duplicates=wanted.keep_duplicates,
        min_score=wanted.min_score,
    )

    def make(folder: Path) -> None:
        with bench.run.stage("data.synthetic", role="data", activity="filter") as stage:
            asked = read_candidates(bench, answers)
            scores = preference_data.answer_scores(bench, asked, judged) if judged is not None else None
            kept, report = filter_answers(
                [one.prompt for one in asked], [one.answers for one in asked], filters, scores
            )
            require_kept(kept, report)
            write_training_rows(folder / READABLE, kept)
            store = write_documents(
                folder / TRAIN, _encoded_documents(bench, kept),
                vocab_size=bench.words, pad_id=pad_id_of(bench.tokenizer), tokenizer=bench.spec.tokenizer,
            )  # fmt: skip
            stage.count(samples=report.kept, tokens=store.tokens_total)
        write_json(folder / REPORT, report)

    inputs: dict[str, Any] = {
        **vars(filters),
        "max_tokens_of_document": bench.spec.data.max_tokens,
        "judge": preference_data.judge_inputs(bench) if wanted.min_score is not None else None,
        "tokenizer": bench.tokenizer_identity,
    }
    used = [answers, *([judged] if judged else [])]
    parents = [*(one.bill for one in used), data.bill]
    made = bench.run.artifact("synthetic", kind="synthetic-documents", inputs=inputs, parents=parents, make=make)
    _report_filtering(bench, made, answers, judged)
    return made


def _encoded_documents(bench: CausalContext, kept: list[KeptAnswer]) -> Iterator[EncodedDocument]:
    """The prompt is read, the answer is learnt, its closing token included where it came to its end."""
    for one in kept:
        asked = encode_prompt(bench.tokenizer, one.prompt)
        said = answer_ids(bench.tokenizer, one.prompt, one.answer.text, one.answer.finish_reason == "stop")
        ids = np.array([*asked, *said], dtype=np.int64)[: bench.spec.data.max_tokens]
        yield EncodedDocument(ids, np.arange(len(ids)) >= len(asked))


def _report_filtering(bench: CausalContext, made: Artifact, answers: Artifact, judged: Artifact | None) -> None:
    report = SyntheticReport.model_validate(read_json(made.folder / REPORT))
    for name, value in report.model_dump().items():
        if isinstance(value, int | float):
            bench.run.result(f"synthetic.{name}", Result(value=float(value)))
    if energy_gap(answers) is None:
        paid = [answers.bill, made.bill, *([judged.bill] if judged else [])]
        bench.run.joules_result("synthetic.energy_j", paid)
        bench.run.joules_result("synthetic.j_per_kept_sample", paid, report.kept)
        bench.run.joules_result("synthetic.j_per_generated_token", paid, report.generated_tokens)
    dropped = {name: getattr(report, name) for name in REASONS}
    told = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in dropped.items() if count)
    why = f" ({told})" if told else ""
    bench.run.progress.say(f"synthetic: {report.kept} of {report.answers} answers kept{why}")
