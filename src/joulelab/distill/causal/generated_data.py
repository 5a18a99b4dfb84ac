"""Training data that a teacher produces: filtered answers (data.synthetic) and preference pairs.

Filters have a fixed order, and an answer is counted under the first that drops it, so that the counts add up: answers =
kept + truncated + too_short + too_long + duplicates + unjudged + low_score.

Preference training needs scores of the answers (teacher.judge), pairs (data.preferences) and the reference's
log-probabilities (student.reference).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from joulelab import lookup
from joulelab.data.chat.conversations import ASSISTANT
from joulelab.data.chat.encoding import EncodedDocument, pad_id_of, write_documents
from joulelab.distill.causal.models import TRAIN, CausalContext, load_student
from joulelab.distill.causal.teacher import REPORT, TeacherSource, candidate_batches, energy_gap, read_candidates
from joulelab.distill.preferences.judges import (
    Judge,
    LikelihoodJudge,
    PluginJudge,
    RubricJudge,
    RuleJudge,
    likelihood_identity,
    read_scores,
    rubric_identity,
    rule_identity,
    score_key,
    write_judgments,
    write_scores,
)
from joulelab.distill.preferences.pairs import (
    Candidates,
    PairLayout,
    PairReport,
    PairStore,
    Score,
    choose_pairs,
    encode_pairs,
    write_pairs,
)
from joulelab.distill.preferences.preference_loss import TargetLogProbabilities, write_reference
from joulelab.distill.runner import RemainingWork, ShardedWork, StageSpec
from joulelab.errors import ConfigError
from joulelab.infer.generation.completions import Completion, Prompt, answer_ids, as_messages, encode_prompt
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.meter.figures import Frozen
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import Stage
from joulelab.runs.paths import read_json, write_json
from joulelab.runs.phases import ALL, Shard

JUDGE_STAGE = StageSpec("teacher.judge", "teacher", "judge")
PAIRS_STAGE = StageSpec("data.preferences", "data", "filter")
REFERENCE_STAGE = StageSpec("student.reference", "student", "score")
SCORES, REFERENCE_FILE = "scores.jsonl", "reference.jsonl"
GRADE = GenerationSettings(max_new_tokens=8)


# scores


def judge_answers(context: CausalContext, answers: Artifact, teacher: TeacherSource) -> Artifact:
    """Scores of all answers, or of this run's shard."""
    return context.runner.make_sharded(_JudgingWork(context, answers).work(teacher))


def answer_scores(context: CausalContext, candidates: list[Candidates], scores: Artifact) -> list[list[Score]]:
    found, identity = read_scores(scores.folder / SCORES), _judge_identity(context)
    return [found[score_key(identity, one)] for one in candidates]


