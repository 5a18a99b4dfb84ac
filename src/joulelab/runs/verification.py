"""Every joule of a record computed again from its trace and marks, and set beside what the record says.

The functions are those that wrote the record, so an honest archive agrees to the last digits; another version of numpy
may round the last of them otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from joulelab.errors import JoulelabError
from joulelab.meter.figures import EnergyFigure
from joulelab.runs.artifacts import read_bill
from joulelab.runs.assemble import assemble
from joulelab.runs.json_file import read_json
from joulelab.runs.measure_result import conclude
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import EnergyByComponent, RunRecord, StageRecord
from joulelab.runs.store import read_record
from joulelab.runs.summary import flat_summary

Verdict = Literal["matches", "differs", "cannot be recomputed", "not in the archive"]
TOLERANCE_REL = 1e-9
SUMMARY = RunPaths(Path()).summary.name
Figures = dict[str, float | None]


@dataclass(frozen=True)
class FigureCheck:
    run_id: str
    figure: str
    recorded: float | None
    recomputed: float | None
    verdict: Verdict
    reason: str = ""

    @property
    def good(self) -> bool:
        """What another run has paid for is not this archive's to prove."""
        return self.verdict in ("matches", "not in the archive")


def verify_runs(folders: list[Path]) -> list[FigureCheck]:
    """Every figure of every run; inherited ones against the run that made them, where it is here too."""
    again: dict[str, RunRecord] = {}
    checks: list[FigureCheck] = []
    records = {folder: read_record(RunPaths(folder)) for folder in folders}
    for folder, record in records.items():
        found = _recompute(RunPaths(folder), record)
        if isinstance(found, RunRecord):
            again[record.run_id] = found
        checks += _compare(RunPaths(folder), record, found)
    for record in records.values():
        checks += _inherited(record, again)
    return checks


def _recompute(paths: RunPaths, record: RunRecord) -> RunRecord | str:
    """The record from trace and marks, or why there can be none."""
    there = {(host, attempt) for host, attempt, _ in paths.traces()}
    gone = [f"{row.host}.{row.number}" for row in record.attempts if (row.host, row.number) not in there]
    if gone:
        return f"the trace {', '.join(gone)} is missing"
    try:
        found = assemble(paths, record.status, record.error)
        return conclude(found, paths) if record.spec.get("pipeline") == "measure" else found
    except (JoulelabError, OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _compare(paths: RunPaths, record: RunRecord, found: RunRecord | str) -> Iterator[FigureCheck]:
    recorded = {**_figures(record), **_bill_figures(paths), **_file_figures(paths)}
    if isinstance(found, str):
        for name, value in recorded.items():
            if value is not None:
                yield FigureCheck(record.run_id, name, value, None, "cannot be recomputed", found)
        return
    recomputed = {**_figures(found), **_told_again(found)}
    recomputed |= {
        name: recomputed.get(name.replace("bill of ", "artefact ")) for name in recorded if name.startswith("bill of ")
    }
    for name in dict.fromkeys((*recorded, *recomputed)):
        one, other = recorded.get(name), recomputed.get(name)
        if one is not None or other is not None:
            yield FigureCheck(record.run_id, name, one, other, "matches" if _same(one, other) else "differs")


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=TOLERANCE_REL, abs_tol=1e-9)


def _figures(record: RunRecord) -> Figures:
    """Every joule of a record by a name that says where it stands."""
    found: Figures = {}
    if record.totals is not None:
        found["total"] = record.totals.energy_j
        found["total, shown"] = record.totals.best.energy_j
        found["total, above idle"] = record.totals.above_idle_j
        found |= _by_component("total", record.totals.components)
    for stage in record.stages:
        found[stage.name] = stage.energy_j
        found[f"{stage.name}, shown"] = stage.best.energy_j
        found[f"{stage.name}, above idle"] = stage.above_idle_j
        found |= _by_component(stage.name, stage.energy)
    for attempt in record.attempts:
        found |= _by_component(f"attempt {attempt.number} on {attempt.host}", attempt.energy)
    found |= {f"result {name}": result.value for name, result in record.results.items() if name.endswith("_j")}
    for ancestor in record.lineage:
        if ancestor.key in record.made:
            found |= _by_name(f"artefact {ancestor.name}", ancestor.energy)
    return found


def _bill_figures(paths: RunPaths) -> Figures:
    found: Figures = {}
    for folder in sorted(paths.artifacts.glob("*")):
        bill = read_bill(folder)
        if bill is not None and not bill.provisional and bill.artefact.made_by == paths.run_id:
            found |= _by_name(f"bill of {bill.artefact.name}", bill.artefact.energy)
    return found


def _file_figures(paths: RunPaths) -> Figures:
    """The same joules as the smaller files beside the record tell them."""
    flat = read_json(paths.summary) if paths.summary.exists() else {}
    found = {f"{SUMMARY}: {name}": value for name, value in flat.items() if name.endswith("_j")}
    for path in sorted(paths.stages.glob("*.json")):
        stage = StageRecord.model_validate(read_json(path))
        found[f"stages: {stage.name}"] = stage.best.energy_j
    return found


def _told_again(record: RunRecord) -> Figures:
    flat = {f"{SUMMARY}: {name}": value for name, value in flat_summary(record).items() if name.endswith("_j")}
    return flat | {f"stages: {stage.name}": stage.best.energy_j for stage in record.stages}


def _by_component(of: str, energy: EnergyByComponent) -> Figures:
    return _by_name(of, {name: getattr(energy, name) for name in EnergyByComponent.model_fields})


def _by_name(of: str, figures: Mapping[str, EnergyFigure]) -> Figures:
    found: Figures = {}
    for name, figure in figures.items():
        found[f"{of}, {name.replace('_', ' ')}"] = figure.energy_j
        found[f"{of}, {name.replace('_', ' ')} ±"] = figure.half_width_j if figure.energy_j is not None else None
    return found


def _inherited(record: RunRecord, again: Mapping[str, RunRecord]) -> Iterator[FigureCheck]:
    """What others made and this run used: its joules are their runs'."""
    for ancestor in record.inherited:
        maker = again.get(ancestor.made_by)
        made = {other.key: other for other in maker.lineage} if maker else {}
        for name, recorded in _by_name(f"inherited {ancestor.name}", ancestor.energy).items():
            if recorded is None or name.endswith("±"):
                continue
            if ancestor.key not in made:
                reason = f"made by {ancestor.made_by}"
                yield FigureCheck(record.run_id, name, recorded, None, "not in the archive", reason)
                continue
            other = _by_name(f"inherited {ancestor.name}", made[ancestor.key].energy).get(name)
            verdict: Verdict = "matches" if _same(recorded, other) else "differs"
            yield FigureCheck(record.run_id, name, recorded, other, verdict, f"made by {ancestor.made_by}")
