"""`joulelab infer`: what a model costs when it is used, in milliseconds and joules per inference."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.cli.options import AsJson, Require, RequireGrade, RunsDir
from joulelab.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from joulelab.meter.importers.log_energy import DeviceFigures, IdleGiven
    from joulelab.meter.importers.power_log import PowerLog, TimeRule
    from joulelab.runs.spec import RunSpec


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
        _only_with("--from-log", context, {"from_log", "latency_ms", "idle_from", "time_zone", "period", "as_json"})
        infer_from_log(from_log, latency_ms, idle_from, time_zone, period, as_json)
        return
    for name in ("latency_ms", "idle_from", "time_zone", "period"):
        if context.params[name] is not None:
            raise UsageError(f"{_flag(name)} says something about a log", "name it with --from-log FILE")
    if against:
        _only_with("--against", context, {"model", "against", "distilled_by", "runs_dir", "as_json"})
        infer_pair(model, against, distilled_by, runs_dir, as_json)
        return
    if distilled_by is not None:
        raise UsageError("--distilled-by belongs to a comparison", "name the teacher's run with --against RUN")
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

    from joulelab.report.tables.inference_tables import rows_data
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


# The flags of `joulelab infer`: which setting each one sets, and how its text is read.


def _numbers(text: str) -> list[int]:
    try:
        return [int(piece) for piece in _names(text)]
    except ValueError:
        raise UsageError(f"'{text}' is no list of whole numbers", "write them with commas: 1,8,32") from None


def _names(text: str) -> list[str]:
    found = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not found:
        raise UsageError(f"'{text}' names nothing", "write at least one value, several with commas; or leave it out")
    return found


def _share(text: str) -> float:
    """`2%` and `0.02` are the same."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        raise UsageError(f"--target-ci: expected a percentage, found '{text}'", "write 2% or 0.02") from None
    share = value / 100 if text.strip().endswith("%") else value
    if not 0 < share < 1:
        raise UsageError(f"--target-ci {text} is {100 * share:g} % of the energy", "write 2% (or 0.02) for two percent")
    return share


# flag -> setting and reader; a reader of None takes the value as typer read it
FLAGS: Mapping[str, tuple[str, Callable[[str], Any] | None]] = {
    "batch_size": ("batch_sizes", _numbers),
    "seq_length": ("seq_lengths", _numbers),
    "dtype": ("dtypes", _names),
    "mode": ("modes", _names),
    "norm": ("norms", _names),
    "threads": ("threads", None),
    "min_run_time": ("min_run_time_s", None),
    "target_ci": ("target_ci", _share),
    "max_time": ("max_time_s", None),
    "weights": ("weights", None),
    "size": ("size", None),
    "device": ("device", None),
    "prompt_tokens": ("prompt_tokens", None),
    "new_tokens": ("new_tokens", None),
    "require": ("energy.require", None),
    "require_grade": ("energy.require_grade", None),
}


def checked_settings(params: Mapping[str, Any]) -> RunSpec:
    """The settings, or what is wrong with them in the words of the command line."""
    from joulelab.runs.spec import check

    settings = infer_settings(params)
    try:
        return check(settings)
    except ConfigError as error:
        message = _in_options(error.message, [name for name in FLAGS if params[name] is not None])
        hint = "`joulelab infer --help` describes the options; nothing was started"
        raise ConfigError(message, error.hint if message == error.message else hint) from None


def _in_options(message: str, given: Iterable[str]) -> str:
    """`norms.0: expected ...` is about --norm, where that is how it was set."""
    for name in given:
        key, option = re.escape(FLAGS[name][0]), "--" + name.replace("_", "-")
        message = re.sub(rf"^{key}(\.\d+)?:", f"{option}:", message, flags=re.MULTILINE)
        if "_" in key:  # no word of a sentence
            message = re.sub(rf"\b{key}\b", option, message)
    return message


def infer_settings(params: Mapping[str, Any]) -> dict[str, Any]:
    """base.yaml, the model, and what was asked for."""
    from joulelab.runs.spec import BASE, EXPERIMENTS, merge, nest, parse_overrides, read_mapping

    if params["model"] is None:
        raise UsageError("no model was named", "for a first look: joulelab infer deit-t --min-run-time 5")
    settings = {**read_mapping(EXPERIMENTS / f"{BASE}.yaml"), "pipeline": "infer", "model": params["model"]}
    for name, (key, read) in FLAGS.items():
        if params[name] is not None:
            settings = merge(settings, nest(key, params[name] if read is None else read(params[name])))
    for name, key in (("generate", "generate"), ("estimate_cpu", "energy.estimate_cpu")):
        if params[name]:
            settings = merge(settings, nest(key, True))
    return merge(settings, parse_overrides(params["overrides"] or []))


# `joulelab infer --from-log`: joules per inference out of a power log that something else wrote.


