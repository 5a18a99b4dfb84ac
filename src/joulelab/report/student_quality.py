"""How good students are, figure by figure, with the spread over their seeds: another seed is another student."""

from __future__ import annotations

from collections.abc import Sequence

from joulelab.report.comparison import ComparedRun, Comparison, Row
from joulelab.report.grid import Grid, make_grid
from joulelab.report.wording import NOTHING, all_equal
from joulelab.stats import mean_t

# Result -> its title, and how it is shown: percent, or a plain number
_FIGURES = {
    "student.accuracy": ("Accuracy, %>", 100.0),
    "student.macro_f1": ("Macro F1, %>", 100.0),
    "student.calibration_error": ("Calibration\nerror, %>", 100.0),
    "student.agreement": ("Agrees with\nteacher, %>", 100.0),
    "student.over_teacher": ("Accuracy over\nteacher's>", 1.0),
}
_TELLING = "student.macro_f1"


def has_student_quality(comparison: Comparison) -> bool:
    """Runs of other pipelines, and those of earlier versions, have an accuracy only."""
    return any(_TELLING in run.record.results for row in comparison.rows for run in row.runs)


def student_quality_grid(comparison: Comparison) -> Grid:
    rows = [
        (row.label, *(_cell(row.runs, name, scale) for name, (_, scale) in _FIGURES.items()))
        for row in comparison.rows
        if _is_student(row)
    ]
    titles = "|".join(["Method", *(title for title, _ in _FIGURES.values())])
    note = "Mean over seeds with Student's 95 % interval of that mean; one seed tells no interval."
    return make_grid("Students' quality over seeds", titles, rows, note)


def _is_student(row: Row) -> bool:
    return any(_TELLING in run.record.results for run in row.runs)


def _cell(runs: Sequence[ComparedRun], name: str, scale: float) -> str:
    values = [scale * run.record.results[name].value for run in runs if name in run.record.results]
    if not values:
        return NOTHING
    digits = 1 if scale > 1 else 3
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    if same := all_equal(values):
        return f"{values[0]:.{digits}f} {same}"
    found = mean_t(values)
    return f"{found.value:.{digits}f} ± {found.high - found.value:.{digits}f}"
