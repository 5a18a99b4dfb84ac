"""`joulelab measure`: the energy of any program, unchanged. Standard output is left to the program."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.cli.options import (
    Flag,
    Prometheus,
    Require,
    RequireGrade,
    RunsDir,
    detail,
    merged,
    options_in_errors,
    requested_settings,
)
from joulelab.errors import JoulelabError, UsageError
from joulelab.lookup import unknown

if TYPE_CHECKING:
    from joulelab.runs.measure.result import MeasureResult, MeasureSpec
    from joulelab.runs.record import RunRecord


FLAGS: Mapping[str, Flag] = {
    "name": Flag("name"),
    "tag": Flag("tags"),
    "repeat": Flag("repeat"),
    "warmup": Flag("warmup"),
    "interval": Flag("energy.sample_interval_s"),
    "gpus": Flag("energy.gpus"),
    "rapl_root": Flag("energy.rapl_root"),
    "idle_before": Flag("energy.idle_before_s"),
    "estimate_cpu": Flag("energy.estimate_cpu", switch=True),
    "scope": Flag("energy.total_energy_policy", read=lambda text: policy_of_scope(text)),
    "grid": Flag("energy.grid"),
    "price": Flag("energy.price"),
    "require": Flag("energy.require"),
    "require_grade": Flag("energy.require_grade"),
    "prometheus": Flag("energy.prometheus"),
}

SCOPES = {"program": "measured", "machine": "machine"}


def policy_of_scope(text: str) -> str:
    if text not in SCOPES:
        raise unknown("scope", text, SCOPES)
    return SCOPES[text]


def measure(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND [ARGUMENT]...", help="The program and its arguments.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the run (default: the program's name).", show_default=False)
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="WORD", help="Tag for finding the run in `joulelab ui`; may be repeated."),
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", metavar="K", help="Number of measured runs.")] = 1,
    warmup: Annotated[
        int, typer.Option("--warmup", metavar="W", help="Number of warm-up runs, excluded from the mean.")
    ] = 0,
    require: Require = None,
    require_grade: RequireGrade = None,
    prometheus: Prometheus = None,
    estimate_cpu: Annotated[
        bool,
        typer.Option(
            "--estimate-cpu",
            help="Estimate CPU energy from CPU time even if sensors work (reported separately, never added to the "
            "total). This is the default if no sensor works.",
        ),
    ] = False,
    scope: Annotated[
        str | None,
        typer.Option(
            "--scope",
            metavar="program|machine",
            help="machine: estimate the whole machine (all processes, memory, idle power), labeled as an estimate.",
            show_default="program",
        ),
    ] = None,
    grid: Annotated[
        str | None,
        typer.Option("--grid", help="Report CO2e for this grid: FR, DE, US, EU, world, or g/kWh.", show_default=False),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option("--price", help="Report the cost at this price per kWh: 0.30 or '0.30 EUR'.", show_default=False),
    ] = None,
    interval: Annotated[
        float | None, typer.Option("--interval", metavar="S", help="Sampling interval in seconds.", show_default="0.5")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", help="auto, none, or a list of UUIDs and indices.", show_default="auto"),
    ] = None,
    rapl_root: Annotated[
        str | None, typer.Option("--rapl-root", metavar="DIR", help="Path of another RAPL tree.", show_default=False)
    ] = None,
    idle_before: Annotated[
        float | None, typer.Option("--idle-before", metavar="S", help="Seconds of idle baseline before the program.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="energy.KEY=VALUE", help="Any other energy setting (`joulelab explain energy`)."),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            metavar="DIR",
            help="Run directory (default: a new one in the store). If `joulelab submit` queued a run there, start it.",
            show_default=False,
        ),
    ] = None,
    runs_dir: RunsDir = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as a single JSON line (last line of stderr).")
    ] = False,
    json_to: Annotated[
        Path | None, typer.Option("--json-to", metavar="FILE", help="Write the result as JSON to this file.")
    ] = None,
) -> None:
    """Measure the energy of any program, unchanged; the result is the last line on stderr.

    The program keeps standard input, output and error, receives signals, and its exit code is returned (128 + n if
    signal n killed it). Other exit codes: 127 program not found, 126 not executable, 3 no sensor with --require
    measured, 4 the program succeeded but the measurement is below --require-grade.

    Examples:

      joulelab measure -- python train.py --epochs 3

      joulelab measure --grid FR --price '0.25 EUR' -- python train.py

      joulelab measure --repeat 5 --warmup 1 --json-to cost.json -- ./simulate input.dat
    """
    from joulelab.cli.console import wrapped
    from joulelab.meter.monitor.exposition import require_free
    from joulelab.runs.attempt import close_run
    from joulelab.runs.environment import demand_sensors
    from joulelab.runs.measure.program import CannotStart, find_program
    from joulelab.runs.measure.result import RecordLost, measure_program, queued_spec
    from joulelab.runs.paths import RunPaths, require_no_runs
    from joulelab.runs.store import load_record, store_root
    from joulelab.runs.validity import enforce
    from joulelab.trackers.codecarbon import check_installed

    spec, command = measure_spec(context.params), command or []
    queued = run_dir is not None and (run_dir / "run.json").exists()
    if run_dir is not None and queued:
        spec = queued_spec(run_dir, spec)
    elif run_dir is not None:
        require_no_runs(run_dir)
    try:
        executable = find_program(command[0])
        demand_sensors(spec.energy)
        check_installed(spec.energy)
        if spec.energy.prometheus:
            require_free(spec.energy.prometheus)
    except JoulelabError as error:
        if run_dir is not None and queued:
            close_run(RunPaths(run_dir), "failed", error)
        if isinstance(error, CannotStart):  # one line, as from a shell
            _print(f"joulelab: {error.message} ({error.hint}); nothing was measured")
            raise typer.Exit(error.exit_code) from None
        raise
    result = measure_program(store_root(runs_dir), spec, executable, command, _OnStderr(), run_dir)
    try:
        if json_to is not None:
            _write(json_to, result.model_dump_json(indent=2))
        record = load_record(Path(result.folder))
        lines = [result.model_dump_json()] if as_json else [wrapped(line, 10) for line in result_lines(result, record)]
        _print("\n".join(lines))
    except Exception as problem:
        raise RecordLost(problem, Path(result.folder), result.exit_code) from problem
    if result.exit_code == 0:
        enforce(record)
    raise typer.Exit(result.exit_code)


def measure_spec(params: Mapping[str, Any]) -> MeasureSpec:
    """The checked settings of `joulelab measure`; the command in them has no secrets."""
    from joulelab.redaction import redact_command
    from joulelab.runs.measure.program import default_name
    from joulelab.runs.measure.result import MeasureSpec
    from joulelab.runs.spec import check

    command = params["command"]
    if not command:
        raise UsageError("no program was named", "write it after `--`: joulelab measure -- python train.py")
    fixed = {"pipeline": "measure", "name": default_name(redact_command(command)), "command": redact_command(command)}
    requested = requested_settings("measure", FLAGS, params)
    with options_in_errors(requested):
        spec = check(merged(fixed, requested))
    assert isinstance(spec, MeasureSpec)
    return spec


class _OnStderr:
    """Prints only what is needed while the program runs: it may be drawing on the same terminal."""

    def stage(self, name: str, total: int | None) -> None: ...

    def advance(self, done: int, text: str = "") -> None: ...

    def setup(self, begin_ns: int, end_ns: int) -> None: ...

    def finish(self) -> None: ...

    def write(self, text: str) -> None:
        if not text.startswith("warning: "):  # warnings are part of the result, printed after the program's own output
            _print(f"joulelab: {text}")


def _print(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr is closed after a hang-up; the record is written anyway
        print(text, file=sys.stderr, flush=True)


def _write(path: Path, text: str) -> None:
    """Not atomic, because FILE may be a pipe or /dev/fd/3. A failure here must not change the program's exit code."""
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        _print(f"joulelab: cannot write {path}: {error.strerror}")


def result_lines(result: MeasureResult, record: RunRecord) -> list[str]:
    """Warnings and the run directory, then the answer as the last line.

    If the program failed, its own message is above, and a single line follows it.
    """
    from joulelab.meter.figures import labeled_text
    from joulelab.runs.measure.result import answer_line, scope_note
    from joulelab.units import duration_text

    lines = []
    if detail() == "verbose":
        lines += [
            f"{row.stage}: {labeled_text(row.energy)}; {duration_text(row.duration_s)}" for row in result.repetitions
        ]
        lines += [f"note: {text}" for text in result.notes]
    answer = answer_line(record)
    if result.status == "done" and detail() != "quiet":
        lines += [f"warning: {text}" for text in result.warnings]
        lines += [f"note: {text}" for text in [scope_note(record)] if text]
        lines += [f"run directory: {result.folder}"]
    elif result.status != "done":
        answer += f"; run directory: {result.folder}"
    return [f"joulelab: {line}" for line in [*lines, answer]]
