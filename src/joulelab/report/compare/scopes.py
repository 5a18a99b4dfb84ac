"""Everything that the controls of a report page can select: scope, PUE and number of students that share a teacher.

The page computes no statistics. For each state of its controls this module computes energies, ratios with their
intervals, and the Pareto front with the functions of the tables; the page's scripts look the results up. Charts sum
the same `parts` by run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from joulelab.errors import UsageError
from joulelab.meter.figures import EnergyFigure, labeled_text
from joulelab.report.compare.comparison import ComparedRun, Comparison, EnergyRatio, Row, run_name
from joulelab.report.compare.differences import energy_ratio
from joulelab.report.compare.method_rows import mean_with_reused, reused_parts
from joulelab.report.compare.pareto import pareto_labels
from joulelab.report.energy_sums import Part, known_sum
from joulelab.report.wording import NOTHING, ratio_cell
from joulelab.runs.record import RunRecord
from joulelab.stats import mean_t
from joulelab.units import percent_text

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
STUDENTS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
_PUES = (1.1, 1.2, 1.3, 1.5, 1.8, 2.0)
# Energy is never below 0, where the interval of few repeats may reach; a logarithmic axis has no 0 either.
_LOWEST_SHARE = 0.02


@dataclass(frozen=True)
class MethodEnergy:
    """Energy of one method under a scope, with the teacher shared by a number of students."""

    by_run: tuple[EnergyFigure, ...]
    mean: EnergyFigure
    mixed: bool
    ratio: EnergyRatio | None
    """None for the baseline itself."""


def shares_teacher(comparison: Comparison) -> bool:
    """Whether students can share anything: what a teacher does for one student alone is not shared."""
    parts = ((part, row) for row in comparison.rows for run in row.runs for part in run.parts)
    return any(is_divided(part, row) and part.figure.energy_j for part, row in parts)


def student_counts(comparison: Comparison) -> tuple[int, ...]:
    return STUDENTS if shares_teacher(comparison) else STUDENTS[:1]


def pue_choices(comparison: Comparison) -> list[float]:
    stated = stated_pue(comparison.records)
    return sorted({*_PUES, *([stated] if stated else [])})


def stated_pue(records: Sequence[RunRecord]) -> float | None:
    """The PUE of the building, if all runs that state one agree on it; with six digits, as the page writes numbers."""
    stated = {_short(record.totals.pue) for record in records if record.totals and record.totals.pue}
    return stated.pop() if len(stated) == 1 else None


def scope_choices(comparison: Comparison) -> list[dict[str, Any]]:
    """The scopes, each with the reason why it cannot be chosen; empty if it can."""
    known = [part for row in comparison.rows for run in row.runs for part in _known_parts(run)]
    choices = []
    for scope, title in SCOPES.items():
        why_not = ""
        if scope in _NO_SENSOR and any(part.by_scope[scope].energy_j is None for part in known):
            why_not = _NO_SENSOR[scope]
        elif scope == "all" and not _measures_cpu_or_memory(comparison):
            why_not = "neither CPU nor memory was measured in these runs"
        choices.append({"scope": scope, "title": title, "why_not": why_not})
    return choices


def _measures_cpu_or_memory(comparison: Comparison) -> bool:
    stages = (stage for record in comparison.records for stage in record.stages)
    return any(figure.energy_j is not None for stage in stages for figure in (stage.energy.cpu, stage.energy.dram))


def _summed_scopes(comparison: Comparison) -> list[str]:
    """Those with sums of their own: a PUE multiplies all energies and changes no ratio."""
    return [one["scope"] for one in scope_choices(comparison) if one["scope"] != "pue" and not one["why_not"]]


def _known_parts(run: ComparedRun) -> list[Part]:
    return [part for part in run.parts if part.figure.energy_j is not None]


def is_divided(part: Part, row: Row) -> bool:
    """Whether students share its energy; the teacher's own row stays whole however many students it has."""
    return part.shared and row.role != "teacher"


