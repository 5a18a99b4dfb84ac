"""`joulelab infer`: latency and energy per inference.

Five ways, each with its own options: measure models, measure generated text (`--generate`, `--prompts`), measure a
server under load (`--server`, `--engine`), compute energy per inference from a power log (`--from-log`), or compare the
inference runs of a student and its teacher (`--against`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.cli.options import (
    AsJson,
    DryRun,
    Flag,
    Require,
    RequireGrade,
    RunsDir,
    checked_spec,
    complete_models,
    note,
    read_names,
)
from joulelab.errors import JoulelabError, UsageError

if TYPE_CHECKING:
    from joulelab.meter.importers.log_energy import DeviceFigures, IdleGiven
    from joulelab.meter.importers.power_log import PowerLog, TimeRule
    from joulelab.runs.record import RunRecord
    from joulelab.runs.spec import RunSpec


_MODEL, _TEXT = "Measure models", "Measure generated text (with --generate or --prompts)"
_SERVER = "Measure a server under load (with --server or --engine)"
_PAIR, _LOG = "Compare a student with its teacher (measures nothing)", "Compute from a power log (measures nothing)"


def _option(panel: str, metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, show_default=False, rich_help_panel=panel)


def infer(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL... [KEY.PATH=VALUE]...",
            help="deit-t, deit-s, deit-b, bert-b, bert-l, zoo models, samples, folders or hub ids; then any setting of "
            "`joulelab explain --pipeline infer`. Several models are measured one after the other, each in its own "
            "process, and compared in one table.",
            autocompletion=complete_models,
        ),
    ] = None,
    model_option: Annotated[
        list[str] | None, _option(_MODEL, "MODEL", "Same as the argument MODEL.", "--model", "-m")
    ] = None,
    sort: Annotated[
        str | None,
        _option(_MODEL, "energy|latency", "Order of several models (default: as named).", "--sort"),
    ] = None,
    batch_size: Annotated[
        str | None,
        _option(_MODEL, "N,...", "Batch sizes, comma-separated (default: 1).", "--batch-size", "--batch_size"),
    ] = None,
    seq_length: Annotated[
        str | None,
        _option(_MODEL, "N,...", "Sequence lengths in tokens (default: 128).", "--seq-length", "--seq_length", "-s"),
    ] = None,
    dtype: Annotated[
        str | None,
        _option(
            _MODEL,
            "NAME,...",
            "fp32, tf32, autocast-bf16, autocast-fp16 (weights cast on every call), bf16, fp16 (weights cast once); "
            "quantized weights: int8, nf4, fp8, fp8-weights, int4; default: fp32. A GGUF file is dequantized.",
            "--dtype",
        ),
    ] = None,
    mode: Annotated[
        str | None,
        _option(
            _MODEL,
            "NAME,...",
            "eager, compiled, cuda-graph, reduce-overhead, fastest (tries several recipes); default: eager, or "
            "cuda-graph with --generate on a GPU.",
            "--mode",
        ),
    ] = None,
    norm: Annotated[
        str | None,
        _option(
            _MODEL,
            "NAME,...",
            "Normalization of deit-* and bert-*, interleaved: pre-ln, pre-rms, pre-crms, post-ln, none "
            "(default: as published).",
            "--norm",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        _option(_MODEL, "N", "CPU threads (default: OMP_NUM_THREADS if set, else all available).", "--threads"),
    ] = None,
    min_run_time: Annotated[
        float | None, _option(_MODEL, "S", "Minimum seconds per row (default: 5).", "--min-run-time")
    ] = None,
    target_ci: Annotated[
        str | None,
        _option(
            _MODEL, "PERCENT", "Measure until the energy's 95 % interval is at most ± this, e.g. 2%.", "--target-ci"
        ),
    ] = None,
    max_time: Annotated[
        float | None,
        _option(
            _MODEL,
            "S",
            "With --target-ci or a server: maximum seconds per row (default: 60, or the minimum).",
            "--max-time",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        _option(_MODEL, "NAME", "`published`, a folder or a hub id (default: random).", "--weights"),
    ] = None,
    size: Annotated[
        str | None,
        _option(_MODEL, "SIZE", "Size of a zoo model; other models have a single size.", "--size"),
    ] = None,
    device: Annotated[
        str | None, _option(_MODEL, "NAME", "auto, cpu, cuda, or mps (Apple; not tested on hardware).", "--device")
    ] = None,
    estimate_cpu: Annotated[
        bool,
        typer.Option(
            "--estimate-cpu",
            help="Also estimate CPU energy from CPU time (labeled as an estimate).",
            rich_help_panel=_MODEL,
        ),
    ] = False,
    generate: Annotated[
        bool,
        typer.Option("--generate", help="Generate text; report prefill and decode separately.", rich_help_panel=_TEXT),
    ] = False,
    prompts: Annotated[
        Path | None,
        _option(
            _TEXT,
            "FILE",
            "Prompts to answer (implies --generate): .txt with one per line, or .jsonl with `prompt`, `text` or "
            "`messages`.",
            "--prompts",
        ),
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        _option(
            _TEXT,
            "N",
            "Length of random prompts in tokens (default: 256); for a server also 64-512 (uniform) or "
            "lognormal:MEDIAN,SIGMA.",
            "--prompt-tokens",
        ),
    ] = None,
    new_tokens: Annotated[
        str | None,
        _option(
            _TEXT, "N", "Tokens per response (default: 128); for a server also as for --prompt-tokens.", "--new-tokens"
        ),
    ] = None,
    server: Annotated[
        str | None,
        _option(
            _SERVER,
            "URL",
            "URL of a running OpenAI-compatible server, ending in /v1; --model is its name for the model. The API key "
            "is read from OPENAI_API_KEY.",
            "--server",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        _option(
            _SERVER, "NAME", "Start an engine with --model MODEL for this run: builtin, vllm or sglang.", "--engine"
        ),
    ] = None,
    engine_python: Annotated[
        str | None,
        _option(_SERVER, "FILE", "Python of the environment in which vLLM or SGLang is installed.", "--engine-python"),
    ] = None,
    concurrency: Annotated[
        str | None,
        _option(
            _SERVER,
            "N,...",
            "Numbers of concurrent clients, each with one request at a time (default: 1,4,16).",
            "--concurrency",
        ),
    ] = None,
    rate: Annotated[
        str | None, _option(_SERVER, "R,...", "Mean request rates per second (Poisson arrivals).", "--rate")
    ] = None,
    duration: Annotated[
        float | None,
        _option(_SERVER, "S", "Steady-state seconds per row, after the detected warm-up (default: 20).", "--duration"),
    ] = None,
    max_ttft: Annotated[
        float | None, _option(_SERVER, "MS", "Limit on the time to first token, in milliseconds.", "--max-ttft")
    ] = None,
    max_tpot: Annotated[
        float | None, _option(_SERVER, "MS", "Limit on the time per output token, in milliseconds.", "--max-tpot")
    ] = None,
    percentile: Annotated[
        int | None,
        _option(
            _SERVER, "50|90|95|99", "Percentile of requests that must meet the limits (default: 95).", "--percentile"
        ),
    ] = None,
    table: Annotated[
        Path | None,
        _option(_SERVER, "FILE", "Also write the rows as .csv or .json, with the columns of ML.ENERGY.", "--table"),
    ] = None,
    against: Annotated[
        list[str] | None,
        _option(_PAIR, "RUN", "Compare the inference run MODEL (student) with this one (teacher).", "--against"),
    ] = None,
    distilled_by: Annotated[
        str | None, _option(_PAIR, "RUN", "The distillation run of the student.", "--distilled-by")
    ] = None,
    from_log: Annotated[
        Path | None,
        _option(_LOG, "FILE", "Energy per inference from a power log or a run directory.", "--from-log"),
    ] = None,
    latency_ms: Annotated[float | None, _option(_LOG, "L", "Latency of one inference.", "--latency-ms")] = None,
    idle_from: Annotated[
        str | None,
        _option(
            _LOG,
            "WHAT",
            "Idle interval FROM..TO of the log, another log, or watts such as 61W (default: detected in the log).",
            "--idle-from",
        ),
    ] = None,
    time_zone: Annotated[
        str | None, _option(_LOG, "ZONE", "Time zone of timestamps without an offset.", "--time-zone")
    ] = None,
    period: Annotated[float | None, _option(_LOG, "S", "Seconds between readings.", "--period")] = None,
    dry_run: DryRun = False,
    require: Require = None,
    require_grade: RequireGrade = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Profile inference: energy per item with intervals, gross and above idle, latency (median, IQR), throughput and
    power. Latency and power come from the same windows; idle power is measured before and after.

    Examples:

      joulelab infer deit-t --min-run-time 5

      joulelab infer deit-t deit-s deit-b --batch-size 1,8 --sort energy

      joulelab infer deit-b --batch-size 1,8,32 --dtype bf16 --mode eager,fastest --target-ci 2%

      joulelab infer deit-b --norm pre-ln,pre-rms,pre-crms,none

      joulelab infer bert-l --seq-length 128,384 --dtype autocast-bf16

      joulelab infer smollm2 --generate --prompt-tokens 256 --new-tokens 128 --batch-size 1,8

      joulelab infer smollm2 --prompts questions.jsonl --new-tokens 64

      joulelab infer --server http://localhost:8000/v1 --max-tpot 50

      joulelab infer --engine builtin --model smollm2 --concurrency 1,4,16

      joulelab infer --from-log power.csv --latency-ms 4.37

      joulelab infer STUDENT_RUN --against TEACHER_RUN --distilled-by DISTILLATION_RUN
    """
    params = with_named_models(context.params)
    words = params["words"]
    usage = usage_of(params)
    if usage == "log":
        assert from_log is not None
        infer_from_log(from_log, latency_ms, idle_from, time_zone, period, as_json)
        return
    if usage == "pair":
        student = words[0] if words else None
        if words and len(words) > 1:
            raise UsageError(f"{len(words)} runs were named; expected one student", "name one run before --against")
        infer_pair(student, against or [], distilled_by, runs_dir, as_json)
        return
    from joulelab.cli.run import RunOptions, start_run
    from joulelab.runs.store import store_root

    if usage == "serving":
        from joulelab.cli.serve import measure_server

        measure_server(params, RunOptions(store_root(runs_dir), as_json, dry_run))
        return
    name, specs = inference_request(params)
    if len(specs) > 1:
        infer_models(store_root(runs_dir), name, specs, sort or "", dry_run, as_json)
        return
    if sort is not None:
        raise UsageError("--sort orders several models; one was named", "leave it out")
    start_run(specs[0], RunOptions(store_root(runs_dir), as_json, dry_run, to_json=record_with_rows))


