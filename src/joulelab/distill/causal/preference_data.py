"""From answers to preference training: scores of the answers, pairs, and the reference's log-probabilities.

Stages: teacher.judge, data.preferences, student.reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from joulelab.distill.causal.context import CausalContext
from joulelab.distill.causal.models import load_student
from joulelab.distill.causal.teacher import REPORT, TeacherSource, candidate_batches, energy_gap, read_candidates
from joulelab.distill.preferences.judges import (
    Judge,
    LikelihoodJudge,
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
from joulelab.distill.preferences.preference_loss import TargetLogProbabilities
from joulelab.distill.preferences.reference import write_reference
from joulelab.distill.runner import RemainingWork, ShardedWork, StageSpec
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import Stage
from joulelab.runs.sharding import ALL, Shard
from joulelab.runs.storage import read_json

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
    own = {"likelihood": set(), "rubric": {"rubric"}, "rule": {"rule"}}[preferences.judge]
    settings: dict[str, Any] = preferences.model_dump(mode="json", include={"judge", *own})
    return {**settings, "teacher": None if preferences.judge == "rule" else context.teacher_identity}


def _judge_identity(context: CausalContext) -> str:
    """Identity of the judge, known without loading its model."""
    preferences = context.spec.preferences
    if preferences.judge == "rule":
        return rule_identity(preferences.rule)
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
    context.run.progress.say(
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