@dataclass(frozen=True)
class _JudgingWork:
    """Judging as sharded work; candidates are read only if there is work."""

    context: CausalContext
    answers: Artifact

    @cached_property
    def batches(self) -> list[list[Candidates]]:
        return candidate_batches(self.context, self.answers)

    @cached_property
    def candidates(self) -> list[Candidates]:
        return [one for batch in self.batches for one in batch]

    @cached_property
    def keys(self) -> list[str]:
        identity = _judge_identity(self.context)
        return [score_key(identity, one) for one in self.candidates]

    def work(self, teacher: TeacherSource) -> ShardedWork:
        parents, batch_size = [self.answers.bill, teacher.bill], self.context.spec.teacher.batch_size
        return ShardedWork(
            "scores", "scores", JUDGE_STAGE, judge_inputs(self.context), parents, batch_size,
            total=lambda: len(self.candidates), begin=self._begin, join=self._join,
        )  # fmt: skip

    def _begin(self, folder: Path, shard: Shard, others: Sequence[Path]) -> RemainingWork:
        own, known = read_scores(folder / _scores_log(shard)), read_scores(*_scores_logs([folder, *others]))
        if all(key in known for key in self.keys):
            return RemainingWork(None, {"samples": len(own)} if own else {})
        judge = _make_judge(self.context, self.candidates, self.answers)
        return RemainingWork(lambda stage: self._judge(folder, shard, others, judge, stage), {})

    def _judge(self, folder: Path, shard: Shard, others: Sequence[Path], judge: Judge, stage: Stage) -> None:
        run, ranks = self.context.run, self.context.runner.ranks

        def tick(prompts: int) -> None:
            stage.count(samples=prompts)
            run.progress.advance(prompts)
            run.stop.check()

        own, batch_size = folder / _scores_log(shard), self.context.spec.teacher.batch_size
        elsewhere = [path for path in _scores_logs([folder, *others]) if path != own]
        # the candidates are this shard's already; its ranks divide them
        units = ALL.among(ranks.rank, ranks.world).units([str(batch[0].prompt) for batch in self.batches])
        candidates = [one for at in units for one in self.batches[at]]
        write_judgments(own, judge, candidates, tick, batch_size=batch_size, others=elsewhere)

    def _join(self, sources: Sequence[Path], folder: Path) -> None:
        write_scores(folder / SCORES, self.keys, read_scores(*_scores_logs(sources)))


def _scores_log(shard: Shard) -> str:
    return f"scores-{shard.name}.jsonl"


def _scores_logs(folders: Sequence[Path]) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.glob("scores*.jsonl"))]


def judge_inputs(context: CausalContext) -> dict[str, Any]:
    """What decides the scores."""
    preferences = context.spec.preferences
    own = {"rubric": {"rubric"}, "rule": {"rule"}}.get(preferences.judge, set())
    settings: dict[str, Any] = preferences.model_dump(mode="json", include={"judge", *own})
    if origin := lookup.JUDGES.origin(preferences.judge):
        settings["package"] = origin
    asks_teacher = preferences.judge in ("likelihood", "rubric")
    return {**settings, "teacher": context.teacher_identity if asks_teacher else None}


def _judge_identity(context: CausalContext) -> str:
    """Identity of the judge, known without loading its model."""
    preferences = context.spec.preferences
    if preferences.judge == "rule":
        return rule_identity(preferences.rule)
    if origin := lookup.JUDGES.origin(preferences.judge):
        return f"{preferences.judge}:{origin}"
    if preferences.judge == "likelihood":
        return likelihood_identity(context.teacher_identity)
    return rubric_identity(context.teacher_identity, GRADE, preferences.rubric, chat=_has_chat_template(context))


def _has_chat_template(context: CausalContext) -> bool:
    return bool(getattr(context.tokenizer, "chat_template", None))


def _make_judge(context: CausalContext, candidates: Sequence[Candidates], answers: Artifact) -> Judge:
    """The teacher judges, whichever model has written the answers."""
    preferences, batch_size = context.spec.preferences, context.spec.teacher.batch_size
    if preferences.judge == "rule":
        return RuleJudge(preferences.rule)
    if lookup.JUDGES.origin(preferences.judge):
        return PluginJudge(lookup.JUDGES.resolve(preferences.judge), _judge_identity(context))
    if preferences.judge == "rubric":
        grader = TransformersGenerator(
            context.load_teacher(), context.tokenizer, GRADE, identity=context.teacher_identity, batch_size=batch_size
        )
        return RubricJudge(grader, preferences.rubric, chat=_has_chat_template(context))
    written_by = str(read_json(answers.folder / REPORT)["generator"])
    known = all(answer.log_probability_sum is not None for one in candidates for answer in one.answers)
    # log-probabilities of the teacher's own answers are known from generation, so it need not be loaded
    model = nn.Identity() if known and written_by == context.teacher_identity else context.load_teacher()
    return LikelihoodJudge(
        model, context.tokenizer, identity=context.teacher_identity, batch_size=batch_size, written_by=written_by
    )


