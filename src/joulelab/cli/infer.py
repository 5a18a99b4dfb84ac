"""`joulelab infer`: latency and energy per inference.

Three ways: profile a model, compute energy per inference from a power log (`--from-log`), or compare the inference
runs of a student and its teacher (`--against`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.cli.options import (
    AsJson,
    DryRun,
    EstimateCpu,
    Flag,
    Require,
    RequireGrade,
    RunsDir,
    complete_models,
    read_names,
    settings_for,
)
from joulelab.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from joulelab.meter.importers.log_energy import DeviceFigures, IdleGiven
    from joulelab.meter.importers.power_log import PowerLog, TimeRule
    from joulelab.runs.record import RunRecord
    from joulelab.runs.spec import RunSpec


def _option(metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, show_default=False)


def infer(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="deit-t, deit-s, deit-b, bert-b, bert-l, a zoo model, a sample, a folder or a hub id.",
            autocompletion=complete_models,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Any setting of `joulelab explain --pipeline infer`."),
    ] = None,
    batch_size: Annotated[
        str | None, _option("N,...", "Batch sizes, comma-separated (default: 1).", "--batch-size", "--batch_size")
    ] = None,
    seq_length: Annotated[
        str | None,
        _option(
            "N,...",
            "Sequence lengths in tokens (default: 128); not with --generate.",
            "--seq-length",
            "--seq_length",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        _option(
            "NAME,...",
            "fp32, tf32, autocast-bf16, autocast-fp16 (weights cast on every call), bf16, fp16 (weights cast once); "
            "default: fp32.",
            "--dtype",
        ),
    ] = None,
    mode: Annotated[
        str | None,
        _option(
            "NAME,...",
            "eager, compiled, cuda-graph, reduce-overhead, fastest (tries several recipes); default: eager, or "
            "cuda-graph with --generate on a GPU.",
            "--mode",
        ),
    ] = None,
    norm: Annotated[
        str | None,
        _option(
            "NAME,...",
            "Normalization of deit-* and bert-*, interleaved: pre-ln, pre-rms, pre-crms, post-ln, none "
            "(default: as published).",
            "--norm",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", metavar="N", help="CPU threads (default: OMP_NUM_THREADS if set, else all available)."
        ),
    ] = None,
    min_run_time: Annotated[
        float | None, typer.Option("--min-run-time", metavar="S", help="Minimum seconds per row (default: 5).")
    ] = None,
    target_ci: Annotated[
        str | None,
        typer.Option("--target-ci", metavar="PERCENT", help="Measure until the energy interval is this narrow: 2%."),
    ] = None,
    max_time: Annotated[
        float | None,
        typer.Option(
            "--max-time", metavar="S", help="With --target-ci: maximum seconds per row (default: 60, or the minimum)."
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option("--weights", metavar="NAME", help="`published`, a folder or a hub id (default: random)."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option("--size", metavar="SIZE", help="Size of a zoo model; other models have a single size."),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="NAME", help="auto, cpu or cuda.")] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Generate text; report prefill and decode separately.")
    ] = False,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", metavar="N", help="With --generate: prompt tokens (default: 256).")
    ] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option("--new-tokens", metavar="N", help="With --generate: new tokens (default: 128)."),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            metavar="RUN",
            help="Do not measure; compare the inference run MODEL (student) with this one (teacher).",
        ),
    ] = None,
    distilled_by: Annotated[
        str | None,
        typer.Option("--distilled-by", metavar="RUN", help="With --against: the distillation run of the student."),
    ] = None,
    from_log: Annotated[
        Path | None,
        typer.Option(
            "--from-log",
            metavar="FILE",
            help="Do not measure; compute energy per inference from a power log or a run directory.",
        ),
    ] = None,
    latency_ms: Annotated[
        float | None, typer.Option("--latency-ms", metavar="L", help="With --from-log: latency of one inference.")
    ] = None,
    idle_from: Annotated[
        str | None,
        typer.Option(
            "--idle-from",
            metavar="WHAT",
            help="With --from-log: idle interval FROM..TO of the log, another log, or watts such as 61W "
            "(default: detected in the log).",
        ),
    ] = None,
    time_zone: Annotated[
        str | None,
        typer.Option("--time-zone", metavar="ZONE", help="With --from-log: zone of timestamps without offset."),
    ] = None,
    period: Annotated[
        float | None,
        typer.Option("--period", metavar="S", help="With --from-log: seconds between readings."),
    ] = None,
    estimate_cpu: EstimateCpu = False,
    dry_run: DryRun = False,
    require: Require = None,
    require_grade: RequireGrade = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Profile inference: latency (median, IQR), throughput, power, and energy per inference with intervals, gross and
    above idle. Latency and power come from the same windows; idle power is measured before and after.

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
        _only_with("--from-log", context, {"from_log", "latency_ms", "idle_from", "time_zone", "period", "as_json"})
        infer_from_log(from_log, latency_ms, idle_from, time_zone, period, as_json)
        return
    for name in ("latency_ms", "idle_from", "time_zone", "period"):
        if context.params[name] is not None:
            raise UsageError(f"{_flag(name)} applies to a power log", "add --from-log FILE")
    if against:
        _only_with("--against", context, {"model", "against", "distilled_by", "runs_dir", "as_json"})
        infer_pair(model, against, distilled_by, runs_dir, as_json)
        return
    if distilled_by is not None:
        raise UsageError("--distilled-by applies to a comparison", "add --against TEACHER_RUN")
    from joulelab.cli.run import RunOptions, start_run
    from joulelab.runs.store import store_root

    spec = checked_settings(context.params)
    start_run(spec, RunOptions(store_root(runs_dir), as_json, dry_run, to_json=record_with_rows))


def record_with_rows(record: RunRecord) -> str:
    """The record as JSON with the rows of the printed table, whose energy above idle is known only at the end."""
    import json

    from joulelab.report.tables.inference_tables import rows_data

    return json.dumps({**json.loads(record.model_dump_json()), "inference": rows_data(record)}, indent=2)


def _only_with(option: str, context: typer.Context, allowed: set[str]) -> None:
    """Refuse options that have no effect with this one."""
    for name, value in context.params.items():
        if name not in allowed and value not in (None, (), []) and value is not False:
            raise UsageError(f"{_flag(name)} has no effect with {option}", "leave it out")


def _flag(name: str) -> str:
    return {"overrides": "a setting", "model": "a model", "as_json": "--json"}.get(name, "--" + name.replace("_", "-"))


def _numbers(text: str) -> list[int]:
    try:
        return [int(item) for item in read_names(text)]
    except ValueError:
        raise UsageError(f"'{text}' is not a list of whole numbers", "separate them with commas: 1,8,32") from None


def _fraction(text: str) -> float:
    """`2%` and `0.02` mean the same."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        raise UsageError(f"--target-ci: expected a percentage, found '{text}'", "write 2% or 0.02") from None
    fraction = value / 100 if text.strip().endswith("%") else value
    if not 0 < fraction < 1:
        raise UsageError(
            f"--target-ci {text} is {100 * fraction:g} % of the energy", "write 2% (or 0.02) for two percent"
        )
    return fraction


