"""Training data that a teacher produces: filtered answers (data.synthetic) and preference pairs.

Filters have a fixed order, and an answer is counted under the first that drops it, so that the counts add up: answers =
kept + truncated + too_short + too_long + duplicates + unjudged + low_score.

Preference training needs scores of the answers (teacher.judge), pairs (data.preferences) and the reference's
log-probabilities (student.reference).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from joulelab import lookup
from joulelab.data.chat.conversations import ASSISTANT, PreferenceConversation, PreferenceText, Row
from joulelab.data.chat.encoding import EncodedDocument, pad_id_of, vocab_size_of, write_documents
from joulelab.data.splits import HashShares, split_of, text_id
from joulelab.distill.causal.cross_tokenizer import (
    IN_TEACHERS_TOKENS,
    both_trained,
    teacher_tokenizer_identity,
    tokenizer_pair,
)
from joulelab.distill.causal.data import split_rows
from joulelab.distill.causal.generators import SERVER_KEY, TeacherSource
from joulelab.distill.causal.models import TEST, TRAIN, CausalContext, Split, load_student, weight_dtype
from joulelab.distill.causal.teacher import (
    REPORT,
    StartingStudent,
    candidate_batches,
    energy_gap,
    read_candidates,
    refuse_unknown_energy,
)
from joulelab.distill.preferences.judges import (
    Judge,
    LikelihoodJudge,
    PairwiseJudge,
    PluginJudge,
    RubricJudge,
    RuleJudge,
    likelihood_identity,
    pairwise_identity,
    read_scores,
    rubric_identity,
    rule_identity,
    score_key,
    write_judgments,
    write_scores,
)
from joulelab.distill.preferences.pairs import (
    CandidateFilters,
    Candidates,
    Pair,
    PairLayout,
    PairReport,
    PairStore,
    Preference,
    Score,
    choose_pairs,
    encode_pairs,
    readable_pair,
    write_pairs,
)
from joulelab.distill.preferences.preference_loss import TargetLogProbabilities, preference_loss, write_reference
from joulelab.distill.runner import RemainingWork, ShardedWork, StageSpec
from joulelab.errors import ConfigError
from joulelab.evaluate.judging import GRADE
from joulelab.infer.generation.completions import (
    Completion,
    Generator,
    Prompt,
    answer_ids,
    as_messages,
    encode_prompt,
)
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.meter.figures import Frozen
from joulelab.runs.artifacts import UNMETERED, Artifact
from joulelab.runs.context import Stage
from joulelab.runs.paths import read_json, write_json
from joulelab.runs.phases import ALL, Shard
from joulelab.runs.record import Result
from joulelab.train.bf16_weights import cast_weights
from joulelab.zoo.pretrained import load_tokenizer

JUDGE_STAGE = StageSpec("teacher.judge", "teacher", "judge")
PAIRS_STAGE = StageSpec("data.preferences", "data", "filter")
REFERENCE_STAGE = StageSpec("student.reference", "student", "score")
SCORES, REFERENCE_FILE = "scores.jsonl", "reference.jsonl"
HELD_OUT, READABLE_PAIRS, ACCURACY = "held_out", "pairs.jsonl", "preferences.json"


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
        parents, unit = [self.answers.bill, teacher.bill], self.context.spec.generation.prompts_per_unit
        judge = self.context.spec.preferences.judge
        if judge.model is not None and judge.server is None:
            parents.append(self.context.runner.input_bill("judge", judge.model, "model", role="teacher"))
        return ShardedWork(
            "scores", "scores", JUDGE_STAGE, judge_inputs(self.context), parents, unit,
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

        own, unit = folder / _scores_log(shard), self.context.spec.generation.prompts_per_unit
        elsewhere = [path for path in _scores_logs([folder, *others]) if path != own]
        # the candidates are this shard's already; its ranks divide them
        units = ALL.among(ranks.rank, ranks.world).units([str(batch[0].prompt) for batch in self.batches])
        candidates = [one for at in units for one in self.batches[at]]
        write_judgments(own, judge, candidates, tick, unit=unit, others=elsewhere)

    def _join(self, sources: Sequence[Path], folder: Path) -> None:
        write_scores(folder / SCORES, self.keys, read_scores(*_scores_logs(sources)))


def _scores_log(shard: Shard) -> str:
    return f"scores-{shard.name}.jsonl"


def _scores_logs(folders: Sequence[Path]) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.glob("scores*.jsonl"))]


def judge_inputs(context: CausalContext) -> dict[str, Any]:
    """What decides the scores."""
    preferences = context.spec.preferences
    judge = preferences.judge
    own = {"rubric": {"rubric"}, "pairwise": {"rubric"}, "rule": {"rule"}}.get(judge.kind, set())
    settings: dict[str, Any] = {"judge": judge.kind, **preferences.model_dump(mode="json", include=own)}
    if origin := lookup.JUDGES.origin(judge.kind):
        settings["package"] = origin
    # the key's spelling: scores of earlier versions, where the teacher was the only judge model, are found by it
    return {**settings, "teacher": _judge_model_identity(context) if judge.asks_model else None}


def _judge_model_identity(context: CausalContext) -> str:
    judge = context.spec.preferences.judge
    if judge.server is not None:
        return f"{judge.server.rstrip('/')}#{judge.model or context.spec.teacher.model}"
    return context.frozen_identity(judge.model or context.spec.teacher.model)


def _judge_identity(context: CausalContext) -> str:
    """Identity of the judge, known without loading its model."""
    preferences = context.spec.preferences
    kind = preferences.judge.kind
    if kind == "rule":
        return rule_identity(preferences.rule)
    if origin := lookup.JUDGES.origin(kind):
        return f"{kind}:{origin}"
    model = _judge_model_identity(context)
    if kind == "likelihood":
        return likelihood_identity(model)
    identity = pairwise_identity if kind == "pairwise" else rubric_identity
    return identity(model, GRADE, preferences.rubric, chat=_judge_has_chat_template(context))


def _judge_tokenizer(context: CausalContext) -> Any:
    name = context.spec.preferences.judge.model
    return context.teacher_tokenizer if name is None else load_tokenizer(name)


def _judge_has_chat_template(context: CausalContext) -> bool:
    if context.spec.preferences.judge.server is not None:
        return True  # it formats messages itself
    return bool(getattr(_judge_tokenizer(context), "chat_template", None))


def _make_judge(context: CausalContext, candidates: Sequence[Candidates], answers: Artifact) -> Judge:
    """The teacher or the model of `preferences.judge` judges, whichever model has written the answers."""
    spec, preferences = context.spec, context.spec.preferences
    judge, identity = preferences.judge, _judge_model_identity(context) if preferences.judge.asks_model else ""
    if judge.kind == "rule":
        return RuleJudge(preferences.rule)
    if lookup.JUDGES.origin(judge.kind):
        return PluginJudge(lookup.JUDGES.resolve(judge.kind), _judge_identity(context))
    name = judge.model or spec.teacher.model
    if judge.kind in ("rubric", "pairwise"):
        kind = PairwiseJudge if judge.kind == "pairwise" else RubricJudge
        return kind(_grader(context, name, identity), preferences.rubric, chat=_judge_has_chat_template(context))
    written_by = str(read_json(answers.folder / REPORT)["generator"])
    known = all(answer.log_probability_sum is not None for one in candidates for answer in one.answers)
    # log-probabilities of the judge's own answers are known from generation, so it need not be loaded
    model = nn.Identity() if known and written_by == identity else _load_judge_model(context)
    return LikelihoodJudge(
        model, _judge_tokenizer(context), identity=identity, written_by=written_by,
        batch_size=spec.teacher.batch_size, prompts_at_once=spec.generation.prompts_per_unit,
    )  # fmt: skip


def _load_judge_model(context: CausalContext) -> nn.Module:
    name = context.spec.preferences.judge.model
    return context.load_teacher() if name is None else context.load_frozen(name)


def _grader(context: CausalContext, name: str, identity: str) -> Generator:
    server = context.spec.preferences.judge.server
    if server is None:
        return TransformersGenerator(
            _load_judge_model(context), _judge_tokenizer(context), GRADE,
            identity=identity, batch_size=context.spec.generation.batch_size,
        )  # fmt: skip
    from joulelab.infer.generation.server import ServerGenerator, server_energy_gap

    grader = ServerGenerator(
        server, name, GRADE, api_key=os.environ.get(SERVER_KEY), metered_gpus=context.spec.energy.gpus
    )
    gap = grader.energy_gap or server_energy_gap(context.run.meter)
    if gap:
        context.run.warn(f"{JUDGE_STAGE.name}: {gap}")
        context.run.unmetered_work(JUDGE_STAGE.name, grader.identity, gap)
        refuse_unknown_energy(context.spec, gap)
    return grader


# pairs


def make_pairs(context: CausalContext, answers: Artifact, teacher: TeacherSource) -> Artifact:
    """Pairs of judged answers."""
    spec, scores = context.spec, judge_answers(context, answers, teacher)
    share = spec.preferences.held_out

    def work(folder: Path, stage: Stage) -> None:
        candidates = read_candidates(context, answers)
        found = answer_scores(context, candidates, scores)
        preferred, report = choose_pairs(candidates, found, spec.preferences.tie_margin, _candidate_filters(context))
        pairs, report = encode_pairs(context.tokenizer, preferred, report, spec.data.row_length)
        held_out = _held_out([one.prompt for one, _ in pairs], share)
        train = [one for one, not_trained in zip(pairs, held_out, strict=True) if not not_trained]
        others = [one for one, not_trained in zip(pairs, held_out, strict=True) if not_trained]
        _write_pair_stores(context, folder, stage, train, others, report)

    inputs = {
        **judge_inputs(context),
        **vars(_candidate_filters(context)),
        "held_out": share,
        "tie_margin": spec.preferences.tie_margin,
        "row_length": spec.data.row_length,
        "tokenizer": context.tokenizer_identity,
    }
    made = context.runner.make(
        "preferences", PAIRS_STAGE, work, kind="preference-pairs", inputs=inputs, parents=[answers.bill, scores.bill]
    )
    report = _report_pairs(context, made)
    judged_here = not any(one.kind == UNMETERED for one in scores.bill.ancestry)
    if energy_gap(answers) is None and judged_here:
        bills = [answers.bill, scores.bill, made.bill]
        context.run.energy_result("preferences.energy_j", bills)
        context.run.energy_result("preferences.j_per_pair", bills, report.pairs)
    return made


def _held_out(prompts: Sequence[Prompt], share: float) -> list[bool]:
    """For each prompt whether its answers are held out: by its hash, so that all its answers are on the same side."""
    shares = HashShares(0.0, share)
    held_out = [split_of(text_id(str(prompt)), shares) == "test" for prompt in prompts]
    if not any(held_out):
        # The same hash may have put them into the training split of the data, if a prompt is a whole document.
        held_out = [split_of(text_id(f"held out: {prompt}"), shares) == "test" for prompt in prompts]
    return [False] * len(prompts) if all(held_out) else held_out  # too few to hold any out


def own_pairs(context: CausalContext, data: Artifact) -> Artifact:
    """The pairs in the columns `chosen` and `rejected` of the data; its test split is held out."""
    spec = context.spec

    def split_pairs(split: Split) -> tuple[list[tuple[Preference, Pair]], PairReport]:
        candidates = [one for row in split_rows(context, split) if (one := _pair_candidates(context, row)) is not None]
        # the data states which answer is better; filters and the row length apply as to judged answers
        preferred, report = choose_pairs(candidates, [[1.0, 0.0]] * len(candidates), 0.0, _candidate_filters(context))
        plain = [Preference(one.prompt, one.chosen, one.rejected) for one in preferred]
        return encode_pairs(context.tokenizer, plain, report, spec.data.row_length)

    def work(folder: Path, stage: Stage) -> None:
        train, report = split_pairs(TRAIN)
        held_out, others = split_pairs(TEST)
        counts = {
            name: value + others.model_dump()[name] for name, value in report.model_dump().items() if type(value) is int
        }
        _write_pair_stores(context, folder, stage, train, held_out, report.model_copy(update=counts))

    inputs = {
        "pairs_of": "data",
        **vars(_candidate_filters(context)),
        "row_length": spec.data.row_length,
        "tokenizer": context.tokenizer_identity,
    }
    made = context.runner.make(
        "preferences", PAIRS_STAGE, work, kind="preference-pairs", inputs=inputs, parents=[data.bill]
    )
    _report_pairs(context, made)
    return made


def _candidate_filters(context: CausalContext) -> CandidateFilters:
    preferences = context.spec.preferences
    return CandidateFilters(preferences.min_tokens, preferences.max_tokens, preferences.keep_truncated)


def _pair_candidates(context: CausalContext, row: Row) -> Candidates | None:
    """A row's two answers, the better one first; None for a row that is no pair."""
    prompt: Prompt
    if isinstance(row, PreferenceText):
        prompt, texts = row.prompt, (row.chosen, row.rejected)
    elif isinstance(row, PreferenceConversation):
        prompt, texts = row[:-1], (row[-1]["content"], row.rejected)
    else:
        return None
    return Candidates(prompt, [_as_completion(context, prompt, text) for text in texts])


