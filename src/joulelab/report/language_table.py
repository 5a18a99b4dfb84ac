"""Language models at equal held-out loss: what a student took to come as far as the other one, and whether the teacher
pays back there.

N* is meant at equal quality, and two students with equal tokens are hardly ever equally good. Held-out loss was looked
at on the way, so of the better one it is known when it was as good as the worse one at its end; it is charged up to
there. A step costs the same early and late, so joules go by steps. Students that begin with an SFT student pay for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from joulelab.meter.figures import EnergyFigure
from joulelab.report.comparison import ComparedRun, Comparison, Row
from joulelab.report.differences import CROWDED, pairs_of
from joulelab.report.exam import exam_note
from joulelab.report.grid import Grid, make_grid
from joulelab.report.held_out_course import TRAIN, Course, is_before
from joulelab.report.joules import mixes_methods
from joulelab.report.parts import NOT_METERED, parts_of
from joulelab.report.payback import teacher_beyond, teacher_parts, times_text, was_taught
from joulelab.report.wording import NOTHING
from joulelab.stats import Estimate, Payback, payback
from joulelab.units import energy_text, three_digits

_LOSS = "student.clm_loss"


@dataclass(frozen=True)
class EqualLoss:
    """A method and the baseline, as far as both came."""

    loss: float
    own_j: float
    base_j: float
    found: Payback


def language_grid(comparison: Comparison) -> Grid | None:
    """None where the comparison is not about language models with a held-out loss."""
    rows = [row for row in comparison.rows if all(_LOSS in run.record.results for run in row.runs)]
    if not rows or comparison.measure is None or comparison.measure.name != "clm_loss":
        return None
    baseline = comparison.row(comparison.baseline)
    cells = [(*_own_cells(row), *_equal_cells(row, baseline)) for row in rows]
    titles = (
        "Method|Held-out\nloss, nats>|Training\ntokens/s>|Training\nJ/token>|Teacher\nshare>|"
        "Equal loss,\nnats>|Student J\nto it>|Baseline J\nto it>|N* at equal loss"
    )
    beyond = f" beyond those of {baseline.label}'s" if baseline and was_taught(baseline) else ""
    note = (
        "Equal loss: the worse one's at its end; the better one is charged up to where it had come as far. "
        f"N*: students after which the teacher's joules{beyond} have come back, from student stages alone."
        + exam_note(rows)
    )
    return make_grid("Language models at equal held-out loss", titles, cells, note)


def _own_cells(row: Row) -> tuple[str, ...]:
    loss = _mean([run.record.results[_LOSS].value for run in row.runs])
    stages = [stage for run in row.runs if (stage := run.record.stage(TRAIN))]
    speed = _mean([stage.tokens_per_s for stage in stages if stage.tokens_per_s])
    price = _mean([stage.j_per_token for stage in stages if stage.j_per_token])
    return (
        row.label,
        NOTHING if loss is None else f"{loss:.3f}",
        NOTHING if speed is None else f"{speed:,.0f}",
        NOTHING if price is None else three_digits(price) if price >= 0.01 else f"{price:.2g}",
        row.teacher_share_text,
    )


def _equal_cells(row: Row, baseline: Row | None) -> tuple[str, ...]:
    if baseline is None or row.label == baseline.label:
        return (NOTHING, NOTHING, NOTHING, "baseline" if baseline else NOTHING)
    if row.with_teacher.crowded or baseline.with_teacher.crowded:
        return (NOTHING, NOTHING, NOTHING, f"not known: {CROWDED}")
    if mixes_methods(figure for run in (*row.runs, *baseline.runs) for figure in _counted(run)):
        return (NOTHING, NOTHING, NOTHING, "not known: some of the joules are measured and some estimated")
    found = equal_loss(row, baseline)
    if found is None:
        return _cells_by_first_look(row, baseline)
    return (
        f"{found.loss:.3f}",
        energy_text(found.own_j),
        energy_text(found.base_j),
        _answer(row, baseline, found.found),
    )


def _counted(run: ComparedRun) -> list[EnergyFigure]:
    """All joules that an answer is computed from."""
    students = [part for part in parts_of(run.record) if part.stage == TRAIN or is_before(part)]
    return [part.figure for part in (*students, *teacher_parts(run))]


def _cells_by_first_look(row: Row, baseline: Row) -> tuple[str, ...]:
    """A baseline that was as good at its first look took no more than up to there. A student that took more saves
    nothing, whatever the looks in between would have shown."""
    both = _courses(row, baseline)
    bounds = [(own.final, own.whole_j, base.first_look_j) for base, own in both if own.final > base.losses[0]]
    if (
        not row.teacher_share
        or not bounds
        or len(bounds) < len(row.runs)
        or any(own <= base for _, own, base in bounds)
    ):
        return (NOTHING, NOTHING, NOTHING, "not known: no look at that loss on both sides")
    loss, own_j, base_j = (float(np.mean(side)) for side in zip(*bounds, strict=True))
    told = f"does not pay back: {baseline.label} was as good at its first look, with fewer joules"
    return (f"{loss:.3f}", energy_text(own_j), f"≤ {energy_text(base_j)}", told)


def _courses(row: Row, baseline: Row) -> list[tuple[Course, Course]]:
    """Baseline and method, by pairs, of those that were looked at on the way."""
    both = [(Course.of(base), Course.of(own)) for base, own in pairs_of(row.runs, baseline.runs)]
    return [(base, own) for base, own in both if base is not None and own is not None]


def _answer(row: Row, baseline: Row, found: Payback) -> str:
    if row.unmetered or baseline.unmetered:
        return f"not known: {NOT_METERED}"
    if not was_taught(row):
        return "had no teacher"
    if found.count == 0:
        return f"at once: {found.reason}"
    if found.count is not None:
        return f"{times_text(found.count, 'student')} students"
    repeat = ""
    if found.saved.value > 0 and found.spent.value > 0:
        alone = times_text(found.spent.value / found.saved.value, "student")
        repeat = f"; by these figures alone {alone} students"
    return f"does not pay back: {found.reason}{repeat}"


def equal_loss(row: Row, baseline: Row) -> EqualLoss | None:
    """None where one side has no looks on the way, no joules, or was as good before anybody looked."""
    pairs = pairs_of(row.runs, baseline.runs)
    courses = _courses(row, baseline)
    if not courses or len(courses) < len(pairs):
        return None
    losses = [max(base.final, own.final) for base, own in courses]
    both_j = [(base.charged_to(loss), own.charged_to(loss)) for (base, own), loss in zip(courses, losses, strict=True)]
    known = [(base_j, own_j) for base_j, own_j in both_j if base_j is not None and own_j is not None]
    if len(known) < len(pairs):
        return None
    saved = Estimate.of_repeats([base_j - own_j for base_j, own_j in known])
    found = payback(teacher_beyond(row, baseline), saved, "a student")
    base_j, own_j = (float(np.mean(side)) for side in zip(*known, strict=True))
    return EqualLoss(float(np.mean(losses)), own_j, base_j, found)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
