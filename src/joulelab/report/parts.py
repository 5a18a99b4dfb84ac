"""Every run's joules in pieces: stage by stage, who paid, whether N students share it, and under each scope.

The page's charts and table all read this one list, so that a change of scope or of N moves them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from joulelab.report.comparison import ComparedRun, Comparison, Row
from joulelab.report.joules import Part, missing_time_rel
from joulelab.runs.record import RunRecord
from joulelab.stats import t_quantile

SCOPES = {
    "policy": "as the runs count it",
    "gpu": "GPU only",
    "all": "GPU, CPU and memory",
    "pue": "with the building (PUE)",
}
_NO_SENSOR = {
    "gpu": "no GPU was measured in these runs",
    "all": "nothing was measured in these runs",
}

NOT_METERED = "some of the teacher's work was done where no meter saw it"


def run_name(run: ComparedRun, among: Sequence[ComparedRun]) -> str:
    """`response KD, seed 1`; repeats of one seed are told apart by the end of their id."""
    if run.repeat is not None:
        return f"{run.record.label}, repeat {run.repeat} ({run.record.run_id[-4:]})"
    name = f"{run.record.label}, seed {run.seed}"
    twins = [other for other in among if other.record.label == run.record.label and other.seed == run.seed]
    return name if len(twins) == 1 else f"{name} ({run.record.run_id[-4:]})"


def datasets(comparison: Comparison) -> dict[str, list[dict[str, Any]]]:
    """`runs`: a line per run. `parts`: a line per run and stage, in joules by scope; nothing missing counts as 0."""
    everyone = [run for row in comparison.rows for run in row.runs]
    runs: list[dict[str, Any]] = []
    pieces: list[dict[str, Any]] = []
    times = 100.0 if comparison.measure and comparison.measure.percent else 1.0
    for row in comparison.rows:
        for run in row.runs:
            name = run_name(run, everyone)
            runs.append(_run(name, row, run, times))
            for part in run.parts:
                if part.figure.energy_j is not None:
                    pieces.append(_piece(name, row, part))
    return {"runs": runs, "parts": pieces}


def _run(name: str, row: Row, run: ComparedRun, times: float) -> dict[str, Any]:
    facts = {"run": name, "id": run.record.run_id, "method": row.label, "seed": run.seed, "role": row.role}
    facts |= {"devices": sorted(run.devices), "gain": run.joules.with_teacher.gain_error_rel or 0.0}
    facts |= {"missing": _short(missing_time_rel(run.joules.with_teacher))}
    facts |= {"t": round(t_quantile(0.975, len(row.runs) - 1), 4) if len(row.runs) > 1 else 0.0}
    facts |= {"lower_bound": row.with_teacher.is_lower_bound, "incomplete": run.joules.with_teacher.is_lower_bound}
    if run.quality is None:
        return facts
    value, interval = run.quality.result.value, run.quality.interval
    low, high = (interval.low, interval.high) if interval else (value, value)
    return facts | {"quality": _short(times * value), "low": _short(times * low), "high": _short(times * high)}


def _piece(run: str, row: Row, part: Part) -> dict[str, Any]:
    """A teacher's own row stays whole however many students it has."""
    joules = {scope: _short(value) for scope, value in part.by_scope.items() if value is not None}
    facts = {"run": run, "method": row.label, "stage": part.stage, "paid": "inherited" if part.inherited else "own"}
    return {**facts, "shared": part.shared and row.role != "teacher", **joules}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def scope_choices(comparison: Comparison) -> list[dict[str, Any]]:
    """The scopes with the reason where one cannot be chosen."""
    parts = [part for row in comparison.rows for run in row.runs for part in run.parts]
    told = [part for part in parts if part.figure.energy_j is not None]
    choices = []
    for scope, title in SCOPES.items():
        empty = scope in _NO_SENSOR and not all(part.by_scope[scope] is not None for part in told)
        choices.append({"scope": scope, "title": title, "why_not": _NO_SENSOR[scope] if empty else ""})
    return choices


def stated_pue(records: Sequence[RunRecord]) -> float | None:
    """The building's factor, where all runs that name one agree on it."""
    stated = {record.totals.pue for record in records if record.totals and record.totals.pue}
    return stated.pop() if len(stated) == 1 else None