# Which options belong to which way of using `infer`; `words`, --json and the like are in several.
_FOR_LOGS = ("from_log", "latency_ms", "idle_from", "time_zone", "period")
_FOR_PAIRS = ("against", "distilled_by")
_FOR_TEXT = ("prompts", "prompt_tokens", "new_tokens")
_FOR_SERVERS = (
    *("server", "engine", "engine_python", "concurrency", "rate", "duration", "max_ttft", "max_tpot", "percentile"),
    "table",
)
_ALSO_FOR_SERVERS = (
    *("words", "prompts", "prompt_tokens", "new_tokens", "dtype", "device", "batch_size", "threads", "max_time"),
    *("estimate_cpu", "dry_run", "require", "require_grade", "runs_dir", "as_json"),
)
_NOT_FOR_TEXT = ("seq_length", "norm", "size", "weights")


def with_named_models(params: Mapping[str, Any]) -> dict[str, Any]:
    """The models of `-m MODEL` and those named as arguments."""
    named = params.get("model_option") or []
    own = {name: value for name, value in params.items() if name not in ("verbose", "quiet")}
    return {**own, "model_option": None, "words": [*named, *(params["words"] or [])]}


def usage_of(params: Mapping[str, Any]) -> str:
    """`log`, `pair`, `serving`, `text` or `model`; an option of another one is refused."""
    given = [name for name, value in params.items() if value not in (None, (), []) and value is not False]
    if "from_log" in given:
        _refuse_others("--from-log, which measures nothing", given, {*_FOR_LOGS, "as_json"})
        return "log"
    if "against" in given:
        _refuse_others("--against, which measures nothing", given, {*_FOR_PAIRS, "words", "runs_dir", "as_json"})
        return "pair"
    if "prompts" in given and "prompt_tokens" in given:
        raise UsageError("--prompt-tokens has no effect with --prompts, which have their own lengths", "leave one out")
    if "server" in given or "engine" in given:
        _refuse_others("--server and --engine", given, {*_FOR_SERVERS, *_ALSO_FOR_SERVERS})
        return "serving"
    for name in given:
        if name in _FOR_SERVERS:
            raise UsageError(f"{_flag(name)} applies to a server", "add --server URL, or --engine builtin")
        if name in _FOR_LOGS:
            raise UsageError(f"{_flag(name)} applies to a power log", "add --from-log FILE")
        if name in _FOR_PAIRS:
            raise UsageError(f"{_flag(name)} applies to a comparison", "add --against TEACHER_RUN")
    if "generate" not in given and "prompts" not in given:
        for name in given:
            if name in _FOR_TEXT:
                raise UsageError(f"{_flag(name)} applies to generated text", "add --generate")
        return "model"
    for name in given:
        if name in _NOT_FOR_TEXT:
            instead = "use --prompt-tokens and --new-tokens" if name == "seq_length" else "leave it out"
            raise UsageError(f"{_flag(name)} has no effect on generated text", instead)
    return "text"


