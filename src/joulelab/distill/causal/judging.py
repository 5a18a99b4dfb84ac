"""Stage teacher.judge: scores of answers, by likelihood, by a rubric or by a rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from joulelab.distill.causal.answers import REPORT, candidate_batches
from joulelab.distill.causal.bench import Bench
from joulelab.distill.causal.distributions import Voice
from joulelab.distill.causal.split_work import worked
from joulelab.distill.preferences.candidates import Candidates, Judge, Score
from joulelab.distill.preferences.judges import LikelihoodJudge, RuleJudge, likelihood_identity, rule_identity
from joulelab.distill.preferences.rubric import RubricJudge, rubric_identity
from joulelab.distill.preferences.score_log import judge_into, read_scores, score_key, write_scores
from joulelab.distill.runner import RemainingWork, ShardedWork, StageSpec
from joulelab.infer.generation.engine import TransformersGenerator
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import Stage
from joulelab.runs.sharding import ALL, Shard
from joulelab.runs.storage import read_json

STAGE, SCORES = StageSpec("teacher.judge", "teacher", "judge"), "scores.jsonl"
GRADE = GenerationSettings(max_new_tokens=8)


def judged(bench: Bench, answers: Artifact, voice: Voice) -> Artifact:
    """Scores of all answers, or of a share's; judging that was cut off goes on where it stopped."""
    return worked(bench, _Judging(bench, answers).work(voice))


def scores(bench: Bench, asked: list[Candidates], made: Artifact) -> list[list[Score]]:
    """What the artefact says about these candidates."""
    found, identity = read_scores(made.folder / SCORES), _identity(bench)
    return [found[score_key(identity, one)] for one in asked]


@dataclass(frozen=True)
class _Judging:
    """The work of the judge, in whatever shares it is done; candidates are looked up only where there is some."""

    bench: Bench
    answers: Artifact

    @cached_property
    def batches(self) -> list[list[Candidates]]:
        return candidate_batches(self.bench, self.answers)

    @cached_property
    def asked(self) -> list[Candidates]:
        return [one for batch in self.batches for one in batch]

    @cached_property
    def keys(self) -> list[str]:
        identity = _identity(self.bench)
        return [score_key(identity, one) for one in self.asked]

    def work(self, voice: Voice) -> ShardedWork:
        parents, size = [self.answers.bill, voice.bill], self.bench.spec.teacher.batch_size
        return ShardedWork(
            "scores", "scores", STAGE, inputs(self.bench), parents, size,
            total=lambda: len(self.asked), begin=self._begin, join=self._join,
        )  # fmt: skip

    def _begin(self, place: Path, share: Shard, others: Sequence[Path]) -> RemainingWork:
        own, there = read_scores(place / _log(share)), read_scores(*_logs([place, *others]))
        if all(key in there for key in self.keys):
            return RemainingWork(None, {"samples": len(own)} if own else {})
        judge = _judge(self.bench, self.asked, self.answers)
        return RemainingWork(lambda stage: self._ask(place, share, others, judge, stage), {})

    def _ask(self, place: Path, share: Shard, others: Sequence[Path], judge: Judge, stage: Stage) -> None:
        run, ranks = self.bench.run, self.bench.ranks

        def tick(prompts: int) -> None:
            stage.count(samples=prompts)
            run.progress.advance(prompts)
            run.stop.check()

        own, size = place / _log(share), self.bench.spec.teacher.batch_size
        told = [path for path in _logs([place, *others]) if path != own]
        # the candidates are this share's already; its ranks divide them
        units = ALL.among(ranks.rank, ranks.world).units([str(batch[0].prompt) for batch in self.batches])
        judge_into(own, judge, [one for at in units for one in self.batches[at]], tick, at_once=size, others=told)

    def _join(self, sources: Sequence[Path], folder: Path) -> None:
        write_scores(folder / SCORES, self.keys, read_scores(*_logs(sources)))


def _log(share: Shard) -> str:
    return f"scores-{share.name}.jsonl"


def _logs(folders: Sequence[Path]) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.glob("scores*.jsonl"))]


def inputs(bench: Bench) -> dict[str, Any]:
    """What makes the scores other ones."""
    preferences = bench.spec.preferences
    own = {"likelihood": set(), "rubric": {"rubric"}, "rule": {"rule"}}[preferences.judge]
    asked: dict[str, Any] = preferences.model_dump(mode="json", include={"judge", *own})
    return {**asked, "teacher": None if preferences.judge == "rule" else bench.teacher_identity}


def _identity(bench: Bench) -> str:
    """Of the judge, which need not be loaded for it."""
    preferences = bench.spec.preferences
    if preferences.judge == "rule":
        return rule_identity(preferences.rule)
    if preferences.judge == "likelihood":
        return likelihood_identity(bench.teacher_identity)
    return rubric_identity(bench.teacher_identity, GRADE, preferences.rubric, chat=_chats(bench))


def _chats(bench: Bench) -> bool:
    return bool(getattr(bench.tokenizer, "chat_template", None))


def _judge(bench: Bench, asked: Sequence[Candidates], answers: Artifact) -> Judge:
    """The teacher judges, whoever has written the answers."""
    preferences, size = bench.spec.preferences, bench.spec.teacher.batch_size
    if preferences.judge == "rule":
        return RuleJudge(preferences.rule)
    if preferences.judge == "rubric":
        grading = TransformersGenerator(
            bench.load_teacher(), bench.tokenizer, GRADE, identity=bench.teacher_identity, batch_size=size
        )
        return RubricJudge(grading, preferences.rubric, chat=_chats(bench))
    written_by = str(read_json(answers.folder / REPORT)["generator"])
    told = all(answer.log_probability_sum is not None for one in asked for answer in one.answers)
    # a teacher that has told how likely its own answers were is not asked again, and need not be loaded
    model = nn.Identity() if told and written_by == bench.teacher_identity else bench.load_teacher()
    return LikelihoodJudge(
        model, bench.tokenizer, identity=bench.teacher_identity, batch_size=size, written_by=written_by
    )
