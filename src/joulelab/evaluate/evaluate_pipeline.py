"""The pipeline `evaluate`: any language model on tasks and questions, a stage for each, items kept for paired tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from joulelab.data import sources
from joulelab.data.inputs import input_bill, keep_recorded_commits
from joulelab.evaluate.config import EvaluateSpec
from joulelab.evaluate.exact_answers import Question, grade_answers, graded_items, read_questions
from joulelab.evaluate.harness import TaskFigure, harness_figures, import_harness, require_tasks
from joulelab.evaluate.judged_answers import JUDGED, judged_answers, read_judged_prompts, report_judged
from joulelab.infer.recipes import cast_model
from joulelab.runs.context import RunContext, Stage
from joulelab.runs.paths import read_json, write_json
from joulelab.runs.record import Result
from joulelab.train.devices import resolve_device
from joulelab.zoo.pretrained import load_causal_lm, load_tokenizer

ANSWERS, HARNESS, QUALITY = "answers.json", "harness.json", "model-quality"
_ALL_QUESTIONS = 10**9


def evaluate_checks(spec: EvaluateSpec) -> Iterator[Callable[[], object]]:
    """What can be known of questions and tasks before the model is loaded."""
    if spec.judge:
        yield lambda: read_judged_prompts(Path(spec.data), spec.limit)
    elif spec.data and not spec.data.startswith(sources.SAMPLE_PREFIX):
        yield lambda: read_questions(spec.data, spec.limit or _ALL_QUESTIONS, chat=False)
    if spec.tasks:
        yield lambda: require_tasks(spec.tasks, _task_folder(spec))


def run_evaluate(run: RunContext) -> None:
    spec = cast(EvaluateSpec, run.spec)
    keep_recorded_commits(run)
    if spec.tasks:
        import_harness()  # outside the stages: its import is not billed
    bill = input_bill(run, "model", spec.model, "model", role=None)
    parents = [bill]
    if spec.data:
        parents.append(input_bill(run, "questions", spec.data, "text", role="data"))
    if spec.judge and not spec.judge_server:
        parents.append(input_bill(run, "judge", spec.judge, "model", role=None))
    tokenizer = load_tokenizer(spec.model)
    template = _template(spec, tokenizer)
    run.note(
        f"prompts are formatted with the model's chat template (SHA-256 {_digest(template)[:16]})"
        if template
        else "prompts are plain text, without a chat template"
    )
    if spec.precision == "auto":
        run.note(f"precision=auto: {spec.precision_here}")
    settings = spec.model_dump(mode="json", include=_OF_THE_RESULT) | {"chat_template": template and _digest(template)}
    settings["precision"] = spec.precision_here
    folder = _task_folder(spec)
    settings["task_files"] = None if folder is None else sources.content_hash(folder)

    def make(made: Path) -> None:
        device = resolve_device(spec.device, run)
        with run.stage("evaluate.load", role="setup", activity="load"):
            model = _load(spec, device)
        _evaluate(run, spec, model, tokenizer, bool(template), device, made)

    # The evaluation is what the run is about: it is measured in every run.
    quality = run.artifact(QUALITY, kind="quality", inputs=settings, parents=parents, make=make, reuse=False)
    _report(run, quality.folder)


def _load(spec: EvaluateSpec, device: torch.device) -> nn.Module:
    return cast_model(load_causal_lm(spec.model).to(device), spec.precision_here).eval()


_OF_THE_RESULT = {
    *("tasks", "limit", "max_new_tokens", "batch_size", "grader"),
    *("judge", "judge_server", "rubric"),
}


def _evaluate(
    run: RunContext, spec: EvaluateSpec, model: nn.Module, tokenizer: Any, chat: bool, device: torch.device, made: Path
) -> None:
    answers: dict[str, Any] = {"right": [], "chance": None}
    figures: list[TaskFigure] = []
    if spec.judge:
        write_json(made / JUDGED, judged_answers(run, spec, model, tokenizer, chat, device))
    elif spec.data:
        questions = [
            _as_chat(one) if chat else one for one in read_questions(spec.data, spec.limit or _ALL_QUESTIONS, chat)
        ]
        with run.stage("evaluate.data", len(questions), role="evaluation", activity="evaluate") as stage:
            answers = _graded(run, spec, model, tokenizer, questions, stage)
    for task in spec.tasks:
        with run.stage(f"evaluate.{task}", role="evaluation", activity="evaluate") as stage:
            found = harness_figures(
                model,
                tokenizer,
                [task],
                folder=_task_folder(spec),
                limit=spec.limit,
                batch_size=spec.batch_size,
                device=device,
                chat=chat,
            )
            stage.count(samples=max((figure.items for figure in found), default=0))
        figures += found
        run.stop.check()
    write_json(made / ANSWERS, answers)
    write_json(made / HARNESS, {"tasks": [vars(figure) for figure in figures]})


def _graded(
    run: RunContext, spec: EvaluateSpec, model: nn.Module, tokenizer: Any, questions: Sequence[Question], stage: Stage
) -> dict[str, Any]:
    def count(samples: int, tokens: int) -> None:
        stage.count(samples=samples, tokens=tokens)
        run.progress.advance(samples)
        run.stop.check()

    graded = grade_answers(
        model, tokenizer, questions,
        batch_size=spec.batch_size, max_new_tokens=spec.max_new_tokens, tick=count, grader=spec.grader,
    )  # fmt: skip
    return graded_items(questions, graded)


def _report(run: RunContext, folder: Path) -> None:
    right = read_json(folder / ANSWERS)["right"]
    if right:
        result = Result(value=sum(right) / len(right), trials=len(right), successes=sum(right))
        run.result("model.exact_answers", result)
    if (folder / JUDGED).exists():
        report_judged(run, read_json(folder / JUDGED))
    for fields in read_json(folder / HARNESS)["tasks"]:
        figure = TaskFigure(**fields)
        run.result(f"model.harness.{figure.task}.{figure.metric}.value", figure.result())


def _as_chat(question: Question) -> Question:
    if not isinstance(question.prompt, str):
        return question
    return replace(question, prompt=[{"role": "user", "content": question.prompt}])


def _template(spec: EvaluateSpec, tokenizer: Any) -> str | None:
    from joulelab.errors import ConfigError

    template = getattr(tokenizer, "chat_template", None)
    if spec.chat_template == "on" and not template:
        raise ConfigError(f"{spec.model} has no chat template", "set chat_template=off, or name an instruction model")
    return str(template) if template and spec.chat_template != "off" else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _task_folder(spec: EvaluateSpec) -> Path | None:
    return Path(spec.task_folder) if spec.task_folder else None