def _refuse_others(with_what: str, given: Iterable[str], allowed: set[str]) -> None:
    for name in given:
        if name not in allowed:
            raise UsageError(f"{_flag(name)} has no effect with {with_what}", "leave it out")


_SETTING = re.compile(r"[A-Za-z_][\w.]*=")


def models_and_settings(words: Iterable[str] | None) -> tuple[list[str], list[str]]:
    """The words of the command: models, and `key.path=value`; a file may have such a name."""
    given = list(words or [])
    settings = [word for word in given if _SETTING.match(word) and not Path(word).exists()]
    return [word for word in given if word not in settings], settings


def inference_request(params: Mapping[str, Any]) -> tuple[str, list[RunSpec]]:
    """Name of the run or group, and the checked specs: one per model."""
    params = with_named_models(params)
    if usage_of(params) not in ("model", "text"):
        raise UsageError("--from-log and --against measure nothing", "run the command directly")
    models, overrides = models_and_settings(params["words"])
    if not models:
        raise UsageError("no model was named", "to try one: joulelab infer deit-t --min-run-time 5")
    if params["sort"] not in (None, *SORT_KEYS):
        raise UsageError(
            f"--sort {params['sort']}: expected {' or '.join(SORT_KEYS)}", "leave it out to keep the order"
        )
    specs = [infer_spec({**params, "model": model, "overrides": overrides}) for model in models]
    names = [getattr(spec, "model", "") for spec in specs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice} was named twice", "name each model once; rounds=8 repeats the measurement")
    if len(specs) == 1:
        return specs[0].name, specs
    labeled = [spec.model_copy(update={"label": spec.label or name}) for spec, name in zip(specs, names, strict=True)]
    return f"infer-{len(specs)}-models", labeled


