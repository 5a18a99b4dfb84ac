"""`joulelab import` and `joulelab plot`: energy and figures from power logs of other tools, and plots of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from joulelab.cli.options import AsJson, RunsDir, complete_runs, note
from joulelab.errors import UsageError
from joulelab.lookup import require_extra

if TYPE_CHECKING:
    from joulelab.meter.importers.emissions_csv import CodeCarbonLog
    from joulelab.meter.importers.power_log import PowerLog


def import_log(
    file: Annotated[
        Path, typer.Argument(help="Log file, or a run directory for its trace; the format is auto-detected.")
    ],
    time_zone: Annotated[
        str | None,
        typer.Option("--time-zone", metavar="ZONE", help="Zone of timestamps without offset: Europe/Berlin, +02:00."),
    ] = None,
    period: Annotated[
        float | None, typer.Option("--period", metavar="S", help="Seconds between readings without timestamps.")
    ] = None,
    idle: Annotated[
        str | None,
        typer.Option("--idle", metavar="FROM..TO", help="Idle interval: seconds of the log, or two times."),
    ] = None,
    idle_watts: Annotated[float | None, typer.Option("--idle-watts", metavar="W", help="Idle power.")] = None,
    latency_ms: Annotated[
        float | None,
        typer.Option("--latency-ms", metavar="L", help="Also print energy per inference at this latency."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="TRACE.jsonl", help="Also write the log as a joulelab trace.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute energy per GPU from a power log: trapezoidal integral of power, and the energy counter if logged.

    Reads JSONL of `joulelab monitor` and of earlier monitors, `nvidia-smi dmon` text, `nvidia-smi --query-gpu` CSV and
    CodeCarbon's emissions.csv.

    Example, DeiT-B at 4.37 ms per image, with idle before and after detected in the log:

      joulelab import power_usage.csv --latency-ms 4.37
    """
    _check(period, idle, idle_watts, latency_ms)
    from joulelab.meter.importers.convert import read_log
    from joulelab.meter.importers.emissions_csv import CodeCarbonLog
    from joulelab.meter.importers.power_log import TimeRule

    log = read_log(file, TimeRule(time_zone, period))
    if isinstance(log, CodeCarbonLog):
        given = {"--idle": idle, "--idle-watts": idle_watts, "--latency-ms": latency_ms, "--out": out}
        for option in (name for name, value in given.items() if value is not None):
            raise UsageError(f"{option} needs power over time; CodeCarbon's file has only totals of whole runs")
        _print_codecarbon(log, as_json)
        return
    _print_log(log, file, idle, idle_watts, latency_ms, as_json)
    if out is not None:
        from joulelab.meter.importers.convert import write_trace

        write_trace(log, file, out)
        note(f"trace: {out}")


