"""CodeCarbon's files: its own figures, reported under its own name.

Energies are in kWh. RAM is a constant per module and the CPU often a model, so nothing here is called measured and
nothing is added to our joules. Three kinds of file have the same columns, and the content decides between them: with
`task_name` a row is a task with its own energy; rows of one `run_id` with growing energy are cumulative, and the last
one contains the run; other rows are separate runs.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from joulelab.meter.importers.power_log import ReportedEnergy, RunLog, StageLog, amount, stamp_reader
from joulelab.units import J_PER_KWH, energy_text, plural

FORMAT = "CodeCarbon emissions.csv"
ENERGIES = {"energy_j": "energy_consumed", "cpu_j": "cpu_energy", "gpu_j": "gpu_energy", "ram_j": "ram_energy"}
"""Our names and CodeCarbon's, which are in kWh; the first is the total."""
_POWERS = ("cpu_power", "gpu_power", "ram_power")
# With tasks CodeCarbon writes the duration of the last task next to the energy of the whole run: energy over duration
# is then many times the power that the same row states.
_IMPOSSIBLE_FACTOR = 5.0
_NUMBERED = re.compile(r"[\s_#-]+\d+$")  # `step_7`, `Forward pass #7`; but `phase1` and `phase2` are two names


def energies_j(value_of: Callable[[str], float | None]) -> dict[str, float | None]:
    """Total, CPU, GPU and RAM energy in J, from the values under CodeCarbon's own names, in kWh."""
    kwh = {name: value_of(theirs) for name, theirs in ENERGIES.items()}
    return {name: None if value is None else value * J_PER_KWH for name, value in kwh.items()}


@dataclass(frozen=True)
class CodeCarbonTask:
    """All tasks of one name (`Forward pass #1`, `Forward pass #2`, ...) together."""

    name: str
    count: int
    duration_s: float
    total_j: float
    emissions_kg: float


@dataclass(frozen=True)
class CodeCarbonRun:
    run_id: str
    project: str
    timestamp: str
    duration_s: float | None
    """None where the file's duration cannot be that of its energy."""
    cpu_j: float | None
    gpu_j: float | None
    ram_j: float | None
    total_j: float | None
    emissions_kg: float | None
    where: str
    tasks: tuple[CodeCarbonTask, ...] = ()

    @property
    def mean_power_w(self) -> float | None:
        return self.total_j / self.duration_s if self.total_j is not None and self.duration_s else None


@dataclass(frozen=True)
class CodeCarbonLog:
    clock: str
    runs: tuple[CodeCarbonRun, ...]
    notes: tuple[str, ...]
    format: str = FORMAT


Cells = dict[str, str]


def looks_like(lines: Sequence[str]) -> bool:
    names = [cell.strip() for cell in lines[0].split(",")]
    return "energy_consumed" in names and "emissions" in names


def read(lines: Sequence[str], zone: str | None) -> CodeCarbonLog:
    table = list(csv.DictReader(lines))
    rows = [row for row in table if amount(row.get("energy_consumed")) is not None]
    stamps = stamp_reader(zone)
    for row in rows:
        stamps.seconds(row.get("timestamp"), None)
    by_run: dict[str, list[Cells]] = {}
    for position, row in enumerate(rows, start=1):
        by_run.setdefault(row.get("run_id") or f"row {position}", []).append(row)
    notes = ["energies are CodeCarbon's own figures: RAM is a constant, and CPU may be modeled"]
    if len(rows) < len(table):
        left_out = plural(len(table) - len(rows), "row")
        notes.append(f"{left_out} left out: no valid energy_consumed")
    runs: list[CodeCarbonRun] = []
    for run_id, own in by_run.items():
        found, how = _run_of(run_id, own)
        runs += found
        notes += [how] if how else []
    return CodeCarbonLog(clock=stamps.clock_text(), runs=tuple(runs), notes=(*dict.fromkeys(notes), *stamps.notes()))


def _run_of(run_id: str, rows: list[Cells]) -> tuple[list[CodeCarbonRun], str]:
    """The runs that rows of one `run_id` are, and how they were read."""
    if any(row.get("task_name") for row in rows):
        how = f"{plural(len(rows), 'row')} of run {run_id[:12]} are tasks, each with its own energy; they are added"
        return [_of_tasks(run_id, rows)], how
    if len(rows) == 1 or _grow(rows):
        found = _run(run_id, rows[-1])
        how = f"{len(rows) - 1} earlier rows of run {run_id[:12]} are contained in its last row (cumulative)"
        stated_s = amount(rows[-1].get("duration"))
        if found.duration_s is None and stated_s is None:
            how = f"run {run_id[:12]} has no duration"
        elif found.duration_s is None:
            how = (
                f"run {run_id[:12]}: {energy_text(found.total_j)} in the {stated_s:g} s of its duration column is "
                "far above the power stated in the same row; the duration is that of a task and is not used"
            )
            return [found], how
        return [found], how if len(rows) > 1 else ""
    how = f"energy of the {len(rows)} rows of run {run_id[:12]} does not grow: each row is read as a separate run"
    return [_run(f"{run_id} row {number_}", row) for number_, row in enumerate(rows, start=1)], how


