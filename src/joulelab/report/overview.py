"""The page's first table: every method in one line, with all that a reader asks of it.

Cells that follow the reader's scope and number of students are named, and the page fills them anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from joulelab.meter.figures import EnergyFigure, labeled_text, method_text, uncertainty_text
from joulelab.report.compare.break_even_report import serving_costs
from joulelab.report.compare.comparison import ComparedRun, Comparison, Row
from joulelab.report.compare.method_rows import training_energy, training_mean, training_stage
from joulelab.report.compare.pareto import pareto_rows
from joulelab.report.energy_sums import is_teacher, mean_figure
from joulelab.report.figures.chart_base import stage_colors
from joulelab.report.tables.comparison_tables import equal_repeats
from joulelab.report.tables.provenance import hardware_text
from joulelab.report.wording import NOTHING, gram_cell, ratio_cell
from joulelab.runs.store import age
from joulelab.units import duration_text, power_text, with_prefix


@dataclass(frozen=True)
class Cell:
    """What is shown, and by what it sorts; `moves` names a cell that the page fills anew."""

    text: str
    value: float | str | None = None
    moves: str = ""
    how: str = ""
    """Uncertainty of an estimate and method, which stay true while the page moves the joules."""


@dataclass(frozen=True)
class OverviewColumn:
    key: str
    title: str
    number: bool = True


@dataclass(frozen=True)
class OverviewRow:
    label: str
    role: str
    front: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Overview:
    columns: tuple[OverviewColumn, ...]
    rows: tuple[OverviewRow, ...]
    stages: tuple[tuple[str, str], ...]
    """Stage and colour, for the bars and their legend."""


_TITLES = {
    "method": "Method",
    "models": "Teacher → student",
    "quality": "Quality [95 %]",
    "change": "Against teacher",
    "energy": "Energy",
    "times": "x baseline",
    "token": "J/token",
    "speed": "tokens/s",
    "inference": "J/inference",
    "co2e": "gCO2e, own stages",
    "power": "Mean power, training",
    "time": "Time, own stages",
    "hardware": "Hardware",
    "repeats": "Repeats",
    "runs": "Runs",
    "grade": "Grade",
}
# How pipelines call a model in the settings of a teacher or student, the most telling first.
_NAMES = ("model", "init", "teacher_name", "type", "student_type", "architecture", "name", "size")
_WORDS = ("method", "models", "hardware", "runs", "grade")


def overview(comparison: Comparison) -> Overview:
    """Columns that no row has anything for are left out."""
    front = pareto_rows(comparison)
    teacher = next((row for row in comparison.rows if row.role == "teacher"), None)
    lines = [_cells(row, comparison, teacher) for row in comparison.rows]
    kept = [key for key in _TITLES if any(line[key].text != NOTHING for line in lines)]
    columns = tuple(OverviewColumn(key, _title(key, comparison), key not in _WORDS) for key in kept)
    rows = tuple(
        OverviewRow(row.label, row.role, row in front and len(comparison.rows) > 1, tuple(line[key] for key in kept))
        for row, line in zip(comparison.rows, lines, strict=True)
    )
    parts = [part for row in comparison.rows for run in row.runs for part in run.parts]
    used = {part.stage for part in parts if part.figure.energy_j is not None}
    colors = stage_colors(comparison.records)
    return Overview(columns, rows, tuple((stage, color) for stage, color in colors.items() if stage in used))


def _title(key: str, comparison: Comparison) -> str:
    if key == "quality" and comparison.measure:
        return f"{comparison.measure.axis} [95 %]"
    return _TITLES[key]


def _cells(row: Row, comparison: Comparison, teacher: Row | None) -> dict[str, Cell]:
    measure, full = comparison.measure, row.full_ratio
    quality = Cell(NOTHING)
    if measure and row.quality is not None:
        same = equal_repeats(row)
        bounded = row.interval if row.interval and row.interval.bounded and not same else None
        quality = Cell(f"{measure.text(row.quality, bounded)} {same}".strip(), measure.sign * row.quality)
    return {
        "method": Cell(row.label, row.label),
        "models": Cell(*[_models(row.runs[0])] * 2),
        "quality": quality,
        "change": _against_teacher(row, teacher, comparison),
        "energy": Cell(
            labeled_text(row.with_teacher, row.mixed),
            row.with_teacher.energy_j,
            "energy",
            _how(row),
        ),
        "times": Cell(
            NOTHING if full and not full.ratio else ratio_cell(full),
            full.ratio.value if full and full.ratio else 1.0,
            "times",
        ),
        "token": _item(training_energy(row.runs, "token")),
        "speed": _rate(training_mean(row.runs, "tokens_per_s"), ""),
        "inference": _inference(row),
        "co2e": _co2e(row),
        "power": _mean_power(row),
        "time": _time(row),
        "hardware": Cell(*[" / ".join(dict.fromkeys(hardware_text(run.folder) for run in row.runs))] * 2),
        "repeats": Cell(str(len(row.runs)), float(len(row.runs))),
        "runs": Cell(*[", ".join(dict.fromkeys(_short_id(run.record.run_id) for run in row.runs))] * 2),
        "grade": _grade(row),
    }


def _how(row: Row) -> str:
    """What stays true of the joules while the page counts them in another way: an estimate's scale does, too."""
    spread = "" if row.with_teacher.measured else uncertainty_text(row.with_teacher)
    return ", ".join(text for text in (spread, method_text(row.with_teacher, row.mixed)) if text)