def method_energies(comparison: Comparison, scope: str = "policy", students: int = 1) -> dict[str, MethodEnergy]:
    """Label -> energy of one student, its share of the teacher included."""
    sums = {
        (row.label, place): _run_sum(row, run, scope, students)
        for row in comparison.rows
        for place, run in enumerate(row.runs)
    }
    places = {id(run): (row.label, place) for row in comparison.rows for place, run in enumerate(row.runs)}

    def counted(run: ComparedRun) -> tuple[EnergyFigure, bool, str]:
        return sums[places[id(run)]], run.joules.mixed and scope == "policy", run.joules.incomplete

    baseline = comparison.row(comparison.baseline)
    found = {}
    for row in comparison.rows:
        by_run = tuple(sums[row.label, place] for place in range(len(row.runs)))
        same = row is baseline or row.full_ratio is None
        ratio = None if same else energy_ratio(row.runs, baseline.runs if baseline else (), counted)
        mean = _mean(row, by_run, scope, students)
        found[row.label] = MethodEnergy(by_run, mean, row.mixed and scope == "policy", ratio)
    return found


def _run_sum(row: Row, run: ComparedRun, scope: str, students: int) -> EnergyFigure:
    if (scope, students) == ("policy", 1) or not run.parts:
        return run.joules.with_teacher
    divided = [part.by_scope[scope] for part in run.parts if is_divided(part, row)]
    whole = [part.by_scope[scope] for part in run.parts if not is_divided(part, row)]
    return known_sum([*whole, *([known_sum(divided).scaled(1 / students)] if divided else [])])


def _mean(row: Row, by_run: Sequence[EnergyFigure], scope: str, students: int) -> EnergyFigure:
    if (scope, students) == ("policy", 1):
        return row.with_teacher
    half_widths_j = [
        (part.by_scope[scope].half_width_j or 0.0) / (students if is_divided(part, row) else 1)
        for part in reused_parts(row.runs)
    ]
    return mean_with_reused(by_run, half_widths_j)


def shared_energies(comparison: Comparison, students: int) -> dict[str, MethodEnergy]:
    """Label -> energy of one of N students that share a teacher, as the page shows it where its slider is at N."""
    if students > 1 and not shares_teacher(comparison):
        raise UsageError("no method of this comparison has a teacher to share", "leave --students out")
    return method_energies(comparison, students=students)


def ratio_text(ratio: EnergyRatio | None) -> str:
    return NOTHING if ratio and not ratio.ratio else ratio_cell(ratio)


def ratio_value(ratio: EnergyRatio | None) -> float | None:
    """What a table sorts by; the baseline is 1."""
    return 1.0 if ratio is None else ratio.ratio.value if ratio.ratio else None


Energies = Mapping[tuple[str, int], Mapping[str, MethodEnergy]]
"""By scope and number of students, then by label."""


def all_energies(comparison: Comparison) -> Energies:
    """For every scope and number of students that a reader can select."""
    scopes, counts = _summed_scopes(comparison), student_counts(comparison)
    return {(scope, count): method_energies(comparison, scope, count) for scope in scopes for count in counts}


def _front(comparison: Comparison, energies: Mapping[str, MethodEnergy]) -> tuple[str, ...]:
    return pareto_labels(comparison, {label: one.mean for label, one in energies.items()})


def page_views(comparison: Comparison, all_of_them: Energies) -> dict[str, Any]:
    """What the page's scripts look up: texts and values of each method by scope, students and PUE."""
    lines = {row.label: _part_lines(row) for row in comparison.rows}
    by_scope: dict[str, Any] = {}
    by_pue: dict[str, Any] = {f"{pue:g}": {} for pue in pue_choices(comparison)}
    for (scope, students), energies in all_of_them.items():
        front = _front(comparison, energies)
        bars = {row.label: _part_means(row, lines[row.label], scope, students) for row in comparison.rows}
        longest = max((sum(means) for means in bars.values()), default=0.0) or 1.0
        by_scope.setdefault(scope, {})[str(students)] = {
            label: {
                **_energy_texts(one, 1.0),
                "ratio": ratio_text(one.ratio),
                "ratio_value": _short(ratio_value(one.ratio)),
                "front": label in front and len(comparison.rows) > 1,
                "bound": one.mean.is_lower_bound,
                "bar": [round(100 * mean / longest, 2) for mean in bars[label]],
                "shares": [percent_text(mean / (sum(bars[label]) or 1.0)) for mean in bars[label]],
            }
            for label, one in energies.items()
        }
        if scope == "policy":
            for pue, texts in by_pue.items():
                texts[str(students)] = {label: _energy_texts(one, float(pue)) for label, one in energies.items()}
    return {
        "students": list(student_counts(comparison)),
        "parts": {label: [list(line) for line in found] for label, found in lines.items()},
        "by_scope": by_scope,
        "by_pue": by_pue,
    }