_OPTION = "--idle-from"
_WAYS = f"{_OPTION} FROM..TO (seconds of the log), another log, or watts as 61W"


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
        raise UsageError("a log tells watts, and joules per inference need its duration", "add --latency-ms 4.37")
    for option, value in (("--latency-ms", latency_ms), ("--period", period)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{option} {value:g} is not a number above 0")
    rule = TimeRule(time_zone, period)
    log = read_power_log(file, rule, "joules per inference")
    _require_use_of(rule, log)
    given, source = _idle(idle_from, log, rule)
    rows = [_sourced(row, source) for row in with_energy(log, figures(log, given, latency_ms / 1000))]
    require_inference(log, rows)
    _require_busy_above_idle(rows)
    if as_json:
        import json

        print(json.dumps({"file": str(file), **summary_data(log, rows)}, indent=2))
        return
    from joulelab.cli.console import print_result
    from joulelab.report.tables.grid import to_rich
    from joulelab.report.tables.log_tables import log_inference_grids, log_sentences

    print_result(*(to_rich(grid) for grid in log_inference_grids(rows)), *log_sentences(log, rows))


def _require_use_of(rule: TimeRule, log: PowerLog) -> None:
    if rule.period_s is not None and log.has_wall:
        raise UsageError("--period does nothing here: the log's readings have stamps", "leave it out")
    if rule.zone is not None and not log.has_wall:
        raise UsageError("--time-zone does nothing here: the log has no times of day", "leave it out")


def _idle(text: str | None, log: PowerLog, rule: TimeRule) -> tuple[IdleGiven, str]:
    """What --idle-from says, and how it should be told; an empty text leaves the telling to the reader of the log."""
    from joulelab.meter.importers.log_energy import IdleGiven, parse_idle

    said = IdleGiven(option=_OPTION, ways=_WAYS)
    if text is None:
        return said, ""
    if ".." in text and not Path(text).exists():
        return replace(said, window_s=parse_idle(text, log, _OPTION)), ""
    number = text.strip().removesuffix("W").removesuffix("w").strip()
    if _is_number(number):
        return replace(said, power_w=float(number)), f"given with {_OPTION}"
    if not Path(text).exists():
        raise UsageError(f"{_OPTION} '{text}' is no stretch, no power and no file", f"write {_WAYS}")
    from joulelab.meter.importers.convert import read_power_log
    from joulelab.meter.importers.log_energy import device_energy

    idle = read_power_log(Path(text), rule, "an idle baseline")
    means = [mean for device in idle.devices if (mean := device_energy(device).mean_w) is not None]
    if len(means) != 1:
        raise UsageError(f"{text} tells the power of {len(means)} devices, and one idle power is wanted", "write watts")
    return replace(said, power_w=means[0]), f"mean of {text}"


def _require_busy_above_idle(rows: list[DeviceFigures]) -> None:
    """What a log says of one card may be odd; where it holds for all of them, one level is not what it is called."""
    found = [(row.energy.device, row.inference) for row in rows if row.inference is not None]
    if found and all(one.net_w <= 0 for _, one in found):
        device, one = found[0]
        raise UsageError(
            f"{device}: idle ({one.idle.power_w:.4g} W, {one.idle.source}) is not below busy "
            f"({one.busy.power_w:.4g} W, {one.busy.source}), so an inference would take no joules",
            f"name what was really idle: {_WAYS}",
        )


def _is_number(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False


def _sourced(row: DeviceFigures, source: str) -> DeviceFigures:
    if not source or row.inference is None:
        return row
    idle = replace(row.inference.idle, source=source)
    return replace(row, idle=idle, inference=replace(row.inference, idle=idle))


# `joulelab infer STUDENT --against TEACHER`: two inference runs side by side, and when distilling has paid back.


def infer_pair(
    student: str | None, against: list[str], distilled_by: str | None, runs_dir: Path | None, as_json: bool
) -> None:
    from joulelab.report.tables.inference_pair import pair_data, pair_grid, pairs
    from joulelab.runs.store import find_folder, load_record, store_root

    if student is None:
        raise UsageError(
            "the student's inference run was not named", "joulelab infer STUDENT_RUN --against TEACHER_RUN"
        )
    if len(against) != 1:
        raise UsageError(f"{len(against)} teachers were named", "a student is set beside one of them")
    store = store_root(runs_dir)
    ours, theirs = (load_record(find_folder(store, name)) for name in (student, against[0]))
    if ours.run_id == theirs.run_id:
        raise UsageError(f"{ours.run_id} was named as student and as teacher", "name two inference runs")
    made_by = load_record(find_folder(store, distilled_by)) if distilled_by is not None else None
    found = pairs(ours, theirs, made_by)
    if as_json:
        import json

        print(json.dumps({"student": ours.run_id, "teacher": theirs.run_id, "rows": pair_data(found)}, indent=2))
        return
    from joulelab.cli.console import print_result
    from joulelab.report.tables.grid import to_rich

    print_result(to_rich(pair_grid(ours, theirs, found)))
