"""The pipeline `evaluate`: any language model on tasks and questions, a stage for each, items kept for paired tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from joulelab.data import sources
from joulelab.data.inputs import input_bill, keep_recorded_commits
from joulelab.errors import ConfigError
from joulelab.evaluate.config import EvaluateSpec, require_model
from joulelab.evaluate.exact_answers import Question, grade_answers, graded_items, read_questions
from joulelab.evaluate.harness import TaskFigure, harness_figures, import_harness, require_tasks
from joulelab.evaluate.judged_answers import (
    JUDGED,
    judge_endpoint,
    judged_answers,
    next_prompt,
    read_judged_prompts,
    report_judged,
)
from joulelab.infer.config import max_positions, model_folder
from joulelab.infer.generation.completions import Prompt, encode_prompts
from joulelab.infer.generation.engine import require_positions
from joulelab.infer.recipes import cast_model
from joulelab.runs.context import RunContext, Stage
from joulelab.runs.paths import read_json, write_json
from joulelab.runs.record import Result
from joulelab.train.devices import resolve_device
from joulelab.zoo.pretrained import import_transformers, load_causal_lm, load_pretrained, load_tokenizer

ANSWERS, HARNESS, QUALITY = "answers.json", "harness.json", "model-quality"


def evaluate_checks(spec: EvaluateSpec) -> Iterator[Callable[[], object]]:
    """What can be known of models, questions and tasks before a model is loaded. A check that needs what another one
    refuses raises the same error, which is reported once."""
    for model in spec.local_models:
        yield partial(_checked_tokenizer, model)
    yield lambda: _template(spec, _checked_tokenizer(spec.model))
    if spec.data:
        yield partial(_check_prompts, spec)
    if spec.judge_server:
        yield judge_endpoint(spec).require_reachable
    if spec.tasks:
        yield lambda: require_tasks(spec.tasks, _task_folder(spec))


def _checked_tokenizer(model: str) -> Any:
    require_model(model)
    folder = model_folder(model)
    for file in sorted(folder.glob("model*.safetensors")) if folder else ():
        _require_whole(file)
    if folder:
        load_pretrained(import_transformers().AutoConfig, model)  # refuses an architecture that it does not know
    return load_tokenizer(model)


def _require_whole(file: Path) -> None:
    """Compare the header with the size of the file, without reading the weights."""
    try:
        with safe_open(file, "pt"):
            return
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is corrupted: {error}", "fetch or copy the model again") from error


def _check_prompts(spec: EvaluateSpec) -> None:
    """Whether the file can be read, and its prompts fit into the model with their answers."""
    spec.require_files()
    prompts = _prompts_to_answer(spec, chat=False)
    if not prompts:
        return
    tokenizer = _checked_tokenizer(spec.model)
    if _template(spec, tokenizer):
        prompts = _prompts_to_answer(spec, chat=True)
    longest = max(map(len, encode_prompts(tokenizer, prompts)))
    limit = SimpleNamespace(max_position_embeddings=max_positions(spec.model))
    require_positions(limit, longest, spec.max_new_tokens)


def _prompts_to_answer(spec: EvaluateSpec, chat: bool) -> list[Prompt]:
    """Prompts of `data` to which the model writes an answer; of conversations the first turns, because later prompts
    contain answers."""
    if spec.judge:
        return [next_prompt(one, (), chat) for one in read_judged_prompts(Path(spec.data), spec.limit)]
    return [one.prompt for one in _questions(spec, chat) if not one.choices]


def _questions(spec: EvaluateSpec, chat: bool) -> list[Question]:
    found = read_questions(spec.data, spec.limit, chat)
    return [_as_chat(one) for one in found] if chat else found


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
        questions = _questions(spec, chat)
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
        max_new_tokens=spec.max_new_tokens, tick=count, grader=spec.grader,
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
    template = getattr(tokenizer, "chat_template", None)
    if spec.chat_template == "on" and not template:
        raise ConfigError(f"{spec.model} has no chat template", "set chat_template=off, or name an instruction model")
    return str(template) if template and spec.chat_template != "off" else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _task_folder(spec: EvaluateSpec) -> Path | None:
    return Path(spec.task_folder) if spec.task_folder else None
