"""How it was measured, as a checklist: every question put to every measurement, ticked or with what was found."""

from __future__ import annotations

from collections.abc import Sequence

from joulelab.report.grid import Column, Grid
from joulelab.report.wording import NOTHING
from joulelab.runs.record import Check, RunRecord

TICK = "✓"


def checklist_grid(records: Sequence[RunRecord]) -> Grid | None:
    """Checks downwards, methods across; a tick where all its runs pass, else the worst grade and how many have it."""
    graded = [record for record in records if record.validity.checks]
    if not graded:
        return None
    labels = list(dict.fromkeys(record.label for record in graded))
    names = list(dict.fromkeys(check.name for record in graded for check in record.validity.checks))
    rows = []
    for name in names:
        checks = {label: _checks([r for r in graded if r.label == label], name) for label in labels}
        everyone = [check for found in checks.values() for check in found]
        worst = max(everyone, key=lambda check: (check.grade, not check.ok))
        rows.append((name, *(_cell(checks[label]) for label in labels), worst.text))
    columns = (Column("Check", whole=True), *(Column(label) for label in labels), Column("What was found, at worst"))
    note = f"{TICK} passed in every run. A sound, B usable with care, C not to be quoted; a run's grade is its worst."
    return Grid("Checklist", columns, tuple(rows), note)


def _checks(records: Sequence[RunRecord], name: str) -> list[Check]:
    return [check for record in records for check in record.validity.checks if check.name == name]


def _cell(checks: Sequence[Check]) -> str:
    if not checks:
        return NOTHING
    if all(check.ok for check in checks):
        return TICK
    worst = max(check.grade for check in checks)
    count = sum(check.grade == worst for check in checks)
    return worst if count == len(checks) else f"{worst} in {count} of {len(checks)}"
