"""Every run's joules in pieces: stage by stage, who paid, whether N students share it, and under each scope.

The page's charts and table all read this one list, so that a change of scope or of N moves them together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from joulelab.meter.figures import EnergyFigure, total
from joulelab.report.compare.comparison import ComparedRun, Comparison, Row, StageMean, one_of_each_record
from joulelab.report.energy_sums import Part, PartKind, known_sum, method_parts, missing_time_rel
from joulelab.runs.measure.result import RUN, repeat_mean
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


# Where a method's joules went: a line per piece of work, mean over all runs of the row, so that the lines add up.


Line = tuple[str, bool]
"""Its name, and whether it is a line of inherited work."""


def stage_means(runs: Sequence[ComparedRun]) -> tuple[StageMean, ...]:
    """Inherited work first, as it came first, then the rest in order.

    What one seed made and the others inherit is one line: which of them paid is chance. A run without the work counts
    as 0 J of it, and a run without any joules is in no mean, as it is in no sum. The repeats of a measured program are
    one line, with the interval that `measure` states; their setup was done once for all of them.
    """
    bills = [run.all_parts for run in runs]
    repeats = repeat_mean(*(run.record for run in one_of_each_record(runs)))
    ids = [run.record.run_id for run in runs]
    first = [ids.index(run_id) for run_id in dict.fromkeys(ids)]
    lines: dict[Line, dict[int, list[Part]]] = {}
    joined = _joined(bills)
    for place, parts in enumerate(bills):
        for part in parts if place in first else method_parts(parts):
            line = (part.stage, True) if part.inherited else (joined.get(part.stage, part.stage), part.stage in joined)
            lines.setdefault(line, {}).setdefault(place, []).append(part)
    billed = [place for place, run in enumerate(runs) if run.joules.with_teacher.energy_j is not None]
    counted = billed or range(len(runs))
    once = [place for place in counted if place in first]
    means = []
    for (name, inherited), by_run in lines.items():
        figure = _mean(by_run, counted if _kind(by_run) == "work" else once)
        if repeats is not None and name == RUN and not inherited:
            figure = repeats.energy
        means.append(StageMean(name, _all_inherited(by_run), figure, _kind(by_run)))
    return tuple(sorted(means, key=lambda mean: not mean.inherited))


def _joined(bills: Sequence[Sequence[Part]]) -> dict[str, str]:
    """Own stages that stand with the same work of other runs, which inherit it perhaps as several stages in one.

    Not where a run has both itself: a student's training is not that of the student it goes on from.
    """
    inherited = {part.stage: part.stages for bill in bills for part in bill if part.inherited}
    for bill in bills:
        names, own = ({part.stage for part in bill if part.inherited is paid} for paid in (True, False))
        inherited = {name: stages for name, stages in inherited.items() if name not in names or own.isdisjoint(stages)}
    return {stage: name for name, stages in inherited.items() for stage in stages} | {name: name for name in inherited}


def _kind(by_run: Mapping[int, Sequence[Part]]) -> PartKind:
    return next(iter(by_run.values()))[0].kind


def _all_inherited(by_run: Mapping[int, Sequence[Part]]) -> bool:
    return all(part.inherited for parts in by_run.values() for part in parts)


def _mean(by_run: Mapping[int, Sequence[Part]], billed: Sequence[int]) -> EnergyFigure:
    """Work that several runs share is one measurement, known by its key: repeating it makes it no surer."""
    once: dict[object, list[EnergyFigure]] = {}
    for place, parts in by_run.items():
        if place in billed:
            keys = frozenset(part.key for part in parts)
            figures = [part.figure for part in parts]
            known = figures[0] if len(figures) == 1 else known_sum(figures)
            once.setdefault(place if None in keys else keys, []).append(known)
    if not once:
        return next(iter(by_run.values()))[0].figure
    mean = total([figure for figures in once.values() for figure in figures])
    if mean.energy_j is None:
        return mean
    doubts_j = [len(figures) * (figures[0].half_width_j or 0.0) for figures in once.values()]
    half_width_j = math.hypot(*doubts_j) / len(billed)
    return mean.with_interval(mean.energy_j / len(billed), half_width_j)
