"""Stage teacher.judge: scores of answers, by likelihood, by a rubric or by a rule."""

from __future__ import annotations

from typing import Any

from torch import nn

from joulelab.distill.causal.bench import Bench
from joulelab.distill.preferences.candidates import Candidates, Judge, Score
from joulelab.distill.preferences.judges import LikelihoodJudge, RuleJudge
from joulelab.distill.preferences.rubric import RubricJudge
from joulelab.distill.preferences.score_log import judge_into
from joulelab.infer.generation.settings import GenerationSettings
from joulelab.infer.generation.transformers_generator import TransformersGenerator
from joulelab.runs.artifacts import Artifact
from joulelab.runs.json_file import read_json

STAGE = "teacher.judge"
GRADE = GenerationSettings(max_new_tokens=8)


def scores(bench: Bench, asked: list[Candidates], answers: Artifact) -> list[list[Score]]:
    """Judging that was cut off goes on where it stopped."""
    bench.require_alone(STAGE)
    work = bench.kept_work(STAGE)
    judge = _judge(bench, asked, answers)
    with bench.run.stage(STAGE, total=len(asked)) as stage:

        def tick(prompts: int) -> None:
            stage.count(samples=prompts)
            bench.run.progress.advance(prompts)
            bench.run.stop.check()

        return judge_into(work / "scores.jsonl", judge, asked, tick)


def inputs(bench: Bench) -> dict[str, Any]:
    """What makes the scores other ones."""
    preferences = bench.spec.preferences
    own = {"likelihood": set(), "rubric": {"rubric"}, "rule": {"rule"}}[preferences.judge]
    asked: dict[str, Any] = preferences.model_dump(mode="json", include={"judge", *own})
    return {**asked, "teacher": None if preferences.judge == "rule" else bench.teacher_identity}


def _judge(bench: Bench, asked: list[Candidates], answers: Artifact) -> Judge:
    """The teacher judges, whoever has written the answers."""
    preferences, size = bench.spec.preferences, bench.spec.teacher.batch_size
    if preferences.judge == "rule":
        return RuleJudge(preferences.rule)
    if preferences.judge == "rubric":
        grading = TransformersGenerator(
            bench.load_teacher(), bench.tokenizer, GRADE, identity=bench.teacher_identity, batch_size=size
        )
        return RubricJudge(grading, preferences.rubric, chat=bool(getattr(bench.tokenizer, "chat_template", None)))
    written_by = str(read_json(answers.folder / "report.json")["generator"])
    told = all(answer.log_probability_sum is not None for one in asked for answer in one.answers)
    # a teacher that has told how likely its own answers were is not asked again, and need not be loaded
    model = nn.Identity() if told and written_by == bench.teacher_identity else bench.load_teacher()
    return LikelihoodJudge(
        model, bench.tokenizer, identity=bench.teacher_identity, batch_size=size, written_by=written_by
    )
