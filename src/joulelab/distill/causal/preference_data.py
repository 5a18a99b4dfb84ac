"""Stage teacher.judge: scores of answers, by likelihood, by a rubric or by a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from joulelab.distill.causal.context import CausalContext
from joulelab.distill.causal.students import StudentSetup, TrainingData, load_student
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
    PairBatches,
    PairLayout,
    PairReport,
    PairStore,
    Score,
    choose_pairs,
    encode_pairs,
    write_pairs,
)
from joulelab.distill.preferences.preference_loss import PreferenceObjective, TargetLogProbabilities, disable_dropout
from joulelab.distill.preferences.reference import ReferenceLogProbabilities, write_reference
from joulelab.distill.runner import RemainingWork, ShardedWork, StageSpec, progress_counter
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import Stage
from joulelab.runs.record import Result
from joulelab.runs.sharding import ALL, Shard
from joulelab.runs.storage import read_json

JUDGE_STAGE, SCORES = StageSpec("teacher.judge", "teacher", "judge"), "scores.jsonl"
GRADE = GenerationSettings(max_new_tokens=8)


def judge_answers(bench: CausalContext, answers: Artifact, voice: TeacherSource) -> Artifact:
    """Scores of all answers, or of a share's; judging that was cut off goes on where it stopped."""
    return bench.runner.make_sharded(_JudgingWork(bench, answers).work(voice))


def answer_scores(bench: CausalContext, asked: list[Candidates], made: Artifact) -> list[list[Score]]:
    """What the artefact says about these candidates."""
    found, identity = read_scores(made.folder / SCORES), _judge_identity(bench)
    return [found[score_key(identity, one)] for one in asked]


@dataclass(frozen=True)
class _JudgingWork:
    """The work of the judge, in whatever shares it is done; candidates are looked up only where there is some."""

    bench: CausalContext
    answers: Artifact

    @cached_property
    def batches(self) -> list[list[Candidates]]:
        return candidate_batches(self.bench, self.answers)

    @cached_property
    def asked(self) -> list[Candidates]:
        return [one for batch in self.batches for one in batch]

    @cached_property
    def keys(self) -> list[str]:
        identity = _judge_identity(self.bench)
        return [score_key(identity, one) for one in self.asked]

    def work(self, voice: TeacherSource) -> ShardedWork:
        parents, size = [self.answers.bill, voice.bill], self.bench.spec.teacher.batch_size
        return ShardedWork(
            "scores", "scores", JUDGE_STAGE, judge_inputs(self.bench), parents, size,
            total=lambda: len(self.asked), begin=self._begin, join=self._join,
        )  # fmt: skip

    def _begin(self, place: Path, share: Shard, others: Sequence[Path]) -> RemainingWork:
        own, there = read_scores(place / _scores_log(share)), read_scores(*_scores_logs([place, *others]))
        if all(key in there for key in self.keys):
            return RemainingWork(None, {"samples": len(own)} if own else {})
        judge = _make_judge(self.bench, self.asked, self.answers)
        return RemainingWork(lambda stage: self._ask(place, share, others, judge, stage), {})

    def _ask(self, place: Path, share: Shard, others: Sequence[Path], judge: Judge, stage: Stage) -> None:
        run, ranks = self.bench.run, self.bench.ranks

        def tick(prompts: int) -> None:
            stage.count(samples=prompts)
            run.progress.advance(prompts)
            run.stop.check()

        own, size = place / _scores_log(share), self.bench.spec.teacher.batch_size
        told = [path for path in _scores_logs([place, *others]) if path != own]
        # the candidates are this share's already; its ranks divide them
        units = ALL.among(ranks.rank, ranks.world).units([str(batch[0].prompt) for batch in self.batches])
        write_judgments(
            own, judge, [one for at in units for one in self.batches[at]], tick, batch_size=size, others=told
        )

    def _join(self, sources: Sequence[Path], folder: Path) -> None:
        write_scores(folder / SCORES, self.keys, read_scores(*_scores_logs(sources)))


def _scores_log(share: Shard) -> str:
    return f"scores-{share.name}.jsonl"


def _scores_logs(folders: Sequence[Path]) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.glob("scores*.jsonl"))]


def judge_inputs(bench: CausalContext) -> dict[str, Any]:
    """What makes the scores other ones."""
    preferences = bench.spec.preferences
    own = {"likelihood": set(), "rubric": {"rubric"}, "rule": {"rule"}}[preferences.judge]
    asked: dict[str, Any] = preferences.model_dump(mode="json", include={"judge", *own})
    return {**asked, "teacher": None if preferences.judge == "rule" else bench.teacher_identity}


def _judge_identity(bench: CausalContext) -> str:
    """Of the judge, which need not be loaded for it."""
    preferences = bench.spec.preferences
    if preferences.judge == "rule":
        return rule_identity(preferences.rule)
    if preferences.judge == "likelihood":
        return likelihood_identity(bench.teacher_identity)
    return rubric_identity(bench.teacher_identity, GRADE, preferences.rubric, chat=_has_chat_template(bench))


def _has_chat_template(bench: CausalContext) -> bool:
    return bool(getattr(bench.tokenizer, "chat_template", None))