def _as_completion(context: CausalContext, prompt: Prompt, text: str) -> Completion:
    ids = answer_ids(context.tokenizer, prompt, text, finished=True)
    return Completion(text, tuple(ids), "stop", len(ids))


def _write_pair_stores(
    context: CausalContext,
    folder: Path,
    stage: Stage,
    train: Sequence[tuple[Preference, Pair]],
    held_out: Sequence[tuple[Preference, Pair]],
    report: PairReport,
) -> None:
    stage.count(samples=len(train) + len(held_out), tokens=sum(pair.tokens for _, pair in [*train, *held_out]))
    report = report.model_copy(update={"held_out": len(held_out)})
    settings: dict[str, Any] = {"vocab_size": context.vocabulary, "tokenizer": context.spec.tokenizer}
    write_pairs(folder, [pair for _, pair in train], report=report.model_dump(mode="json"), **settings)
    if held_out:
        write_pairs(folder / HELD_OUT, [pair for _, pair in held_out], **settings)
    splits = (("train", train), (HELD_OUT, held_out))
    write_json_lines(folder / READABLE_PAIRS, (readable_pair(one, name) for name, some in splits for one, _ in some))


def _report_pairs(context: CausalContext, pairs: Artifact) -> PairReport:
    report = PairReport.model_validate(dict(PairStore.open(pairs.folder).report))
    for name, value in report.model_dump().items():
        if isinstance(value, int | float):
            context.runner.report(f"preferences.{name}", float(value))
    share = report.chosen_longer_share
    longer = "" if share is None else f"; the longer answer won in {100 * share:.0f} % of pairs of unequal length"
    reasons = {
        "ties": report.ties,
        "identical answers": report.identical,
        "answers dropped by filters": report.filtered,
        "not judged": report.unjudged,
        "too long for a row": report.too_long,
    }
    lost = ", ".join(f"{name} {count}" for name, count in reasons.items() if count)
    context.run.progress.write(
        f"preferences: {report.pairs} pairs from {report.prompts} prompts{f' ({lost})' if lost else ''}, "
        f"{report.held_out} of them held out{longer}"
    )
    return report


