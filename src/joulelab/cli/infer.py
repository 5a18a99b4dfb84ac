"""`joulelab infer`: what a model costs when it is used, in milliseconds and joules per inference."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from joulelab.cli.options import AsJson, Require, RequireGrade, RunsDir
from joulelab.errors import UsageError


def _list(metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, show_default=False)


def infer(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="deit-t, deit-s, deit-b, bert-b, bert-l, a model of `joulelab zoo`, a sample, a folder or a hub id."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Any setting of `joulelab explain --pipeline infer`."),
    ] = None,
    batch_size: Annotated[
        str | None, _list("N,...", "Items in a call, by commas (default: 1).", "--batch-size", "--batch_size")
    ] = None,
    seq_length: Annotated[
        str | None,
        _list(
            "N,...",
            "Tokens of a sequence, by commas (default: 128); not with --generate.",
            "--seq-length",
            "--seq_length",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        _list(
            "NAME,...",
            "fp32, tf32, autocast-bf16, autocast-fp16 (weights cast in every call), bf16, fp16 (weights cast once); "
            "default: fp32.",
            "--dtype",
        ),
    ] = None,
    mode: Annotated[
        str | None,
        _list(
            "NAME,...",
            "eager, compiled, cuda-graph, reduce-overhead, fastest (tries several recipes); default: eager, and with "
            "--generate on a GPU cuda-graph.",
            "--mode",
        ),
    ] = None,
    norm: Annotated[
        str | None,
        _list(
            "NAME,...",
            "For deit-* and bert-*: pre-ln, pre-rms, pre-crms, post-ln, none, in turns (default: as published).",
            "--norm",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", metavar="N", help="CPU threads (default: OMP_NUM_THREADS where set, else all usable)."
        ),
    ] = None,
    min_run_time: Annotated[
        float | None, typer.Option("--min-run-time", metavar="S", help="Seconds for each row at least (default: 5).")
    ] = None,
    target_ci: Annotated[
        str | None,
        typer.Option("--target-ci", metavar="PERCENT", help="Go on until the energy's interval is this tight: 2%."),
    ] = None,
    max_time: Annotated[
        float | None,
        typer.Option("--max-time", metavar="S", help="With --target-ci: limit of a row (default: 60, or the minimum)."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="NAME", help="`published`, a folder or a hub id (default: from the seed)."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            "--size", metavar="SIZE", help="Of a model of `joulelab zoo`; all others have one size and refuse it."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="NAME", help="auto, cpu or cuda.")] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Generate text: prefill and decode apart, joules per token and response.")
    ] = False,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", metavar="N", help="With --generate (default: 256).")
    ] = None,
    new_tokens: Annotated[
        int | None, typer.Option("--new-tokens", metavar="N", help="With --generate (default: 128).")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            metavar="RUN",
            help="Measure nothing: set the inference run MODEL (the student's) beside this one (its teacher's).",
        ),
    ] = None,
    distilled_by: Annotated[
        str | None,
        typer.Option("--distilled-by", metavar="RUN", help="With --against: the run that made the student."),
    ] = None,
    from_log: Annotated[
        Path | None,
        typer.Option(
            "--from-log",
            metavar="FILE",
            help="Measure nothing: joules per inference out of a power log or a run's folder.",
        ),
    ] = None,
    latency_ms: Annotated[
        float | None, typer.Option("--latency-ms", metavar="L", help="With --from-log: milliseconds per inference.")
    ] = None,
    idle_from: Annotated[
        str | None,
        typer.Option(
            "--idle-from",
            metavar="WHAT",
            help="With --from-log: the idle stretch FROM..TO of the log, another log, or watts as 61W "
            "(default: found in the log).",
        ),
    ] = None,
    time_zone: Annotated[
        str | None, typer.Option("--time-zone", metavar="ZONE", help="With --from-log: of stamps without an offset.")
    ] = None,
    period: Annotated[
        float | None, typer.Option("--period", metavar="S", help="With --from-log: seconds between unstamped readings.")
    ] = None,
    estimate_cpu: Annotated[
        bool, typer.Option("--estimate-cpu", help="Estimate CPU energy from CPU time, labelled as an estimate.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print the settings; run nothing.")] = False,
    require: Require = None,
    require_grade: RequireGrade = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Profile inference: latency (median, IQR), inferences per second, watts, and millijoules per inference with
    intervals, gross and above idle. Latency and power come from the same windows; idle is measured before and after.

    Examples:

      joulelab infer deit-t --min-run-time 5

      joulelab infer deit-b --batch-size 1,8,32 --dtype bf16 --mode eager,fastest --target-ci 2%

      joulelab infer deit-b --norm pre-ln,pre-rms,pre-crms,none

      joulelab infer bert-l --seq-length 128,384 --dtype autocast-bf16

      joulelab infer smollm2 --generate --prompt-tokens 256 --new-tokens 128 --batch-size 1,8

      joulelab infer --from-log power.csv --latency-ms 4.37

      joulelab infer STUDENT_RUN --against TEACHER_RUN --distilled-by DISTILLATION_RUN
    """
    if from_log is not None:
        from joulelab.cli.infer_log import infer_from_log

        _only_with("--from-log", context, {"from_log", "latency_ms", "idle_from", "time_zone", "period", "as_json"})
        infer_from_log(from_log, latency_ms, idle_from, time_zone, period, as_json)
        return
    for name in ("latency_ms", "idle_from", "time_zone", "period"):
        if context.params[name] is not None:
            raise UsageError(f"{_flag(name)} says something about a log", "name it with --from-log FILE")
    if against:
        from joulelab.cli.infer_pair import infer_pair

        _only_with("--against", context, {"model", "against", "distilled_by", "runs_dir", "as_json"})
        infer_pair(model, against, distilled_by, runs_dir, as_json)
        return
    if distilled_by is not None:
        raise UsageError("--distilled-by belongs to a comparison", "name the teacher's run with --against RUN")
    from joulelab.cli.infer_flags import checked_settings
    from joulelab.cli.run import start_run
    from joulelab.runs.store import store_root

    spec, store = checked_settings(context.params), store_root(runs_dir)
    if not as_json or dry_run:
        start_run(store, spec, dry_run, as_json=as_json)
        return
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            start_run(store, spec, as_json=True)
    finally:
        _print_with_rows(printed.getvalue())


def _print_with_rows(text: str) -> None:
    """The record, and beside it the table's rows, whose net joules could only be told at the end."""
    if not text:
        return
    import json

    from joulelab.report.inference_table import rows_data
    from joulelab.runs.record import RunRecord

    record = json.loads(text)
    print(json.dumps({**record, "inference": rows_data(RunRecord.model_validate(record))}, indent=2))


def _only_with(option: str, context: typer.Context, allowed: set[str]) -> None:
    """A flag that would do nothing beside this option is refused."""
    for name, value in context.params.items():
        if name not in allowed and value not in (None, (), []) and value is not False:
            raise UsageError(f"{_flag(name)} does nothing beside {option}", "leave it out")


def _flag(name: str) -> str:
    return {"overrides": "a setting", "model": "a model", "as_json": "--json"}.get(name, "--" + name.replace("_", "-"))
