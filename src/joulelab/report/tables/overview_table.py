"""The first table of a comparison's page: one line per method, with quality, energy, speed, hardware and grade."""

from __future__ import annotations

from typing import Any

from joulelab.meter.figures import EnergyFigure, amount_text, labeled_text, methods_text
from joulelab.report.compare.break_even_report import serving_costs
from joulelab.report.compare.comparison import ComparedRun, Comparison, Row
from joulelab.report.compare.method_rows import training_energy, training_mean, training_stage
from joulelab.report.compare.scopes import ratio_text, ratio_value
from joulelab.report.energy_sums import is_teacher, mean_figure
from joulelab.report.tables.comparison_tables import equal_repeats, not_included_note
from joulelab.report.tables.grid import Cell, Column, Grid, make_grid, without_column
from joulelab.report.tables.provenance import hardware_text
from joulelab.report.wording import NOTHING, gram_cell
from joulelab.runs.record import RunRecord, program_energy
from joulelab.runs.store import age
from joulelab.units import duration_text, power_text, with_prefix

_TITLES = {
    "method": "Method",
    "energy": "Energy",
    "times": "x baseline",
    "quality": "Quality [95 %]",
    "change": "Against teacher",
    "models": "Teacher → student",
    "token": "J/token",
    "speed": "tokens/s",
    "inference": "Serving energy",
    "co2e": "gCO2e, own stages",
    "power": "Mean power, training",
    "time": "Time, own stages",
    "hardware": "Hardware",
    "repeats": "Repeats",
    "runs": "Runs",
    "grade": "Grade",
}
# Settings that name a model in the sections of a teacher or student, the most specific first.
_NAMES = ("model", "init", "teacher_name", "type", "student_type", "architecture", "name", "size")
_WORDS = ("method", "models", "hardware", "runs", "grade")


def brief_grid(comparison: Comparison) -> Grid:
    """What a screen shows of a comparison: one line per method."""
    teacher = next((row for row in comparison.rows if row.role == "teacher"), None)
    rows = []
    for row in comparison.rows:
        cells = _cells(row, comparison, teacher)
        times, *doubt = cells["times"].split("\n")
        verdict = " ".join(doubt) if row.full_ratio else "baseline"
        if row.full_ratio and not row.full_ratio.ratio:
            verdict = NOTHING
        energy = (row.label, amount_text(row.with_teacher), times, verdict or "significant")
        rows.append((*energy, cells["quality"], cells["time"], cells["grade"]))
    found = [row.with_teacher for row in comparison.rows]
    included = ", teacher included" if any(row.teacher_share for row in comparison.rows) else ""
    caption = f"Energy, mean per run{included} ({methods_text(found)})"
    quality = _title("quality", comparison)
    grid = make_grid(
        caption, f"Method|Energy>|x baseline>|Difference!|{quality}>|Time, own stages>|Grade!", rows, _note(comparison)
    )
    return grid if comparison.measure else without_column(grid, quality)


def _note(comparison: Comparison) -> str:
    left_out = not_included_note(comparison.rows)
    # of a measured program, lists of runs show the program alone, too
    listed = any(run.record.spec.get("pipeline") != "measure" for row in comparison.rows for run in row.runs)
    return f"{left_out}{'`runs` and `show RUN` include it.' if left_out and listed else ''}".strip()


def overview_grid(comparison: Comparison) -> Grid:
    """Columns that are empty in all rows are left out."""
    teacher = next((row for row in comparison.rows if row.role == "teacher"), None)
    lines = [_cells(row, comparison, teacher) for row in comparison.rows]
    kept = [key for key in _TITLES if any(line[key] != NOTHING for line in lines)]
    columns = tuple(Column(_title(key, comparison), "left" if key in _WORDS else "right", key=key) for key in kept)
    return Grid("All methods, mean per run", columns, tuple(tuple(line[key] for key in kept) for line in lines))