FLAGS: Mapping[str, Flag] = {
    "batch_size": Flag("batch_sizes", _numbers),
    "seq_length": Flag("seq_lengths", _numbers),
    "dtype": Flag("dtypes", read_names),
    "mode": Flag("modes", read_names),
    "norm": Flag("norms", read_names),
    "threads": Flag("threads"),
    "min_run_time": Flag("min_run_time_s"),
    "target_ci": Flag("target_ci", _fraction),
    "max_time": Flag("max_time_s"),
    "weights": Flag("weights"),
    "size": Flag("size"),
    "device": Flag("device"),
    "prompt_tokens": Flag("prompt_tokens"),
    "new_tokens": Flag("new_tokens"),
    "require": Flag("energy.require"),
    "require_grade": Flag("energy.require_grade"),
    "generate": Flag("generate", switch=True),
    "estimate_cpu": Flag("energy.estimate_cpu", switch=True),
}


def checked_settings(params: Mapping[str, Any]) -> RunSpec:
    """The checked settings; errors name options where the settings were given as options."""
    from joulelab.runs.spec import check

    settings = infer_settings(params)
    try:
        return check(settings)
    except ConfigError as error:
        message = _in_options(error.message, [name for name, flag in FLAGS.items() if flag.is_given(params[name])])
        hint = "`joulelab infer --help` describes the options; nothing was started"
        raise ConfigError(message, error.hint if message == error.message else hint) from None


def _in_options(message: str, given: Iterable[str]) -> str:
    """`norms.0: expected ...` becomes `--norm: expected ...` where norms was set by --norm."""
    for name in given:
        key, option = re.escape(FLAGS[name].key), "--" + name.replace("_", "-")
        message = re.sub(rf"^{key}(\.\d+)?:", f"{option}:", message, flags=re.MULTILINE)
        if "_" in key:  # cannot be an ordinary word of the message
            message = re.sub(rf"\b{key}\b", option, message)
    return message


def infer_settings(params: Mapping[str, Any]) -> dict[str, Any]:
    if params["model"] is None:
        raise UsageError("no model was named", "to try one: joulelab infer deit-t --min-run-time 5")
    return settings_for("infer", FLAGS, params, model=params["model"])


# `--from-log`: energy per inference from a power log and a latency.

_OPTION = "--idle-from"
_WAYS = f"{_OPTION} FROM..TO (seconds of the log), another log, or watts such as 61W"


