"""`joulelab import`: joules out of logs that others wrote, with every assumption stated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joulelab.cli.options import AsJson
from joulelab.errors import UsageError

if TYPE_CHECKING:
    from joulelab.meter.importers.emissions_csv import CodeCarbonLog
    from joulelab.meter.importers.power_log import PowerLog


def import_log(
    file: Annotated[
        Path, typer.Argument(help="The log, or a run's folder for its trace; its kind is told by what stands in it.")
    ],
    time_zone: Annotated[
        str | None,
        typer.Option("--time-zone", metavar="ZONE", help="Zone of stamps without an offset: Europe/Berlin, +02:00."),
    ] = None,
    period: Annotated[
        float | None, typer.Option("--period", metavar="S", help="Seconds between readings that have no stamps.")
    ] = None,
    idle: Annotated[
        str | None,
        typer.Option("--idle", metavar="FROM..TO", help="The idle stretch: seconds of the log, or two times."),
    ] = None,
    idle_watts: Annotated[float | None, typer.Option("--idle-watts", metavar="W", help="The idle power.")] = None,
    latency_ms: Annotated[
        float | None, typer.Option("--latency-ms", metavar="L", help="Give energy per inference of this latency.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="TRACE.jsonl", help="Also write the log as a trace of ours.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read a monitor's log and print energy per GPU: by trapezoid over power, and by counter where it has one.

    Reads JSONL of `joulelab monitor` and of earlier monitors, `nvidia-smi dmon` text, `nvidia-smi --query-gpu` CSV and
    CodeCarbon's emissions.csv.

    Example, power while DeiT-B runs at 4.37 ms per image, idle before and after found in the log:

      joulelab import power_usage.csv --latency-ms 4.37
    """
    _check(period, idle, idle_watts, latency_ms)
    from joulelab.meter.importers.convert import read_log
    from joulelab.meter.importers.emissions_csv import CodeCarbonLog
    from joulelab.meter.importers.power_log import TimeRule

    log = read_log(file, TimeRule(time_zone, period))
    if isinstance(log, CodeCarbonLog):
        asked = {"--idle": idle, "--idle-watts": idle_watts, "--latency-ms": latency_ms, "--out": out}
        for option in (name for name, value in asked.items() if value is not None):
            raise UsageError(f"{option} needs power over time; CodeCarbon's file has totals of whole runs only")
        _print_codecarbon(log, as_json)
        return
    _print_log(log, file, idle, idle_watts, latency_ms, as_json)
    if out is not None:
        import sys

        from joulelab.meter.importers.convert import write_trace

        write_trace(log, file, out)
        print(f"trace: {out}", file=sys.stderr)


def _check(period: float | None, idle: str | None, idle_watts: float | None, latency_ms: float | None) -> None:
    for option, value in (("--period", period), ("--latency-ms", latency_ms)):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{option} {value:g} is not a number above 0")
    if idle_watts is not None and not 0 <= idle_watts < float("inf"):
        raise UsageError(f"--idle-watts {idle_watts:g} is not a power")
    if idle is not None and idle_watts is not None:
        raise UsageError("--idle and --idle-watts both say what idle is", "give one of them")


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
    from joulelab.cli.console import print_result
    from joulelab.report.grid import to_rich
    from joulelab.report.log_tables import log_grid, log_sentences

    print_result(to_rich(log_grid(log, rows)), *log_sentences(log, rows))


def _print_codecarbon(log: CodeCarbonLog, as_json: bool) -> None:
    if as_json:
        import json
        from dataclasses import asdict

        print(json.dumps({**asdict(log), "label": "CodeCarbon's own figures; _j in joules"}, indent=2))
        return
    from joulelab.cli.console import print_result
    from joulelab.report.grid import to_rich
    from joulelab.report.log_tables import codecarbon_grid

    notes = [f"Note: {note}." for note in log.notes]
    print_result(to_rich(codecarbon_grid(log)), f"Times: {log.clock}.", *notes)