# pairs


def make_pairs(context: CausalContext, answers: Artifact, teacher: TeacherSource) -> Artifact:
    spec, scores = context.spec, judge_answers(context, answers, teacher)

    def work(folder: Path, stage: Stage) -> None:
        candidates = read_candidates(context, answers)
        found = answer_scores(context, candidates, scores)
        preferred, report = choose_pairs(candidates, found, spec.preferences.tie_margin)
        pairs, report = encode_pairs(context.tokenizer, preferred, report, spec.data.row_length)
        stage.count(samples=len(pairs), tokens=sum(pair.tokens for pair in pairs))
        write_pairs(
            folder, pairs,
            vocab_size=context.vocabulary, tokenizer=spec.tokenizer, report=report.model_dump(mode="json"),
        )  # fmt: skip

    inputs = {
        **judge_inputs(context),
        "tie_margin": spec.preferences.tie_margin,
        "row_length": spec.data.row_length,
        "tokenizer": context.tokenizer_identity,
    }
    made = context.runner.make(
        "preferences", PAIRS_STAGE, work, kind="preference-pairs", inputs=inputs, parents=[answers.bill, scores.bill]
    )
    _report_pairs(context, made, answers, scores)
    return made


def _report_pairs(context: CausalContext, pairs: Artifact, answers: Artifact, scores: Artifact) -> None:
    report = PairReport.model_validate(dict(PairStore.open(pairs.folder).report))
    for name, value in report.model_dump().items():
        if isinstance(value, int | float):
            context.runner.report(f"preferences.{name}", float(value))
    if energy_gap(answers) is None:
        bills = [answers.bill, scores.bill, pairs.bill]
        context.run.energy_result("preferences.energy_j", bills)
        context.run.energy_result("preferences.j_per_pair", bills, report.pairs)
    share = report.chosen_longer_share
    longer = "" if share is None else f"; the longer answer won in {100 * share:.0f} % of pairs of unequal length"
    context.run.progress.write(
        f"preferences: {report.pairs} pairs from {report.prompts} prompts, {report.ties} ties{longer}"
    )


# reference


def score_reference(context: CausalContext, pairs: Artifact, start: Artifact) -> Artifact:
    """The initial student's log-probabilities of both answers of every pair."""
    spec, store = context.spec, PairStore.open(pairs.folder)

    def begin(folder: Path, shard: Shard, others: Sequence[Path]) -> RemainingWork:
        model = load_student(start.folder).to(context.device)

        def work(stage: Stage) -> None:
            write_reference(
                folder / f"{shard.name}.jsonl", start.key, model, store,
                batch_size=spec.training.batch_size, log_probabilities=TargetLogProbabilities(spec.chunk),
                precision=spec.training.precision, layout=PairLayout(spec.preferences.shared_prompt),
                tick=context.runner.counter(stage), shard=shard,
            )  # fmt: skip

        return RemainingWork(work, {})

    def join(sources: Sequence[Path], folder: Path) -> None:
        logs = [path for source in sources for path in sorted(source.glob("*.jsonl"))]
        text = "".join(path.read_text(encoding="utf-8") for path in logs)
        (folder / REFERENCE_FILE).write_text(text, encoding="utf-8")

    inputs = {"precision": spec.training.precision, "shared_prompt": spec.preferences.shared_prompt}
    parents, batch_size = [pairs.bill, start.bill], spec.training.batch_size
    return context.runner.make_sharded(
        ShardedWork(
            "reference", "reference-logs", REFERENCE_STAGE, inputs, parents, batch_size, store.__len__, begin, join
        )
    )


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
    """Keep answers with the same words as an earlier one, for any prompt."""
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
        raise ConfigError("min_score is set, but the answers are not judged", "judge them first, or unset min_score")
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
    context.run.progress.write(f"synthetic: {report.kept} of {report.answers} answers kept{suffix}")