SORT_KEYS = ("energy", "latency")


def infer_models(store: Path, name: str, specs: list[RunSpec], sort: str, dry_run: bool, as_json: bool) -> None:
    """Measure several models as a group: each in its own process, so that memory and caches are independent. A model
    that fails is reported, and the others are still measured."""
    from joulelab.cli.run import RunOptions, print_settings, require_inputs
    from joulelab.runs.groups import create_group

    require_inputs(specs, RunOptions(store, dry_run=dry_run))
    if dry_run:
        print_settings({spec.label: spec for spec in specs}, as_json)
        return
    about = f"Inference of {len(specs)} models"
    folder = create_group(store, specs, name=name, about=about, sweep=True).folder
    run_models_folder(folder, sort, as_json)


def run_models_folder(folder: Path, sort: str, as_json: bool) -> None:
    """Measure the models of the group that are not done, and print all in one table."""
    from joulelab.cli.browse import show_inference_group
    from joulelab.cli.run import execute_members
    from joulelab.cli.sweep import run_in_subprocess
    from joulelab.report import report_line
    from joulelab.runs.validity import enforce

    note(f"group {folder}")
    try:
        records = execute_members(folder, lambda run, _: run_in_subprocess(run))
    except BaseException:
        print(f"show what is done: joulelab show {folder}", file=sys.stderr)
        print(f"resume it:         joulelab run --resume {folder}", file=sys.stderr)
        raise
    show_inference_group(folder, as_json, sort)
    note(report_line(folder))
    failed = [record for record in records if record.status != "done"]
    if failed:
        raise JoulelabError(
            f"{len(failed)} of {len(records)} models failed: {', '.join(record.label for record in failed)}",
            f"measure them again: joulelab run --resume {folder}",
        )
    for record in records:
        enforce(record)


def record_with_rows(record: RunRecord) -> str:
    """The record as JSON with the rows of the printed table, whose energy above idle is known only at the end."""
    import json

    from joulelab.report.tables.inference_tables import rows_data

    return json.dumps({**json.loads(record.model_dump_json()), "inference": rows_data(record)}, indent=2)


def _flag(name: str) -> str:
    return {"words": "a model or setting", "as_json": "--json"}.get(name, "--" + name.replace("_", "-"))


def _numbers(text: str) -> list[int]:
    try:
        return [int(item) for item in read_names(text)]
    except ValueError:
        raise UsageError(f"'{text}' is not a list of whole numbers", "separate them with commas: 1,8,32") from None


def _number(text: str) -> int:
    if not str(text).strip().isdecimal():
        raise UsageError(f"'{text}' is not a whole number", "write one number; ranges are for --server and --engine")
    return int(text)


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
    "prompt_tokens": Flag("prompt_tokens", _number),
    "new_tokens": Flag("new_tokens", _number),
    "prompts": Flag("prompts", str),
    "require": Flag("energy.require"),
    "require_grade": Flag("energy.require_grade"),
    "generate": Flag("generate", switch=True),
    "estimate_cpu": Flag("energy.estimate_cpu", switch=True),
}


def infer_spec(params: Mapping[str, Any]) -> RunSpec:
    """The checked settings of `joulelab infer`."""
    return checked_spec("infer", "infer", FLAGS, params, model=params["model"])


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
