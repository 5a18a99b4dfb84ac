"""`joulelab measure`: the energy of any program, unchanged. Standard output is left to the program."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joulelab.cli.options import Flag, Require, RequireGrade, RunsDir, merged, requested_settings
from joulelab.errors import UsageError

if TYPE_CHECKING:
    from joulelab.runs.measure.result import MeasureResult


FLAGS: Mapping[str, Flag] = {
    "name": Flag("name"),
    "repeat": Flag("repeat"),
    "warmup": Flag("warmup"),
    "interval": Flag("energy.sample_interval_s"),
    "gpus": Flag("energy.gpus"),
    "rapl_root": Flag("energy.rapl_root"),
    "idle_before": Flag("energy.idle_before_s"),
    "estimate_cpu": Flag("energy.estimate_cpu", switch=True),
    "require": Flag("energy.require"),
    "require_grade": Flag("energy.require_grade"),
}


def measure(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND [ARGUMENT]...", help="The program and its arguments.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the run (default: the program's name).", show_default=False)
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", metavar="K", help="Number of measured runs.")] = 1,
    warmup: Annotated[
        int, typer.Option("--warmup", metavar="W", help="Number of warm-up runs, excluded from the mean.")
    ] = 0,
    require: Require = None,
    require_grade: RequireGrade = None,
    estimate_cpu: Annotated[
        bool,
        typer.Option(
            "--estimate-cpu",
            help="Also estimate CPU energy from CPU time (reported separately, never added to the total).",
        ),
    ] = False,
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
    runs_dir: RunsDir = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as a single JSON line (last line of stderr).")
    ] = False,
    json_to: Annotated[
        Path | None, typer.Option("--json-to", metavar="FILE", help="Write the result as JSON to this file.")
    ] = None,
) -> None:
    """Measure the energy of any program, unchanged; the result is printed to stderr.

    The program keeps standard input, output and error, receives signals, and its exit code is returned (128 + n if
    signal n killed it). Other exit codes: 127 program not found, 126 not executable, 3 no sensor with --require
    measured, 4 the program succeeded but the measurement is below --require-grade.

    Examples:

      joulelab measure -- python train.py --epochs 3

      joulelab measure --repeat 5 --warmup 1 --json-to cost.json -- ./simulate input.dat
    """
    if not command:
        raise UsageError("no program was named", "write it after `--`: joulelab measure -- python train.py")
    from joulelab.runs.measure.measure_session import MeasureSpec, measure_program
    from joulelab.runs.measure.program import default_name, find_program, without_secrets
    from joulelab.runs.sensor_discovery import demand_sensors
    from joulelab.runs.spec import check
    from joulelab.runs.store import load_record, store_root
    from joulelab.runs.validity import enforce

    fixed = {"pipeline": "measure", "name": default_name(command), "command": without_secrets(command)}
    spec = check(merged(fixed, requested_settings(FLAGS, context.params)))
    assert isinstance(spec, MeasureSpec)
    executable = find_program(command[0])
    demand_sensors(spec.energy)
    result = measure_program(store_root(runs_dir), spec, executable, command, _OnStderr())
    if json_to is not None:
        _write(json_to, result.model_dump_json(indent=2))
    _print(result.model_dump_json() if as_json else "\n".join(result_lines(result)))
    if result.exit_code == 0:
        enforce(load_record(Path(result.folder)))
    raise typer.Exit(result.exit_code)


class _OnStderr:
    """Prints only what is needed while the program runs: it may be drawing on the same terminal."""

    def stage(self, name: str, total: int | None) -> None: ...

    def advance(self, done: int, text: str = "") -> None: ...

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


def result_lines(result: MeasureResult) -> list[str]:
    """Energy with method and interval, repeats, warnings and the run directory, one line each."""
    from joulelab.meter.figures import figure_text, labeled_text
    from joulelab.units import duration_text, power_text

    lines = []
    mean = result.summary
    title_of = (lambda row: row.stage) if len(result.repetitions) > 1 else (lambda row: result.name)
    for row in result.repetitions:
        figure = row.energy
        if figure.energy_j is None:
            lines.append(f"{title_of(row)}: energy missing; {duration_text(row.duration_s)}")
            continue
        energy = labeled_text(figure) if mean else figure_text(figure)  # the gain error is printed once
        power = power_text(figure.mean_power_w(row.duration_s))
        lines.append(f"{title_of(row)}: {energy}; {power}, {duration_text(row.duration_s)}")
    if mean is not None and result.energy is not None:
        interval = "" if result.energy.is_lower_bound else "Student's t interval over repeats, "
        lines.append(
            f"mean of {mean.count}: {figure_text(result.energy)}; {interval}"
            f"standard deviation {100 * mean.spread_rel:.1f} %, {duration_text(mean.mean_s)} each"
        )
    lines += [f"warning: {text}" for text in result.warnings]
    lines += [f"note: {text}" for text in result.notes]
    if result.status != "done":
        lines.append(f"{result.status}: {result.error}")
    lines.append(f"run {result.folder}")
    return [f"joulelab: {line}" for line in lines]
