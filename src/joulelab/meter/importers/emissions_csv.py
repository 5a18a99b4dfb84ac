"""CodeCarbon's emissions.csv: its own figures, reported under its own name.

A row is a run, in kWh. RAM is a constant per module and the CPU often a model, so nothing here is called measured and
nothing is added to our joules. Rows of one `run_id` are cumulative: the last one contains the run.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from joulelab.meter.importers.power_log import number, stamp_reader
from joulelab.units import J_PER_KWH

FORMAT = "CodeCarbon emissions.csv"
ENERGIES = {"energy_j": "energy_consumed", "cpu_j": "cpu_energy", "gpu_j": "gpu_energy", "ram_j": "ram_energy"}
"""Our names and CodeCarbon's, which are in kWh; the first is the total."""


def energies_j(value_of: Callable[[str], float | None]) -> dict[str, float | None]:
    """Total, CPU, GPU and RAM energy in J, from the values under CodeCarbon's own names, in kWh."""
    kwh = {name: value_of(theirs) for name, theirs in ENERGIES.items()}
    return {name: None if value is None else value * J_PER_KWH for name, value in kwh.items()}


@dataclass(frozen=True)
class CodeCarbonRun:
    run_id: str
    project: str
    timestamp: str
    duration_s: float | None
    cpu_j: float | None
    gpu_j: float | None
    ram_j: float | None
    total_j: float | None
    emissions_kg: float | None
    where: str

    @property
    def mean_power_w(self) -> float | None:
        return self.total_j / self.duration_s if self.total_j is not None and self.duration_s else None


@dataclass(frozen=True)
class CodeCarbonLog:
    clock: str
    runs: tuple[CodeCarbonRun, ...]
    notes: tuple[str, ...]
    format: str = FORMAT


def looks_like(lines: Sequence[str]) -> bool:
    names = [cell.strip() for cell in lines[0].split(",")]
    return "energy_consumed" in names and "emissions" in names


def read(lines: Sequence[str], zone: str | None) -> CodeCarbonLog:
    rows = [row for row in csv.DictReader(lines) if number(row.get("energy_consumed")) is not None]
    whole = {row.get("run_id") or f"row {position}": row for position, row in enumerate(rows, start=1)}
    notes = ["energies are CodeCarbon's own figures: its RAM is a constant, its CPU may be a model"]
    if len(whole) < len(rows):
        notes.append(f"{len(rows) - len(whole)} earlier rows of the same runs are contained in their last row")
    stamps = stamp_reader(zone)
    for row in whole.values():
        stamps.seconds(row.get("timestamp"), None)
    runs = tuple(_run(run_id, row) for run_id, row in whole.items())
    return CodeCarbonLog(clock=stamps.clock_text(), runs=runs, notes=(*notes, *stamps.notes()))


def _run(run_id: str, row: dict[str, str]) -> CodeCarbonRun:
    joules = energies_j(lambda name: number(row.get(name)))
    return CodeCarbonRun(
        run_id=run_id,
        project=row.get("project_name") or "",
        timestamp=row.get("timestamp") or "",
        duration_s=number(row.get("duration")),
        cpu_j=joules["cpu_j"],
        gpu_j=joules["gpu_j"],
        ram_j=joules["ram_j"],
        total_j=joules["energy_j"],
        emissions_kg=number(row.get("emissions")),
        where=row.get("region") or row.get("country_name") or "",
    )
