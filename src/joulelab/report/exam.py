"""The teacher's exam: how good it is was asked for the comparison's sake, and teaches nobody.

It is in the bills, because somebody spent it, and in no break-even, because the next student does not ask again.
"""

from __future__ import annotations

from collections.abc import Sequence

from joulelab.report.comparison import Comparison, Row
from joulelab.report.joules import Part
from joulelab.report.wording import listed
from joulelab.units import energy_text

_NOT_PAID_BACK = "The teacher's exam is not counted: it tells how good the teacher is, and helps no student."


def exam_note(rows: Sequence[Row]) -> str:
    """For a table of paybacks, with a space before it; empty where no bill has an exam in it."""
    return f" {_NOT_PAID_BACK}" if any(_exams(row) for row in rows) else ""


def exam_sentences(comparison: Comparison) -> list[str]:
    """In whose bills it is, and how much of them; the teacher's own row is about the teacher."""
    rows = [row for row in comparison.rows if row.role != "teacher" and _exams(row)]
    if not rows:
        return []
    means_j = [sum(part.figure.energy_j or 0.0 for part in _exams(row)) / len(row.runs) for row in rows]
    ends = dict.fromkeys(energy_text(end(means_j)) for end in (min, max))
    whose = f"{'bill' if len(rows) == 1 else 'bills'} of {listed([row.label for row in rows])}"
    return [
        f"The teacher's exam ({' to '.join(ends)}) is in the {whose}: it was asked for the comparison's sake, and is "
        "in no break-even count."
    ]


def _exams(row: Row) -> list[Part]:
    parts = [part for run in row.runs for part in run.parts]
    return [part for part in parts if part.is_exam and part.figure.energy_j is not None]
