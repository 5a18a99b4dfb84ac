"""Every run's joules in pieces: stage by stage, who paid, whether N students share it, and under each scope.

The page's charts and table all read this one list, so that a change of scope or of N moves them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from joulelab.meter.figure_text import is_lower_bound
from joulelab.meter.figures import EnergyFigure
from joulelab.report.comparison import ComparedRun, Comparison, Row
from joulelab.report.joules import TEACHER_PREFIX, ancestor_figure, made_by_teacher
from joulelab.runs.bills import Ancestor
from joulelab.runs.record import EnergyByComponent, RunRecord, StageRecord, components_of
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
_AND = " + "
_TEACHERS_MAKING = frozenset({"teacher.train", "teacher.validate"})


@dataclass(frozen=True)
class Part:
    """One stage's or ancestor's joules; `shared` is the teacher's work, which N students share."""

    stage: str
    inherited: bool
    shared: bool
    figure: EnergyFigure
    """Under the run's own policy."""
    by_scope: Mapping[str, float | None]
    key: str | None = None
    """Of the artefact that came of it, by which the same work is known again in another run's bill."""

    @property
    def stages(self) -> list[str]:
        """One, or all that an inherited artefact was made in."""
        return self.stage.split(_AND)

    @property
    def makes_the_teacher(self) -> bool:
        """Its training and the validations in between, which one artefact's bill has under one name."""
        return not _TEACHERS_MAKING.isdisjoint(self.stages)

    @property
    def is_exam(self) -> bool:
        """Work that only asks how good the teacher is."""
        return self.shared and all(stage.endswith("evaluate") for stage in self.stages)


def parts_of(record: RunRecord) -> tuple[Part, ...]:
    """Inherited work first, as it came first; idle baselines belong to no bill."""
    inherited = [_ancestor_part(ancestor, record.policy) for ancestor in record.inherited]
    made = {name: one.key for one in record.lineage if one.key in record.made for name in one.stages}
    own = [_own_part(stage, made.get(stage.name)) for stage in record.stages if not stage.outside_totals]
    return (*inherited, *own)


def _own_part(stage: StageRecord, key: str | None) -> Part:
    shared = stage.name.startswith(TEACHER_PREFIX)
    return Part(stage.name, False, shared, stage.best, _scopes(stage.energy, stage.best), key)


def _ancestor_part(ancestor: Ancestor, policy: str) -> Part:
    components = components_of(ancestor)
    figure = ancestor_figure(ancestor, policy)
    name = _AND.join(ancestor.stages) or ancestor.name
    return Part(name, True, made_by_teacher(ancestor), figure, _scopes(components, figure), ancestor.key)


def _scopes(energy: EnergyByComponent, best: EnergyFigure) -> dict[str, float | None]:
    return {
        "policy": best.energy_j,
        "gpu": energy.gpu.energy_j,
        "all": energy.under_policy("measured").energy_j,
    }


def run_name(run: ComparedRun, among: Sequence[ComparedRun]) -> str:
    """`response KD, seed 1`; repeats of one seed are told apart by the end of their id."""
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
            for part in parts_of(run.record):
                if part.figure.energy_j is not None:
                    pieces.append(_piece(name, row, part))
    return {"runs": runs, "parts": pieces}


def _run(name: str, row: Row, run: ComparedRun, times: float) -> dict[str, Any]:
    facts = {"run": name, "id": run.record.run_id, "method": row.label, "seed": run.seed, "role": row.role}
    facts |= {"devices": sorted(run.devices), "gain": run.joules.with_teacher.gain_error_rel or 0.0}
    facts |= {"t": round(t_quantile(0.975, len(row.runs) - 1), 4) if len(row.runs) > 1 else 0.0}
    facts |= {"lower_bound": is_lower_bound(row.with_teacher)}
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
    parts = [part for row in comparison.rows for run in row.runs for part in parts_of(run.record)]
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