def evaluate_preferences(context: CausalContext, pairs: Artifact, start: StartingStudent, student: Artifact) -> None:
    """Preference accuracy and margin of the trained policy on pairs that it was not trained on."""
    spec, preferences = context.spec, context.spec.preferences
    if not (pairs.folder / HELD_OUT).is_dir():
        context.run.note("no pairs are held out (preferences.held_out): the preference accuracy is not measured")
        return
    store = PairStore.open(pairs.folder / HELD_OUT)
    everything = list(store)

    def work(folder: Path, stage: Stage) -> None:
        logs = []
        for name, source in (("policy", student.folder), ("reference", start.source)):
            model = load_student(source).to(context.device)
            values = write_reference(
                folder / f"{name}.jsonl", name, model, store,
                batch_size=spec.training.batch_size, log_probabilities=TargetLogProbabilities(spec.chunk),
                precision=spec.training.precision, layout=PairLayout(preferences.shared_prompt),
                tick=context.runner.counter(stage),
            )  # fmt: skip
            logs.append(torch.from_numpy(values(everything)))
            del model
        tokens_P2 = torch.from_numpy(store.lengths[:, 1:].astype(np.float64))
        _, margins_P = preference_loss(preferences.loss, preferences.beta, logs[0], logs[1], tokens_P2)
        write_json(folder / ACCURACY, {"margins": margins_P.tolist()})

    inputs = preferences.model_dump(mode="json", include={"loss", "beta", "shared_prompt"})
    made = context.runner.make(
        "student-preferences", StageSpec("student.preferences-evaluate", "student", "evaluate"), work,
        kind="quality", inputs=inputs, parents=[student.bill, pairs.bill, start.bill], reuse=False,
    )  # fmt: skip
    margins = np.array(read_json(made.folder / ACCURACY)["margins"])
    right, count = int((margins > 0).sum()), len(margins)
    error = float(preferences.beta * margins.std(ddof=1) / count**0.5) if count > 1 else None
    context.run.result("student.preference_accuracy", Result(value=right / count, trials=count, successes=right))
    context.run.result(
        "student.preference_margin", Result(value=float(preferences.beta * margins.mean()), standard_error=error)
    )
    context.run.progress.write(
        f"preferences: the policy prefers the better answer in {right} of {count} held-out pairs; mean margin "
        f"{preferences.beta * margins.mean():.3f} (beta x nats)"
    )


