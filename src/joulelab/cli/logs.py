"""`joulelab import` and `joulelab plot`: runs and figures from logs of other tools, and plots of runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from joulelab.cli.options import AsJson, RunsDir, complete_runs, note
from joulelab.errors import UsageError
from joulelab.lookup import require_extra

if TYPE_CHECKING:
    from joulelab.meter.importers.emissions_csv import CodeCarbonLog
    from joulelab.meter.importers.power_log import PowerLog, RunLog, TimeRule
    from joulelab.report.tables.grid import Grid


def import_log(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Log files, or folders written by other tools; formats are detected."),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--name", metavar="NAME", help="Name of the run; comparisons treat runs with the same name as repeats."
        ),
    ] = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="Only print; create no run.")] = False,
    one_run: Annotated[
        bool, typer.Option("--one-run", help="Create one run with all stages of all paths instead of one run per path.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Create a run even if the same content was imported before.")
    ] = False,
    interpolate_gaps: Annotated[
        bool,
        typer.Option(
            "--interpolate-gaps", help="Fill gaps between readings; otherwise energy with gaps is a lower bound."
        ),
    ] = False,
    time_zone: Annotated[
        str | None,
        typer.Option(
            "--time-zone", metavar="ZONE", help="Time zone of timestamps without an offset: Europe/Berlin, +02:00."
        ),
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
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Import logs of other tools as runs and print their energy.

    Reads JSONL of `joulelab monitor`, of earlier monitors and with nested GPUs, `nvidia-smi dmon` text, `nvidia-smi
    --query-gpu` CSV, CSV with power columns (power_log.csv, per-step tables), CodeCarbon's files, and stage JSON,
    experiment_summary.json and stage_metrics.csv of the distillation energy benchmark. An imported run works in
    `compare`, `bill`, `report`, `query` and `pack`.

    Examples:

      joulelab import logs/stages/kd_32b_to_1b --name kd

      joulelab import power_usage.csv --latency-ms 4.37 --no-run
    """
    _check(period, idle, idle_watts, latency_ms)
    from joulelab.meter.importers.power_log import TimeRule

    rule = TimeRule(time_zone, period)
    if len(paths) > 1:
        places = [path.resolve() for path in paths]
        for path in (path for path, place in zip(paths, places, strict=True) if places.count(place) > 1):
            raise UsageError(f"{path} was named twice", "name each log once, so that its energy is counted once")
        given = {"--idle": idle, "--idle-watts": idle_watts, "--latency-ms": latency_ms, "--out": out}
        for option in (flag for flag, value in given.items() if value is not None):
            raise UsageError(f"{option} applies to one log; {len(paths)} paths were given", "import them one by one")
    if no_run and (one_run or name or again):
        option = "--one-run" if one_run else "--name" if name else "--again"
        raise UsageError(f"--no-run creates no run, so {option} has no effect")
    # All paths are read before the first run is created: a bad one leaves nothing behind.
    read = [_read(path, rule, idle, idle_watts, latency_ms, out, interpolate_gaps) for path in paths]
    runs = [run for one in read for run in one.runs]
    if one_run and runs:
        from joulelab.meter.importers.convert import merged

        stated = {text for run in runs for text in run.notes}
        runs = [merged(runs, name or runs[0].name)]
        for text in runs[0].notes:
            if text not in stated:
                note(text)
    known: dict[Path, Path] = {}
    if not (no_run or again):
        known = _imported_before(runs, runs_dir)
        runs = [run for run in runs if run.files[0] not in known]
    answers = (
        [] if no_run else _create(runs, name, read[0].idle_s if len(read) == 1 else None, interpolate_gaps, runs_dir)
    )
    if as_json:
        import json

        created = [{"run_id": folder.name, "folder": str(folder), "energy": line} for folder, line in answers]
        data = read[0].data if len(read) == 1 else {"logs": [one.data for one in read]}
        before = [{"run_id": folder.name, "folder": str(folder), "file": str(file)} for file, folder in known.items()]
        print(json.dumps({**data, "created": created, "imported_before": before}, indent=2))
    else:
        from joulelab.cli.console import print_answer, wrapped

        for one in read:
            print_answer(one.result, one.grids, one.sentences)
        for folder, line in answers:
            print(wrapped(f"run {folder}: {line}", 4, sys.stdout))
        for file, folder in known.items():
            note(f"{file} was imported before, as {folder}; no run is created for it (--again creates one)")
        if not no_run and not answers and not known:
            note("no run was created: no entry has both a duration and an energy")
    if out is not None and read[0].power is not None:
        from joulelab.meter.importers.convert import write_trace

        source = read[0].runs[0].files[0] if read[0].runs else paths[0]
        write_trace(read[0].power, source, out, interpolate_gaps)
        note(f"trace: {out}")


@dataclass(frozen=True)
class _Imported:
    """What is printed of one path, and the runs that it becomes."""

    data: dict[str, Any]
    result: str
    grids: list[Grid]
    sentences: list[str]
    runs: list[RunLog]
    power: PowerLog | None = None
    idle_s: tuple[float, float] | None = None


