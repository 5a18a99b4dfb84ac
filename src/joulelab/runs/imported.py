"""Runs made from someone else's logs (`joulelab import`): a trace, marks and a record as of any other run.

Figures follow from the trace by the same functions as those of a measured run, so that every command takes imported
runs. What the log does not have stays missing: no environment snapshot, no interval of a stated total, no time between
stages. The spec states the files, and every grade has the check `imported`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from joulelab.clock import NS
from joulelab.errors import UsageError
from joulelab.meter.importers.convert import (
    START_S,
    counter_shift_ns,
    placed_stages,
    stated,
    write_stated_trace,
    write_trace,
)
from joulelab.meter.importers.power_log import RunLog, StageLog
from joulelab.meter.trace import LineFile, header
from joulelab.runs.attempt import close_run, create_run
from joulelab.runs.attempt_data import readings_path
from joulelab.runs.context import RunContext
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import METHOD_VERSION, RunRecord
from joulelab.runs.spec import RunSpec, check
from joulelab.runs.store import compact_run, run_folders

HOST = "imported"


class ImportSpec(RunSpec):
    """Settings of a run that `joulelab import` made from logs of other tools."""

    pipeline: Literal["import"] = "import"
    """Always `import`."""
    files: tuple[str, ...] = ()
    """Names of the imported files."""
    digests: tuple[str, ...] = ()
    """SHA-256 of each file."""
    format: str = ""
    """What kind of log it is."""
    clock: str = ""
    """Where its times come from."""


def refuse(run: RunContext) -> NoReturn:
    raise UsageError("an imported run cannot be started again", "run `joulelab import PATH` for the log")


def file_digests(files: Sequence[Path]) -> tuple[str, ...]:
    return tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)


def find_imported_run(store: Path, digests: Sequence[str]) -> Path | None:
    """The newest run of the store that was made from files with the same content."""
    for folder in reversed(run_folders(store)):
        with suppress(OSError, UnicodeDecodeError):
            text = (folder / "config.yaml").read_text()
            # Most runs were not imported; reading YAML takes longer than searching a text.
            if digests and digests[0] in text:
                settings = yaml.safe_load(text)
                if settings.get("pipeline") == "import" and tuple(settings.get("digests", ())) == tuple(digests):
                    return folder
    return None


def create_imported_run(
    store: Path,
    run: RunLog,
    name: str | None = None,
    idle_s: tuple[float, float] | None = None,
    interpolate_gaps: bool = False,
) -> tuple[RunPaths, RunRecord]:
    """Create a run in the store. `idle_s` is a segment of the log, in seconds, in which the machine was idle."""
    if not all(stage.power for stage in run.stages) or len(run.stages) > 1:
        run = replace(run, stages=tuple(stated(stage) for stage in run.stages))
    components = {energy.component for stage in run.stages for energy in stage.energies}
    only_codecarbon = components == {"codecarbon"}
    spec = check(
        {
            "name": (name or run.name)[:80],
            "pipeline": "import",
            "label": name or run.name,
            "files": tuple(str(path) for path in run.files),
            "digests": file_digests(run.files),
            "format": run.format,
            "clock": run.clock,
            "energy": {"total_energy_policy": "codecarbon" if only_codecarbon else "measured"},
        }
    )
    paths = create_run(store, spec)
    trace = paths.trace(HOST, 1)
    power = run.stages[0].power
    if power is not None:
        write_trace(power, run.files[0], trace, interpolate_gaps)
        shift_ns = counter_shift_ns(power)
    else:
        write_stated_trace(run, trace)
        shift_ns = 0
        _write_codecarbon(run, paths)
    _write_events(run, paths, idle_s, shift_ns)
    complete = all(stage.complete for stage in run.stages)
    record = close_run(paths, "done" if complete else "truncated")
    compact_run(paths)
    return paths, record


def _write_codecarbon(run: RunLog, paths: RunPaths) -> None:
    """CodeCarbon's totals as the cumulative readings that it writes during a run, one at each end of a stage."""
    totals = [
        (begin_ns, end_ns, sum(energy.energy_j for energy in stage.energies if energy.component == "codecarbon"))
        for begin_ns, end_ns, stage in placed_stages(run)
    ]
    if not any(joules for _, _, joules in totals):
        return
    file = LineFile(readings_path(paths.folder, HOST, 1))
    sum_j = 0.0
    file.append({"kind": "codecarbon", "mono_ns": totals[0][0], "energy_j": 0.0})
    for _, end_ns, joules in totals:
        sum_j += joules
        file.append({"kind": "codecarbon", "mono_ns": end_ns, "energy_j": sum_j})
    file.close()


def _write_events(run: RunLog, paths: RunPaths, idle_s: tuple[float, float] | None, shift_ns: int) -> None:
    file = LineFile(paths.events(HOST, 0, 1))
    head = header(imported=True)
    file.append({**head, "boot_id": HOST})
    stages = list(_with_idle(run, idle_s))
    begin_ns, end_ns = stages[0][0] - shift_ns, stages[-1][1] - shift_ns
    file.append({"kind": "run", "mono_ns": begin_ns, "edge": "begin", "method_version": METHOD_VERSION})
    for text in (f"imported from {_listed(run.files)} ({run.format})", *run.notes):
        file.append({"kind": "note", "mono_ns": begin_ns, "text": text})
    if len(run.stages) > 1 and any(stage.started_s is not None for stage in run.stages):
        text = "stages are placed one after the other; their own start times are in the findings"
        file.append({"kind": "note", "mono_ns": begin_ns, "text": text})
    status: dict[str, str] = {}
    for start_ns, stop_ns, stage in stages:
        named: dict[str, Any] = {"stage": stage.name}
        opened = {"role": stage.role, "activity": stage.activity, "opened": stage.name not in status}
        file.append({"kind": "stage", "mono_ns": start_ns - shift_ns, "edge": "begin", **named, **opened})
        file.append({"kind": "stage", "mono_ns": stop_ns - shift_ns, "edge": "end", **named})
        if stage.tokens:
            counts = {"tokens": stage.tokens}
            file.append({"kind": "progress", "mono_ns": stop_ns - shift_ns, **named, "counts": counts})
        facts = {**stage.facts} | ({"started_s": stage.started_s} if stage.started_s is not None else {})
        if facts:
            file.append(
                {"kind": "tracker", "mono_ns": stop_ns - shift_ns, **named, "name": "imported", "values": facts}
            )
        status[stage.name] = "done" if stage.complete else "truncated"
    for stage_name, ended in status.items():
        file.append({"kind": "stage_closed", "mono_ns": end_ns, "stage": stage_name, "status": ended})
    file.append({"kind": "run", "mono_ns": end_ns, "edge": "end", "status": "done"}, sync=True)
    file.close()


def _with_idle(run: RunLog, idle_s: tuple[float, float] | None) -> list[tuple[int, int, StageLog]]:
    """The stages in time; the idle segment of a power log is a separate stage, outside the totals."""
    placed = list(placed_stages(run))
    if idle_s is None or run.stages[0].power is None:
        return placed
    (begin_ns, end_ns, work), start_ns = placed[0], round(START_S * NS)
    low = max(begin_ns, start_ns + round(idle_s[0] * NS))
    high = min(end_ns, start_ns + round(idle_s[1] * NS))
    idle = StageLog("idle.before", "idle", "idle", (high - low) / NS)
    parts = [(begin_ns, low, work), (low, high, idle), (high, end_ns, work)]
    return [part for part in parts if part[1] > part[0]]


def _listed(files: Sequence[Path]) -> str:
    names = [path.name for path in files]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