def _make_judge(bench: CausalContext, asked: Sequence[Candidates], answers: Artifact) -> Judge:
    """The teacher judges, whoever has written the answers."""
    preferences, size = bench.spec.preferences, bench.spec.teacher.batch_size
    if preferences.judge == "rule":
        return RuleJudge(preferences.rule)
    if preferences.judge == "rubric":
        grading = TransformersGenerator(
            bench.load_teacher(), bench.tokenizer, GRADE, identity=bench.teacher_identity, batch_size=size
        )
        return RubricJudge(grading, preferences.rubric, chat=_has_chat_template(bench))
    written_by = str(read_json(answers.folder / REPORT)["generator"])
    told = all(answer.log_probability_sum is not None for one in asked for answer in one.answers)
    # a teacher that has told how likely its own answers were is not asked again, and need not be loaded
    model = nn.Identity() if told and written_by == bench.teacher_identity else bench.load_teacher()
    return LikelihoodJudge(
        model, bench.tokenizer, identity=bench.teacher_identity, batch_size=size, written_by=written_by
    )


# Pairs of answers, what the starting student thinks of them, and learning to prefer: the second half of dpo.


REFERENCE_STAGE = StageSpec("student.reference", "student", "score")
LOGS = "reference.jsonl"


def make_pairs(bench: CausalContext, answers: Artifact, voice: TeacherSource) -> Artifact:
    spec, judged = bench.spec, judge_answers(bench, answers, voice)

    def make(folder: Path) -> None:
        with bench.run.stage("data.preferences", role="data", activity="filter") as stage:
            asked = read_candidates(bench, answers)
            found = answer_scores(bench, asked, judged)
            preferred, report = choose_pairs(asked, found, spec.preferences.tie_margin)
            kept, report = encode_pairs(bench.tokenizer, preferred, report, spec.data.row_length)
            stage.count(samples=len(kept), tokens=sum(pair.tokens for pair in kept))
            write_pairs(
                folder, kept, vocab_size=bench.words, tokenizer=spec.tokenizer, report=report.model_dump(mode="json")
            )

    inputs = {
        **judge_inputs(bench),
        "tie_margin": spec.preferences.tie_margin,
        "row_length": spec.data.row_length,
        "tokenizer": bench.tokenizer_identity,
    }
    parents = [answers.bill, judged.bill]
    made = bench.run.artifact("preferences", kind="preference-pairs", inputs=inputs, parents=parents, make=make)
    _report_pairs(bench, made, answers, judged)
    return made


def score_reference(bench: CausalContext, pairs: Artifact, start: Artifact) -> Artifact:
    """What the student says about both answers of every pair before it learns from them; the pass is billed."""
    spec, store = bench.spec, PairStore.open(pairs.folder)

    def begin(place: Path, share: Shard, others: Sequence[Path]) -> RemainingWork:
        model = load_student(start.folder).to(bench.device)

        def ask(stage: Stage) -> None:
            write_reference(
                place / f"{share.name}.jsonl", start.key, model, store,
                batch_size=spec.training.batch_size, log_probabilities=TargetLogProbabilities(spec.chunk),
                precision=spec.training.precision, layout=PairLayout(spec.preferences.shared_prompt),
                tick=progress_counter(bench.run, stage), shard=share,
            )  # fmt: skip

        return RemainingWork(ask, {})

    def join(sources: Sequence[Path], folder: Path) -> None:
        logs = [path for source in sources for path in sorted(source.glob("*.jsonl"))]
        (folder / LOGS).write_text("".join(path.read_text(encoding="utf-8") for path in logs), encoding="utf-8")

    inputs = {"precision": spec.training.precision, "shared_prompt": spec.preferences.shared_prompt}
    parents, size = [pairs.bill, start.bill], spec.training.batch_size
    work = ShardedWork(
        "reference", "reference-logs", REFERENCE_STAGE, inputs, parents, size, store.__len__, begin, join
    )
    return bench.runner.make_sharded(work)


def preference_training(
    bench: CausalContext, pairs: Artifact, reference: Artifact, start: Artifact
) -> Callable[[StudentSetup], TrainingData]:
    preferences = bench.spec.preferences

    def lesson(desk: StudentSetup) -> TrainingData:
        logs = ReferenceLogProbabilities.open(reference.folder / LOGS, start.key)
        layout = PairLayout(preferences.shared_prompt)
        batches = PairBatches(PairStore.open(pairs.folder), desk.config.batch_size, bench.spec.seed, logs, layout)
        how = TargetLogProbabilities(bench.spec.chunk, compile_mode=desk.config.compile)
        student = disable_dropout(desk.model)
        objective = PreferenceObjective(student, preferences.loss, preferences.beta, how)
        return TrainingData(batches, objective, preferences.loss_name)

    return lesson


def _report_pairs(bench: CausalContext, pairs: Artifact, answers: Artifact, judged: Artifact) -> None:
    report = PairReport.model_validate(dict(PairStore.open(pairs.folder).report))
    for name, value in report.model_dump().items():
        if isinstance(value, int | float):
            bench.run.result(f"preferences.{name}", Result(value=float(value)))
    if energy_gap(answers) is None:
        paid = [answers.bill, judged.bill, pairs.bill]
        bench.run.joules_result("preferences.energy_j", paid)
        bench.run.joules_result("preferences.j_per_pair", paid, report.pairs)
    share = report.chosen_longer_share
    longer = "" if share is None else f"; of unequal answers the longer one won {100 * share:.0f} %"
    bench.run.progress.say(f"preferences: {report.pairs} pairs of {report.prompts} prompts, {report.ties} ties{longer}")