def infer_from_log(
    file: Path,
    latency_ms: float | None,
    idle_from: str | None,
    time_zone: str | None,
    period: float | None,
    as_json: bool,
) -> None:
    from joulelab.meter.importers.convert import read_power_log
    from joulelab.meter.importers.log_energy import figures, require_inference, summary_data, with_energy
    from joulelab.meter.importers.power_log import TimeRule

    if latency_ms is None:
        raise UsageError("energy per inference needs a latency; a log has only power", "add --latency-ms 4.37")
    for option, value in (("--latency-ms", latency_ms), ("--period", period)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{option} {value:g} is not a number above 0")
    rule = TimeRule(time_zone, period)
    log = read_power_log(file, rule, "energy per inference")
    _require_effect(rule, log)
    given, source = _idle(idle_from, log, rule)
    rows = [_with_source(row, source) for row in with_energy(log, figures(log, given, latency_ms / 1000))]
    require_inference(log, rows)
    _require_busy_above_idle(rows)
    if as_json:
        import json

        print(json.dumps({"file": str(file), **summary_data(log, rows)}, indent=2))
        return
    from joulelab.cli.console import print_answer
    from joulelab.report.tables.log_tables import inference_result, log_inference_grids, log_sentences

    print_answer(inference_result(rows), log_inference_grids(rows), log_sentences(log, rows))


def _require_effect(rule: TimeRule, log: PowerLog) -> None:
    if rule.period_s is not None and log.has_wall:
        raise UsageError("--period has no effect: the readings of this log have timestamps", "leave it out")
    if rule.zone is not None and not log.has_wall:
        raise UsageError("--time-zone has no effect: this log has no times of day", "leave it out")


def _idle(text: str | None, log: PowerLog, rule: TimeRule) -> tuple[IdleGiven, str]:
    """The idle power that --idle-from gives, and its source for the output ("" where the log reader names it)."""
    from joulelab.meter.importers.log_energy import IdleGiven, parse_idle

    given = IdleGiven(option=_OPTION, ways=_WAYS)
    if text is None:
        return given, ""
    if ".." in text and not Path(text).exists():
        return replace(given, window_s=parse_idle(text, log, _OPTION)), ""
    number = text.strip().removesuffix("W").removesuffix("w").strip()
    if _is_number(number):
        return replace(given, power_w=float(number)), f"given with {_OPTION}"
    if not Path(text).exists():
        raise UsageError(f"{_OPTION} '{text}' is not an interval, a power or a file", f"write {_WAYS}")
    from joulelab.meter.importers.convert import read_power_log
    from joulelab.meter.importers.log_energy import device_energy

    idle = read_power_log(Path(text), rule, "an idle baseline")
    means = [mean for device in idle.devices if (mean := device_energy(device).mean_w) is not None]
    if len(means) != 1:
        raise UsageError(f"{text} has {len(means)} devices; expected one", f"write watts, such as {_OPTION} 61W")
    return replace(given, power_w=means[0]), f"mean of {text}"


def _require_busy_above_idle(rows: list[DeviceFigures]) -> None:
    """Refuse only if idle is above busy on every device: a single odd device is possible, all of them is a mistake."""
    found = [(row.energy.device, row.inference) for row in rows if row.inference is not None]
    if found and all(inference.net_w <= 0 for _, inference in found):
        device, inference = found[0]
        raise UsageError(
            f"{device}: idle ({inference.idle.power_w:.4g} W, {inference.idle.source}) is not below busy "
            f"({inference.busy.power_w:.4g} W, {inference.busy.source}), so the energy per inference would be 0",
            f"give the idle power: {_WAYS}",
        )


def _is_number(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False


def _with_source(row: DeviceFigures, source: str) -> DeviceFigures:
    if not source or row.inference is None:
        return row
    idle = replace(row.inference.idle, source=source)
    return replace(row, idle=idle, inference=replace(row.inference, idle=idle))


# `--against`: two inference runs compared, and when the distillation breaks even.


def infer_pair(
    student: str | None, against: list[str], distilled_by: str | None, runs_dir: Path | None, as_json: bool
) -> None:
    from joulelab.report.tables.inference_pair import pair_data, pair_grid, pairs
    from joulelab.runs.store import find_folder, load_record, store_root

    if student is None:
        raise UsageError(
            "no inference run of the student was named", "joulelab infer STUDENT_RUN --against TEACHER_RUN"
        )
    if len(against) != 1:
        raise UsageError(f"{len(against)} teachers were named; expected one", "give --against once")
    store = store_root(runs_dir)
    ours, theirs = (load_record(find_folder(store, name)) for name in (student, against[0]))
    if ours.run_id == theirs.run_id:
        raise UsageError(f"{ours.run_id} was named both as student and as teacher", "name two inference runs")
    distillation = load_record(find_folder(store, distilled_by)) if distilled_by is not None else None
    found = pairs(ours, theirs, distillation)
    if as_json:
        import json

        print(json.dumps({"student": ours.run_id, "teacher": theirs.run_id, "rows": pair_data(found)}, indent=2))
        return
    from joulelab.cli.console import print_answer

    print_answer("", [pair_grid(ours, theirs, found)])