# reference


def score_reference(context: CausalContext, pairs: Artifact, start: StartingStudent) -> Artifact:
    """The initial student's log-probabilities of both answers of every pair."""
    spec, store = context.spec, PairStore.open(pairs.folder)

    def begin(folder: Path, shard: Shard, others: Sequence[Path]) -> RemainingWork:
        model = cast_weights(load_student(start.source), weight_dtype(spec.training)).to(context.device)

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

    # bf16 weights round differently; fp32 is not named, so that caches of earlier versions keep their key
    halves = {"weights": "bf16"} if spec.training.weights == "bf16" else {}
    inputs = {**halves, "precision": spec.training.precision, "shared_prompt": spec.preferences.shared_prompt}
    parents, batch_size = [pairs.bill, start.bill], spec.training.batch_size
    return context.runner.make_sharded(
        ShardedWork(
            "reference", "reference-logs", REFERENCE_STAGE, inputs, parents, batch_size, store.__len__, begin, join
        )
    )


STAGE = StageSpec("data.synthetic", "data", "filter")
READABLE, READABLE_HELD_OUT = "kept.jsonl", "held_out.jsonl"
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
    held_out: int = 0
    """Of the kept ones."""
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
    """JSON lines with `messages`, or with `prompt` and `response`, for any tool. Returns the number of rows."""
    return write_json_lines(path, (training_row(one) for one in kept))


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Renamed when complete. Returns the number of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    count = 0
    with temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
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

    # on-policy compares the teacher's distributions at these completions, in its own tokens
    pair = tokenizer_pair(context) if spec.compares_distributions else None

    def work(folder: Path, stage: Stage) -> None:
        candidates = read_candidates(context, answers)
        judged = answer_scores(context, candidates, scores) if scores is not None else None
        prompts, completions = [one.prompt for one in candidates], [one.answers for one in candidates]
        kept, report = filter_answers(prompts, completions, filters, judged)
        require_kept(kept, report)
        not_trained = _held_out([one.prompt for one in kept], generation.held_out)
        tokens = 0
        for split, file, is_held_out in ((TRAIN, READABLE, False), (TEST, READABLE_HELD_OUT, True)):
            own = [one for one, other in zip(kept, not_trained, strict=True) if other == is_held_out]
            if own:
                write_training_rows(folder / file, own)
                documents = _encoded_documents(context.tokenizer, own, spec.data.max_tokens)
                if pair is not None:
                    theirs = _encoded_documents(pair.teacher, own, pair.teacher_positions)
                    documents, theirs = both_trained(documents, theirs)
                    write_documents(
                        folder / IN_TEACHERS_TOKENS / split, theirs, vocab_size=vocab_size_of(pair.teacher),
                        pad_id=pad_id_of(pair.teacher), tokenizer=spec.teacher.model,
                    )  # fmt: skip
                store = write_documents(
                    folder / split, documents,
                    vocab_size=context.vocabulary, pad_id=pad_id_of(context.tokenizer), tokenizer=spec.tokenizer,
                )  # fmt: skip
                tokens += store.tokens_total
        stage.count(samples=report.kept, tokens=tokens)
        write_json(folder / REPORT, report.model_copy(update={"held_out": sum(not_trained)}))

    inputs: dict[str, Any] = {
        **vars(filters),
        "max_tokens_of_document": spec.data.max_tokens,
        "judge": judge_inputs(context) if generation.min_score is not None else None,
        "tokenizer": context.tokenizer_identity,
        **({} if pair is None else {"teacher_tokenizer": teacher_tokenizer_identity(context)}),
        **({"held_out": generation.held_out} if generation.held_out else {}),  # artifacts of earlier versions have none
    }
    parents = [answers.bill, *([scores.bill] if scores else []), data.bill]
    made = context.runner.make("synthetic", STAGE, work, kind="synthetic-documents", inputs=inputs, parents=parents)
    _report_filtering(context, made, answers, scores)
    return made


def _encoded_documents(tokenizer: Any, kept: Iterable[KeptAnswer], max_tokens: int | None) -> Iterator[EncodedDocument]:
    """Only the answer is trained, with the token that ends it if it was finished."""
    for one in kept:
        answer = answer_ids(tokenizer, one.prompt, one.answer.text, one.answer.finish_reason == "stop")
        yield EncodedDocument.answered(encode_prompt(tokenizer, one.prompt), answer).cut(max_tokens)


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
    used = sum(len(context.documents(made, split)) for split in (TRAIN, TEST) if (made.folder / split).is_dir())
    if used < report.kept:
        context.run.note(
            f"synthetic: {report.kept - used:,} of {report.kept:,} kept answers are not trained on, because their "
            f"prompts leave no room for them in data.max_tokens={context.spec.data.max_tokens}"
        )
    dropped = {name: getattr(report, name) for name in REASONS}
    reasons = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in dropped.items() if count)
    suffix = f" ({reasons})" if reasons else ""
    held_out = f", {report.held_out} of them held out" if report.held_out else ""
    context.run.progress.write(f"synthetic: {report.kept} of {report.answers} answers kept{suffix}{held_out}")