def _title(key: str, comparison: Comparison) -> str:
    if key == "quality" and comparison.measure:
        return f"{comparison.measure.axis} [95 %]"
    if key == "inference":
        return f"{_TITLES[key]}, per {' or '.join(_served_items(comparison))}"
    return _TITLES[key]


def _cells(row: Row, comparison: Comparison, teacher: Row | None) -> dict[str, Cell]:
    measure = comparison.measure
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
        "energy": Cell(labeled_text(row.with_teacher, row.mixed), row.with_teacher.energy_j, "energy"),
        "times": Cell(ratio_text(row.full_ratio), ratio_value(row.full_ratio), "ratio"),
        "token": _item(training_energy(row.runs, "token")),
        "speed": _rate(training_mean(row.runs, "tokens_per_s"), ""),
        "inference": _inference(row, several=len(_served_items(comparison)) > 1),
        "co2e": _co2e(row),
        "power": _mean_power(row),
        "time": _time(row),
        "hardware": Cell(*[" / ".join(dict.fromkeys(hardware_text(run.folder) for run in row.runs))] * 2),
        "repeats": Cell(str(len(row.runs)), float(len(row.runs))),
        "runs": Cell(*[", ".join(dict.fromkeys(_short_id(run.record.run_id) for run in row.runs))] * 2),
        "grade": _grade(row),
    }


def _short_id(run_id: str) -> str:
    """The end of an id, which `joulelab show` accepts; a name chosen by the user is not shortened."""
    return run_id[-4:] if age(run_id) else run_id


def _models(run: ComparedRun) -> str:
    """Names of teacher and student in the settings of any pipeline."""
    spec = run.record.spec
    teacher, student = (_model_name(spec.get(who)) for who in ("teacher", "student"))
    if is_teacher(run.record):
        return teacher or NOTHING
    if not run.joules.teacher_j:
        teacher = ""
    elif spec.get("pipeline") == "self":
        teacher = "its SFT student"
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


def _served_items(comparison: Comparison) -> list[str]:
    """What energy is per in inference stages: tokens, samples, or both."""
    found = [serving_costs(run) for row in comparison.rows for run in row.runs]
    return list(dict.fromkeys(one.item for one in found if one))


def _inference(row: Row, several: bool) -> Cell:
    found = [one for run in row.runs if (one := serving_costs(run))]
    if not found:
        return Cell(NOTHING)
    mean = mean_figure(one.energy for one in found)
    return Cell(labeled_text(mean) + (f" / {found[0].item}" if several else ""), mean.energy_j)


def _co2e(row: Row) -> Cell:
    found = [co2e for run in row.runs if (co2e := run.record.best_co2e)]
    if len(found) < len(row.runs):
        return Cell(NOTHING)
    low, high = (sum(ends) / len(found) for ends in zip(*((f.co2e_g_low, f.co2e_g_high) for f in found), strict=True))
    bound = any(run.joules.own.is_lower_bound for run in row.runs)
    return Cell(gram_cell(low, high, bound), high)


def _mean_power(row: Row) -> Cell:
    values = [stage.mean_power_w for run in row.runs if (stage := training_stage(run.record)) and stage.mean_power_w]
    return Cell(power_text(sum(values) / len(values)), sum(values) / len(values)) if values else Cell(NOTHING)


def _time(row: Row) -> Cell:
    values = [own_time_s(run.record) for run in row.runs if run.record.totals]
    return Cell(duration_text(sum(values) / len(values)), sum(values) / len(values)) if values else Cell(NOTHING)


def own_time_s(record: RunRecord) -> float:
    """Without setup and without making shared artifacts, which whichever member runs first does for all."""
    shared = () if is_teacher(record) else ("teacher", "data")
    own = [stage.duration_s for stage in record.stages if stage.is_method_work and stage.role not in shared]
    return sum(own) if own and program_energy(record) is None else record.best_duration_s


def _grade(row: Row) -> Cell:
    grades = [run.record.validity.grade or NOTHING for run in row.runs]
    text = grades[0] if len(set(grades)) == 1 else ", ".join(grades)
    return Cell(text, text)