def _energy_texts(one: MethodEnergy, pue: float) -> dict[str, Any]:
    figure = one.mean.scaled(pue)
    return {"energy": labeled_text(figure, one.mixed), "energy_j": _short(figure.energy_j)}


Line = tuple[str, str]
"""Name of a part, and whether its energy is `own` or `inherited`."""


def _part_line(part: Part) -> Line:
    return part.stage, "inherited" if part.inherited else "own"


def _part_lines(row: Row) -> list[Line]:
    return list(dict.fromkeys(_part_line(part) for run in row.runs for part in _known_parts(run)))


def _part_means(row: Row, lines: Sequence[Line], scope: str, students: int) -> list[float]:
    """Mean over the runs that have any energy, in the order of the lines."""
    runs = [known for run in row.runs if (known := _known_parts(run))]
    sums = dict.fromkeys(lines, 0.0)
    for parts in runs:
        for part in parts:
            energy_j = part.by_scope[scope].energy_j or 0.0
            sums[_part_line(part)] += energy_j / (students if is_divided(part, row) else 1)
    return [energy_j / max(len(runs), 1) for energy_j in sums.values()]


def datasets(comparison: Comparison, energies: Energies | None = None) -> dict[str, list[dict[str, Any]]]:
    """What the figures read by name: a line per run in `runs`, per run and part in `parts` (energy by scope), and per
    method, scope and number of students in `methods` (mean with its interval, Pareto front)."""
    everyone = [run for row in comparison.rows for run in row.runs]
    runs: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    times = 100.0 if comparison.measure and comparison.measure.percent else 1.0
    for row in comparison.rows:
        for run in row.runs:
            name = run_name(run, everyone)
            runs.append(_run_line(name, row, run, times))
            parts += [_part_record(name, row, part) for part in _known_parts(run)]
    methods = _method_lines(comparison, energies or all_energies(comparison), times)
    return {"runs": runs, "parts": parts, "methods": methods}


def _run_line(name: str, row: Row, run: ComparedRun, times: float) -> dict[str, Any]:
    facts = {"run": name, "id": run.record.run_id, "method": row.label, "seed": run.seed, "role": row.role}
    facts |= {"lower_bound": row.with_teacher.is_lower_bound, "incomplete": run.joules.with_teacher.is_lower_bound}
    if run.quality is None:
        return facts
    value, interval = run.quality.result.value, run.quality.interval
    low, high = (interval.low, interval.high) if interval else (value, value)
    return facts | {"quality": _short(times * value), "low": _short(times * low), "high": _short(times * high)}


def _part_record(run: str, row: Row, part: Part) -> dict[str, Any]:
    stage, paid = _part_line(part)
    energies = {name: _short(one.energy_j) for name, one in part.by_scope.items() if one.energy_j is not None}
    flags = {"shared": is_divided(part, row), "teachers": part.is_teachers and row.role != "teacher"}
    return {"run": run, "method": row.label, "stage": stage, "paid": paid, **flags, **energies}


def _method_lines(comparison: Comparison, all_of_them: Energies, times: float) -> list[dict[str, Any]]:
    lines = []
    for (scope, students), energies in all_of_them.items():
        front = _front(comparison, energies)
        for row in comparison.rows:
            facts: dict[str, Any] = {"method": row.label, "scope": scope, "students": students}
            facts["front"] = row.label in front
            if row.quality is not None:
                facts["quality"] = _short(times * row.quality)
            lines.append({**facts, **_mean_interval(energies[row.label])})
    return lines


def _mean_interval(energy: MethodEnergy) -> Mapping[str, float | None]:
    """Mean over the runs with Student's 95 % interval; one run has no interval."""
    known = [one.energy_j for one in energy.by_run if one.energy_j is not None]
    if not known:
        return {}
    found = mean_t(known)
    low, high = (max(found.low, _LOWEST_SHARE * found.value), found.high) if found.bounded else (found.value,) * 2
    return {"mean": _short(found.value), "low": _short(low), "high": _short(high)}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