def _check(period: float | None, idle: str | None, idle_watts: float | None, latency_ms: float | None) -> None:
    for option, value in (("--period", period), ("--latency-ms", latency_ms)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{option} {value:g} is not a number above 0")
    if idle_watts is not None and not 0 <= idle_watts < float("inf"):
        raise UsageError(f"--idle-watts {idle_watts:g} is not a power")
    if idle is not None and idle_watts is not None:
        raise UsageError("--idle and --idle-watts both set the idle power", "give one of them")


def _print_log(
    log: PowerLog, file: Path, idle: str | None, idle_watts: float | None, latency_ms: float | None, as_json: bool
) -> None:
    from joulelab.meter.importers.log_energy import (
        IdleGiven,
        figures,
        parse_idle,
        require_inference,
        summary_data,
        with_energy,
    )

    window_s = None if idle is None else parse_idle(idle, log)
    latency_s = None if latency_ms is None else latency_ms / 1000
    rows = with_energy(log, figures(log, IdleGiven(window_s, idle_watts), latency_s))
    if latency_s is not None:
        require_inference(log, rows)
    if as_json:
        import json

        print(json.dumps({"file": str(file), **summary_data(log, rows)}, indent=2))
        return
    from joulelab.cli.console import print_answer
    from joulelab.report.tables.log_tables import log_grid, log_result, log_sentences

    print_answer(log_result(rows), [log_grid(log, rows)], log_sentences(log, rows))


def _print_codecarbon(log: CodeCarbonLog, as_json: bool) -> None:
    if as_json:
        import json
        from dataclasses import asdict

        print(json.dumps({**asdict(log), "label": "CodeCarbon's own figures; _j in joules"}, indent=2))
        return
    from joulelab.cli.console import print_answer
    from joulelab.report.tables.log_tables import codecarbon_grid, codecarbon_result

    notes = [f"Note: {text}." for text in log.notes]
    print_answer(codecarbon_result(log), [codecarbon_grid(log)], [f"Times: {log.clock}.", *notes])


FORMATS = ("png", "svg")


def plot(
    source: Annotated[
        str,
        typer.Argument(
            metavar="LOG|RUN", help="Log file, or a run: id, directory, or `last`.", autocompletion=complete_runs
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Output directory (default: next to the log, or in the run directory)."
        ),
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="png, svg, or both.")] = "png,svg",
    x: Annotated[Literal["elapsed", "wall"], typer.Option("--x", help="Elapsed time or time of day.")] = "elapsed",
    time_zone: Annotated[
        str | None, typer.Option("--time-zone", metavar="ZONE", help="Time zone of timestamps without offset.")
    ] = None,
    period: Annotated[
        float | None, typer.Option("--period", metavar="S", help="Seconds between readings without timestamps.")
    ] = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Plot power, GPU utilization, GPU memory and CPU utilization over time, and write summary.json."""
    require_extra("joulelab plot", "report")
    wanted = _formats(formats)
    if period is not None and not 0 < period < float("inf"):
        raise UsageError(f"--period {period:g} is not a number above 0")
    from joulelab.meter.importers.log_energy import IdleGiven, figures, summary_data

    log, title, folder = _load(source, runs_dir, time_zone, period)
    if x == "wall" and not log.has_wall:
        raise UsageError("--x wall needs times of day, which this log does not have", f"its times: {log.clock}")
    rows = figures(log, IdleGiven())
    folder = out or folder
    from joulelab.report.figures.power_figures import draw
    from joulelab.runs.paths import write_json

    try:
        files, empty = draw(log, folder, wanted, x, title)
        data: dict[str, object] = {"source": source, "figures": [path.name for path in files], "not_in_log": empty}
        data |= summary_data(log, rows)
        write_json(folder / "summary.json", data)
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror or error}") from None
    _print_files(folder, files, empty, data, as_json)


def _print_files(folder: Path, files: list[Path], empty: list[str], data: dict[str, object], as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(data, indent=2))
        return
    for path in (*files, folder / "summary.json"):
        print(path)
    if empty:
        note(f"not plotted (not in the log): {', '.join(empty)}")


def _formats(text: str) -> list[str]:
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in FORMATS:
            raise UsageError(f"unknown --format '{name}'", f"known: {', '.join(FORMATS)}")
    if not names:
        raise UsageError("--format is empty", f"known: {', '.join(FORMATS)}")
    return list(dict.fromkeys(names))


def _load(source: str, runs_dir: Path | None, zone: str | None, period: float | None) -> tuple[PowerLog, str, Path]:
    """The log, its title, and the default output directory."""
    from joulelab.meter.importers.convert import read_power_log
    from joulelab.meter.importers.power_log import TimeRule

    path = Path(source)
    if path.is_file():
        log = read_power_log(path, TimeRule(zone, period), "a plot")
        return log, path.name, path.with_name(f"{path.stem}-plots")
    from joulelab.errors import NotFoundError
    from joulelab.runs.paths import RunPaths
    from joulelab.runs.store import find_folder, store_root

    store = store_root(runs_dir)
    try:
        folder = find_folder(store, source)
    except NotFoundError as error:
        raise NotFoundError(f"'{source}' is neither a file nor a run: {error.message}", error.hint) from None
    if (folder / "group.json").exists():
        from joulelab.runs.groups import run_folders_of

        newest = run_folders_of(store, [str(folder)])[-1].name
        raise UsageError(f"{folder.name} is a group of runs", f"plot one of them: joulelab plot {newest}")
    from joulelab.meter.importers.joulelab_jsonl import read_files

    traces = [trace for _, _, trace in RunPaths(folder).traces()]
    if not traces:
        raise UsageError(f"{folder.name} has no trace to plot")
    return read_files(traces, TimeRule(zone, period)), folder.name, folder / "plots"
