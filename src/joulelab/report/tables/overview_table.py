"""The first table of a comparison's page: one line per method, with quality, energy, speed, hardware and grade."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from joulelab.errors import JoulelabError
from joulelab.meter.figures import EnergyFigure, amount_text, labeled_text, methods_text
from joulelab.report.compare.break_even_report import serving_costs
from joulelab.report.compare.comparison import ComparedRun, Comparison, Row
from joulelab.report.compare.method_rows import training_energy, training_mean, training_stage
from joulelab.report.compare.scopes import ratio_text, ratio_value
from joulelab.report.energy_sums import Part, is_teacher, mean_figure, part_kind
from joulelab.report.tables.comparison_tables import co2e_cell, equal_repeats, not_included_note
from joulelab.report.tables.grid import Cell, Column, Grid, make_grid, without_column
from joulelab.report.tables.provenance import hardware_text
from joulelab.report.wording import NOTHING
from joulelab.runs.record import RunRecord
from joulelab.runs.store import age, load_record, stores_of
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
    "co2e": "gCO2e",
    "power": "Mean power, training",
    "time": "Time",
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
    titles = f"Method|Energy>|x baseline>|Difference!|{quality}>|{_title('time', comparison)}>|Grade!"
    grid = make_grid(caption, titles, rows, _note(comparison))
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
    if key == "time" and any(row.unmetered or row.teacher_share for row in comparison.rows):
        return "Time for one student"
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
        "co2e": co2e_cell(row),
        "power": _mean_power(row),
        "time": _time(row, comparison),
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
    if not (row.same_data and teacher.same_data):
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


def _mean_power(row: Row) -> Cell:
    values = [stage.mean_power_w for run in row.runs if (stage := training_stage(run.record)) and stage.mean_power_w]
    return Cell(power_text(sum(values) / len(values)), sum(values) / len(values)) if values else Cell(NOTHING)


def _time(row: Row, comparison: Comparison) -> Cell:
    """Mean over the runs; a lower bound if a run that did some of it is gone."""
    trained = any(_trains(other) for other in comparison.rows)
    if trained and not _trains(row):
        return Cell(NOTHING)  # a teacher, or a model in use
    records = {record.run_id: record for record in comparison.records}
    found = [[_seconds(run, part, records) for part in _timed_parts(run, trained)] for run in row.runs]
    if not all(found):
        return Cell(NOTHING)
    mean_s = sum(seconds or 0.0 for times in found for seconds in times) / len(found)
    bound = "≥ " if any(seconds is None for times in found for seconds in times) else ""
    return Cell(f"{bound}{duration_text(mean_s)}", mean_s)


def _trains(row: Row) -> bool:
    return any(part.is_student_stage and not part.inherited for run in row.runs for part in run.parts)


def _timed_parts(run: ComparedRun, trained: bool) -> list[Part]:
    """The student stages, inherited ones included, as their energy is: which run did them is chance."""
    if trained:
        return [part for part in run.parts if part.is_student_stage]
    if is_teacher(run.record):
        return [part for part in run.parts if part.is_teachers and part.kinds]
    return [part for part in run.parts if not part.inherited]


def _seconds(run: ComparedRun, part: Part, records: Mapping[str, RunRecord]) -> float | None:
    """None if the record of the run that did it is neither in the comparison nor in the run's store."""
    if part.duration_s is not None:
        return part.duration_s
    maker = _maker(run, part, records)
    stages = maker.stages if maker else ()
    same = [one for one in stages if (one.part_of or one.name) in part.stages and part_kind(one) == part.kind]
    return sum(stage.duration_s for stage in same) if same else None


def _maker(run: ComparedRun, part: Part, records: Mapping[str, RunRecord]) -> RunRecord | None:
    made_by = next(one.made_by for one in run.record.inherited if one.key == part.key)
    if made_by not in records:
        for store in stores_of(run.folder, run.record.store):
            with suppress(JoulelabError, OSError):  # it was removed, or is not readable
                return load_record(store / made_by)
    return records.get(made_by)


def _grade(row: Row) -> Cell:
    grades = [run.record.validity.grade or NOTHING for run in row.runs]
    text = grades[0] if len(set(grades)) == 1 else ", ".join(grades)
    return Cell(text, text)
