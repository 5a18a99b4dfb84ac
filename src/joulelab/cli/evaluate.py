"""`joulelab evaluate`: quality and energy of a language model on tasks and questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from joulelab.cli.options import (
    AsJson,
    DryRun,
    EstimateCpu,
    Flag,
    Require,
    RequireGrade,
    RunsDir,
    checked_spec,
    complete_models,
    read_names,
)


def evaluate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A folder (an artifact, a checkpoint in Hugging Face format), a hub id, a GGUF file or a sample.",
            autocompletion=complete_models,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Any setting of `joulelab explain --pipeline evaluate`."),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", metavar="NAME,...", help="Tasks of lm-evaluation-harness: gsm8k,mmlu,ifeval."),
    ] = None,
    task_folder: Annotated[
        str | None, typer.Option("--task-folder", metavar="DIR", help="Your own task files, in the harness's format.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="JSONL with prompt, answer and optional choices in each line."),
    ] = None,
    grader: Annotated[
        str | None,
        typer.Option("--grader", metavar="text|math-verify", help="How free answers are compared (default: text)."),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            "--judge",
            metavar="MODEL",
            help="Judge for answers to --data: compares with `reference` if given (AlpacaEval) or grades (MT-Bench).",
        ),
    ] = None,
    judge_server: Annotated[
        str | None, typer.Option("--judge-server", metavar="URL", help="OpenAI-compatible server that runs the judge.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", metavar="N", help="Maximum tokens per answer (default: 64).")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", help="Items per task (default: all).")] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Items per call in --tasks (default: 8).")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            metavar="NAME",
            help="fp32, bf16, fp16, int8, nf4, fp8, fp8-weights or int4 (default: bf16 on a GPU with tensor cores for "
            "it, else fp32).",
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template", metavar="auto|on|off", help="Format prompts with the model's chat template (auto)."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda (default: auto).")] = None,
    estimate_cpu: EstimateCpu = False,
    dry_run: DryRun = False,
    require: Require = None,
    require_grade: RequireGrade = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a language model and report quality and energy, one stage for each task.

    The result of every item is kept, so that `joulelab compare RUN RUN --quality exact_answers` makes paired tests.

    Examples:

      joulelab evaluate runs/kd-.../artifacts/final_model --data questions.jsonl

      joulelab evaluate sample:smollm2 --data sample:reviews --limit 100

      joulelab evaluate sample:smollm2 --data mt_bench.jsonl --judge my-org/judge --max-new-tokens 256

      joulelab evaluate my-org/model --tasks gsm8k,mmlu,ifeval --batch-size 32
    """
    from joulelab.cli.run import RunOptions, start_run
    from joulelab.runs.store import store_root

    start_run(evaluate_spec(context.params), RunOptions(store_root(runs_dir), as_json, dry_run))


FLAGS: Mapping[str, Flag] = {
    **{
        name: Flag(name)
        for name in (
            *("task_folder", "data", "grader", "judge", "judge_server", "max_new_tokens", "limit", "batch_size"),
            *("precision", "chat_template", "device"),
        )
    },
    "tasks": Flag("tasks", read_names),
    "require": Flag("energy.require"),
    "require_grade": Flag("energy.require_grade"),
    "estimate_cpu": Flag("energy.estimate_cpu", switch=True),
}


def evaluate_spec(params: Mapping[str, Any]) -> Any:
    """The checked settings of `joulelab evaluate`."""
    return checked_spec("evaluate", "evaluate", FLAGS, params, model=params["model"])
