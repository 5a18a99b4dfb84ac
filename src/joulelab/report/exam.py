"""The teacher's exam: how good it is was asked for the comparison's sake, and teaches nobody.

It is in the bills, because somebody spent it, and in no break-even, because the next student does not ask again.
"""

from __future__ import annotations

from collections.abc import Sequence

from joulelab.meter.figure_text import amount_text
from joulelab.meter.figures import EnergyFigure
from joulelab.report.comparison import Comparison, Row
from joulelab.report.joules import Part, known_sum
from joulelab.report.wording import listed

_NOT_PAID_BACK = "The teacher's exam is not counted: it tells how good the teacher is, and helps no student."


def exam_note(rows: Sequence[Row]) -> str:
    """For a table of paybacks, with a space before it; empty where no bill has an exam in it."""
    return f" {_NOT_PAID_BACK}" if any(_exams(row) for row in rows) else ""


def exam_sentences(comparison: Comparison) -> list[str]:
    """In whose bills it is, and how much of them; the teacher's own row is about the teacher."""
    rows = [row for row in comparison.rows if row.role != "teacher" and _exams(row)]
    if not rows:
        return []
    means = [_mean([part.figure for part in _exams(row)], len(row.runs)) for row in rows]
    ends = dict.fromkeys(amount_text(end(means, key=lambda figure: figure.energy_j or 0.0)) for end in (min, max))
    whose = f"{'bill' if len(rows) == 1 else 'bills'} of {listed([row.label for row in rows])}"
    return [
        f"The teacher's exam ({' to '.join(ends)}) is in the {whose}: it was asked for the comparison's sake, and is "
        "in no break-even count."
    ]


def _exams(row: Row) -> list[Part]:
    parts = [part for run in row.runs for part in run.parts]
    return [part for part in parts if part.is_exam and part.figure.energy_j is not None]


def _mean(figures: Sequence[EnergyFigure], runs: int) -> EnergyFigure:
    """Of what is often one measurement that all runs share: its error does not average out."""
    summed = known_sum(figures)
    half_width_j = sum(figure.half_width_j or 0.0 for figure in figures)
    return summed.with_interval(summed.energy_j or 0.0, half_width_j).scaled(1 / runs)