def _short_id(run_id: str) -> str:
    """The end of an id, by which `joulelab show` finds the run; a name that somebody chose, whole."""
    return run_id[-4:] if age(run_id) else run_id


def _models(run: ComparedRun) -> str:
    """What the settings call teacher and student, in whichever words the pipeline has for them."""
    spec = run.record.spec
    teacher, student = (_model_name(spec.get(who)) for who in ("teacher", "student"))
    if is_teacher(run.record):
        return teacher or NOTHING
    if not run.joules.teacher_j:
        teacher = ""
    name = student or _model_name(spec.get("model")) or NOTHING
    return f"{teacher} → {name}" if teacher and student else teacher or name


def _model_name(value: Any) -> str:
    if isinstance(value, str):
        return value
    found = [value[key] for key in _NAMES if isinstance(value.get(key), str)] if isinstance(value, dict) else []
    if not found:
        return ""
    layers = value.get("layers")
    return f"{found[0]}, {len(layers)} layers" if isinstance(layers, list) else str(found[0])


def _against_teacher(row: Row, teacher: Row | None, comparison: Comparison) -> Cell:
    if teacher is None or comparison.measure is None or None in (row.quality, teacher.quality) or row is teacher:
        return Cell(NOTHING)
    change = (row.quality or 0.0) - (teacher.quality or 0.0)
    unit = comparison.measure.difference_unit
    return Cell(f"{comparison.measure.change(change)}{f' {unit}' if unit else ''}", comparison.measure.sign * change)


def _item(each: EnergyFigure | None) -> Cell:
    return Cell(NOTHING) if each is None or each.energy_j is None else Cell(labeled_text(each), each.energy_j)


def _rate(value: float | None, unit: str) -> Cell:
    return Cell(NOTHING) if value is None else Cell(with_prefix(value, unit).strip(), value)


def _inference(row: Row) -> Cell:
    found = [one for run in row.runs if (one := serving_costs(run))]
    if not found:
        return Cell(NOTHING)
    mean = mean_figure(one.energy for one in found)
    return Cell(f"{labeled_text(mean)}, per {found[0].item}", mean.energy_j)


def _co2e(row: Row) -> Cell:
    found = [run.record.totals.co2e for run in row.runs if run.record.totals and run.record.totals.co2e]
    if len(found) < len(row.runs):
        return Cell(NOTHING)
    low, high = (sum(ends) / len(found) for ends in zip(*((f.co2e_g_low, f.co2e_g_high) for f in found), strict=True))
    bound = any(run.joules.own.is_lower_bound for run in row.runs)
    return Cell(gram_cell(low, high, bound), high)


def _mean_power(row: Row) -> Cell:
    values = [stage.mean_power_w for run in row.runs if (stage := training_stage(run.record)) and stage.mean_power_w]
    return Cell(power_text(sum(values) / len(values)), sum(values) / len(values)) if values else Cell(NOTHING)


def _time(row: Row) -> Cell:
    values = [run.record.totals.duration_s for run in row.runs if run.record.totals]
    return Cell(duration_text(sum(values) / len(values)), sum(values) / len(values)) if values else Cell(NOTHING)


def _grade(row: Row) -> Cell:
    grades = [run.record.validity.grade or NOTHING for run in row.runs]
    text = grades[0] if len(set(grades)) == 1 else ", ".join(grades)
    return Cell(text, text)