def _read(
    path: Path,
    rule: TimeRule,
    idle: str | None,
    idle_watts: float | None,
    latency_ms: float | None,
    out: Path | None,
    interpolate_gaps: bool,
) -> _Imported:
    from joulelab.meter.importers.convert import power_run, read_folder, read_log
    from joulelab.meter.importers.emissions_csv import CodeCarbonLog, run_logs
    from joulelab.meter.importers.power_log import PowerLog

    is_run = path.is_dir() and ((path / "run.json").exists() or (path / "trace").is_dir())
    if path.is_dir() and not is_run:
        runs, notes = read_folder(path, rule)
        if len(runs) == 1 and runs[0].stages[0].power is not None:
            log: PowerLog | CodeCarbonLog | list[RunLog] = runs[0].stages[0].power
        else:
            log = runs
    else:
        log, runs, notes = read_log(path, rule), [], []
    if isinstance(log, PowerLog):
        runs = [] if is_run else runs or [power_run(log, path, path.stem)]
        found = _of_power(log, path, runs, idle, idle_watts, latency_ms, interpolate_gaps, is_run)
        return replace(found, sentences=[*found.sentences, *(f"Note: {text}." for text in notes)])
    given = {"--idle": idle, "--idle-watts": idle_watts, "--latency-ms": latency_ms, "--out": out}
    for option in (flag for flag, value in given.items() if value is not None):
        whose = (
            "CodeCarbon's file has only totals of whole runs"
            if isinstance(log, CodeCarbonLog)
            else "stage records have only totals"
        )
        raise UsageError(f"{option} needs power over time; {whose}")
    if isinstance(log, CodeCarbonLog):
        from dataclasses import asdict

        from joulelab.report.tables.log_tables import codecarbon_grid, codecarbon_result, codecarbon_task_grid

        data = {**asdict(log), "label": "CodeCarbon's own figures; _j in joules"}
        grids = [codecarbon_grid(log)] + ([codecarbon_task_grid(log)] if any(run.tasks for run in log.runs) else [])
        sentences = [f"Times: {log.clock}.", *(f"Note: {text}." for text in log.notes)]
        return _Imported(data, codecarbon_result(log), grids, sentences, run_logs(log, path, rule.zone))
    return _of_stages(log, path, notes)


def _of_power(
    log: PowerLog,
    path: Path,
    runs: list[RunLog],
    idle: str | None,
    idle_watts: float | None,
    latency_ms: float | None,
    interpolate_gaps: bool,
    is_run: bool,
) -> _Imported:
    from joulelab.meter.importers.log_energy import (
        IdleGiven,
        figures,
        parse_idle,
        require_energy,
        require_inference,
        summary_data,
        with_energy,
    )
    from joulelab.report.tables.log_tables import log_grid, log_result, log_sentences

    window_s = None if idle is None else parse_idle(idle, log)
    latency_s = None if latency_ms is None else latency_ms / 1000
    rows = with_energy(log, figures(log, IdleGiven(window_s, idle_watts), latency_s, interpolate_gaps))
    require_energy(log, rows)
    if latency_s is not None:
        require_inference(log, rows)
    sentences = log_sentences(log, rows)
    if is_run:
        sentences.append("This folder is already a run; no new run is created.")
    data = {"file": str(path), **summary_data(log, rows)}
    return _Imported(data, log_result(rows), [log_grid(log, rows)], sentences, runs, log, window_s)


def _of_stages(runs: list[RunLog], path: Path, notes: list[str]) -> _Imported:
    from dataclasses import asdict

    from joulelab.report.tables.log_tables import stage_log_grid
    from joulelab.units import plural

    texts = list(dict.fromkeys([*notes, *(note for run in runs for note in run.notes)]))
    stages = [stage for run in runs for stage in run.stages]
    data: dict[str, Any] = {
        "file": str(path),
        "formats": list(dict.fromkeys(run.format for run in runs)),
        "notes": texts,
        "stages": [
            {**{key: value for key, value in asdict(stage).items() if key != "power"}, "run": run.name}
            for run in runs
            for stage in run.stages
        ],
    }
    result = f"{plural(len(stages), 'stage')} in {plural(len(runs), 'run')} of {path.name}"
    sentences = [f"Times: {runs[0].clock}.", *(f"Note: {text}." for text in texts)]
    return _Imported(data, result, [stage_log_grid(runs)], sentences, runs)


def _imported_before(runs: list[RunLog], runs_dir: Path | None) -> dict[Path, Path]:
    """The first file of each run that the store has already, and that run's folder."""
    from joulelab.runs.imported import file_digests, find_imported_run
    from joulelab.runs.store import store_root

    found: dict[Path, Path] = {}
    for run in runs:
        folder = find_imported_run(store_root(runs_dir), file_digests(run.files))
        if folder is not None:
            found[run.files[0]] = folder
    return found


def _create(
    runs: list[RunLog],
    name: str | None,
    idle_s: tuple[float, float] | None,
    interpolate_gaps: bool,
    runs_dir: Path | None,
) -> list[tuple[Path, str]]:
    from joulelab.runs.imported import create_imported_run
    from joulelab.runs.measure.result import answer_line
    from joulelab.runs.store import store_root

    answers = []
    for run in runs:
        made, record = create_imported_run(store_root(runs_dir), run, name, idle_s, interpolate_gaps)
        answers.append((made.folder, answer_line(record)))
    return answers


def _check(period: float | None, idle: str | None, idle_watts: float | None, latency_ms: float | None) -> None:
    for option, value in (("--period", period), ("--latency-ms", latency_ms)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{option} {value:g} is not a number above 0")
    if idle_watts is not None and not 0 <= idle_watts < float("inf"):
        raise UsageError(f"--idle-watts {idle_watts:g} is not a power")
    if idle is not None and idle_watts is not None:
        raise UsageError("--idle and --idle-watts both set the idle power", "give one of them")


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
        str | None, typer.Option("--time-zone", metavar="ZONE", help="Time zone of timestamps without an offset.")
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
