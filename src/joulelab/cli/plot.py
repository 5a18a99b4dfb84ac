"""`joulelab plot`: a log or a run as pictures, and its figures as one JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from joulelab.cli.options import AsJson, RunsDir
from joulelab.errors import UsageError

if TYPE_CHECKING:
    from joulelab.meter.importers.power_log import PowerLog

FORMATS = ("png", "svg")


def plot(
    source: Annotated[str, typer.Argument(metavar="LOG|RUN", help="A log file, or a run: its id, folder, or `last`.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Where to write (default: next to the log, or in the run's folder)."
        ),
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="png, svg, or both.")] = "png,svg",
    x: Annotated[Literal["elapsed", "wall"], typer.Option("--x", help="Time since the start, or of day.")] = "elapsed",
    time_zone: Annotated[
        str | None, typer.Option("--time-zone", metavar="ZONE", help="Zone of stamps without an offset.")
    ] = None,
    period: Annotated[
        float | None, typer.Option("--period", metavar="S", help="Seconds between readings that have no stamps.")
    ] = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Draw power, GPU utilisation, GPU memory and CPU utilisation over time, and write summary.json beside them."""
    wanted = _formats(formats)
    if period is not None and not 0 < period < float("inf"):
        raise UsageError(f"--period {period:g} is not a number above 0")
    from joulelab.meter.importers.log_energy import IdleGiven, figures, summary_data

    log, title, folder = _load(source, runs_dir, time_zone, period)
    if x == "wall" and not log.has_wall:
        raise UsageError("this log has no times of day, so --x wall cannot be drawn", f"its times: {log.clock}")
    rows = figures(log, IdleGiven())
    folder = out or folder
    from joulelab.report.log_figures import draw
    from joulelab.runs.json_file import write_json

    try:
        files, empty = draw(log, folder, wanted, x, title)
        data: dict[str, object] = {"source": source, "figures": [path.name for path in files], "not_in_log": empty}
        data |= summary_data(log, rows)
        write_json(folder / "summary.json", data)
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror or error}") from None
    _tell(folder, files, empty, data, as_json)


def _tell(folder: Path, files: list[Path], empty: list[str], data: dict[str, object], as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(data, indent=2))
        return
    for path in (*files, folder / "summary.json"):
        print(path)
    if empty:
        import sys

        print(f"not drawn, because the log has nothing for it: {', '.join(empty)}", file=sys.stderr)


def _formats(text: str) -> list[str]:
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in FORMATS:
            raise UsageError(f"--format '{name}' is not known", f"known: {', '.join(FORMATS)}")
    if not names:
        raise UsageError("--format names no format", f"known: {', '.join(FORMATS)}")
    return list(dict.fromkeys(names))


def _load(source: str, runs_dir: Path | None, zone: str | None, period: float | None) -> tuple[PowerLog, str, Path]:
    """The log, its title, and where its figures go by default."""
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
        from joulelab.runs.selection import run_folders_of

        newest = run_folders_of(store, [str(folder)])[-1].name
        raise UsageError(f"{folder.name} is a group of runs", f"plot one of them, as `joulelab plot {newest}`")
    from joulelab.meter.importers.joulelab_jsonl import read_files

    traces = [trace for _, _, trace in RunPaths(folder).traces()]
    if not traces:
        raise UsageError(f"{folder.name} has no trace to plot")
    return read_files(traces, TimeRule(zone, period)), folder.name, folder / "plots"
