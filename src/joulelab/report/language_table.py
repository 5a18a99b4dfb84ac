"""Language models at equal held-out loss: what a student used up to there, and whether its teacher breaks even."""

from __future__ import annotations

from collections.abc import Sequence

from joulelab.meter.figure_text import amount_text, estimate_note
from joulelab.report.comparison import Comparison, Row
from joulelab.report.exam import exam_note
from joulelab.report.grid import Grid, make_grid
from joulelab.report.held_out_course import TRAIN
from joulelab.report.joules import mean_figure
from joulelab.report.payback import RowPayback, StudentCosts, paybacks, student_costs, times_text, was_taught
from joulelab.report.wording import NOTHING
from joulelab.units import energy_text

_LOSS = "student.clm_loss"


def language_grid(comparison: Comparison) -> Grid | None:
    """None where the comparison is not about language models with a held-out loss."""
    rows = [row for row in comparison.rows if all(_LOSS in run.record.results for run in row.runs)]
    if not rows or comparison.measure is None or comparison.measure.name != "clm_loss":
        return None
    baseline = comparison.row(comparison.baseline)
    answers = {one.label: one for one in paybacks(comparison) if one.each == "student"}
    cells = []
    for row in rows:
        if baseline is None or row is baseline:
            equal: tuple[str, ...] = (NOTHING, NOTHING, NOTHING, "baseline" if baseline else NOTHING)
        elif one := answers.get(row.label):
            equal = (*_cost_cells(one.costs), _answer(one))
        else:
            equal = (*_cost_cells(student_costs(row, baseline, comparison)), "had no teacher")
        cells.append((*_own_cells(row), *equal))
    titles = (
        "Method|Held-out\nloss, nats>|Training\ntokens/s>|Energy\nper token>|Teacher\nshare>|"
        "Equal loss,\nnats>|Student J\nto it>|Baseline J\nto it>|N* at equal loss"
    )
    beyond = f" beyond that of {baseline.label}'s" if baseline and was_taught(baseline) else ""
    note = (
        "Equal loss: the worse student's at its end; the better one is charged up to where it was as good. "
        f"N*: students after which the teacher's energy{beyond} breaks even, from student stages alone."
        + exam_note(rows)
    )
    if doubt := estimate_note(row.with_teacher for row in rows):
        note += f" {doubt}"
    return make_grid("Language models at equal held-out loss", titles, cells, note)


def _own_cells(row: Row) -> tuple[str, ...]:
    loss = _mean([run.record.results[_LOSS].value for run in row.runs])
    stages = [stage for run in row.runs if (stage := run.record.stage(TRAIN))]
    speed = _mean([stage.tokens_per_s for stage in stages if stage.tokens_per_s])
    each = [figure for stage in stages if (figure := stage.energy_per("token")) is not None]
    return (
        row.label,
        NOTHING if loss is None else f"{loss:.3f}",
        NOTHING if speed is None else f"{speed:,.0f}",
        amount_text(mean_figure(each)) if each else NOTHING,
        row.teacher_share_text,
    )


def _cost_cells(costs: StudentCosts | str | None) -> tuple[str, str, str]:
    if costs is None or isinstance(costs, str):
        return (NOTHING, NOTHING, NOTHING)
    loss = NOTHING if costs.loss is None else f"{costs.loss:.3f}"
    own_j, base_j = (energy_text(sum(side) / len(side)) for side in (costs.own_j, costs.base_j))
    return loss, own_j, f"≤ {base_j}" if costs.base_at_most else base_j


def _answer(one: RowPayback) -> str:
    found = one.found
    if found is None:
        return f"unknown: {one.reason}"
    if found.pays_back:
        return one.answer if found.count else f"{one.answer}: {found.reason}"
    estimate = ""
    if found.saved.value > 0 and found.spent.value > 0:
        estimate = f"; point estimate {times_text(found.spent.value / found.saved.value, 'student')} students"
    return f"{one.answer}: {found.reason}{estimate}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