def _grow(rows: list[Cells]) -> bool:
    """Whether each row contains the one before: energy and duration never fall."""
    columns = [[amount(row.get(name)) or 0.0 for row in rows] for name in ("energy_consumed", "duration")]
    return all(later >= earlier for column in columns for earlier, later in pairwise(column))


def _sum(rows: Iterable[Cells], name: str) -> float:
    return sum(amount(row.get(name)) or 0.0 for row in rows)


def _of_tasks(run_id: str, rows: list[Cells]) -> CodeCarbonRun:
    by_task: dict[str, list[Cells]] = {}
    for row in rows:
        by_task.setdefault(_NUMBERED.sub("", row.get("task_name") or "") or "task", []).append(row)
    tasks = tuple(
        CodeCarbonTask(
            name,
            len(own),
            _sum(own, "duration"),
            _sum(own, "energy_consumed") * J_PER_KWH,
            _sum(own, "emissions"),
        )
        for name, own in by_task.items()
    )
    joules = energies_j(lambda name: _sum(rows, name) if name in rows[0] else None)
    last = _run(run_id, rows[-1])
    return CodeCarbonRun(
        run_id=run_id,
        project=last.project,
        timestamp=last.timestamp,
        duration_s=_sum(rows, "duration"),
        cpu_j=joules["cpu_j"],
        gpu_j=joules["gpu_j"],
        ram_j=joules["ram_j"],
        total_j=joules["energy_j"],
        emissions_kg=_sum(rows, "emissions"),
        where=last.where,
        tasks=tasks,
    )


def _run(run_id: str, row: Cells) -> CodeCarbonRun:
    joules = energies_j(lambda name: amount(row.get(name)))
    duration_s = amount(row.get("duration"))
    powers = [power for name in _POWERS if (power := amount(row.get(name))) is not None]
    total_j = joules["energy_j"]
    if duration_s and total_j and sum(powers) and total_j > _IMPOSSIBLE_FACTOR * sum(powers) * duration_s:
        duration_s = None
    return CodeCarbonRun(
        run_id=run_id,
        project=row.get("project_name") or "",
        timestamp=row.get("timestamp") or "",
        duration_s=duration_s,
        cpu_j=joules["cpu_j"],
        gpu_j=joules["gpu_j"],
        ram_j=joules["ram_j"],
        total_j=total_j,
        emissions_kg=amount(row.get("emissions")),
        where=row.get("region") or row.get("country_name") or "",
    )


def run_logs(log: CodeCarbonLog, path: Path, zone: str | None) -> list[RunLog]:
    """One run for each of CodeCarbon's, with a stage for each kind of task; runs without a duration are left out."""
    found = []
    for run in log.runs:
        if not run.duration_s or run.total_j is None:
            continue
        named = run.project if run.project and run.project != "codecarbon" else path.stem
        written_s = stamp_reader(zone).seconds(run.timestamp or None, None)
        found.append(
            RunLog(
                name=named,
                format=log.format,
                clock=log.clock,
                stages=tuple(_stages(run, None if written_s is None else written_s - run.duration_s)),
                files=(path,),
                notes=log.notes,
            )
        )
    return found


def _stages(run: CodeCarbonRun, started_s: float | None) -> Iterable[StageLog]:
    parts = {"cpu_j": run.cpu_j, "gpu_j": run.gpu_j, "ram_j": run.ram_j}
    whole = CodeCarbonTask(run.project or "run", 1, run.duration_s or 0.0, run.total_j or 0.0, run.emissions_kg or 0.0)
    for position, task in enumerate(run.tasks or (whole,)):
        yield StageLog(
            name=f"codecarbon.{task.name.lower().replace(' ', '-')}",
            role="student",
            activity="run",
            duration_s=task.duration_s,
            started_s=started_s if position == 0 else None,
            energies=(ReportedEnergy("codecarbon", task.total_j, "estimated"),),
            facts={
                "emissions_kg": task.emissions_kg,
                "rows": task.count,
                **({} if run.tasks else {name: value for name, value in parts.items() if value is not None}),
            },
        )
