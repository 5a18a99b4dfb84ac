"""Break-even in words: a sentence for the verdict, and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from joulelab.meter.figure_text import estimate_note
from joulelab.report.comparison import Comparison
from joulelab.report.exam import exam_note
from joulelab.report.grid import Grid, make_grid
from joulelab.report.payback import RowPayback, paybacks, times_text
from joulelab.report.wording import INCONCLUSIVE, NOTHING
from joulelab.stats import Payback
from joulelab.units import energy_text

# A number of students or items with an interval wider than this factor carries no information.
_WIDEST = 100.0


def count_interval(found: Payback, each: str) -> str:
    if math.isinf(found.low):
        return NOTHING
    if found.low == 0 and math.isinf(found.high):
        return "not bounded"
    if found.count and found.high > _WIDEST * found.low:
        return INCONCLUSIVE
    high = "no upper end" if math.isinf(found.high) else times_text(found.high, each)
    return f"{times_text(found.low, each)} to {high}"


def payback_sentence(one: RowPayback) -> str:
    goal = _goal(one)
    if one.found is None:
        return f"{goal}: break-even cannot be computed: {one.reason}."
    if one.found.count == 0:
        return f"{goal} breaks even at once: {one.found.reason}."
    if one.found.pays_back:
        return f"{goal} breaks even after {one.answer} [{count_interval(one.found, one.each)}]{_quality(one)}."
    if math.isinf(one.found.saved.standard_error) and min(one.found.saved.value, one.found.spent.value) > 0:
        by_these = times_text(one.found.spent.value / one.found.saved.value, one.each)
        reason = f"{one.found.reason}; the point estimate is {by_these} {one.each}s"
        return f"{goal} does not break even as far as these runs show: {reason}{_quality(one)}."
    open_end = one.found.low if math.isfinite(one.found.low) and one.found.low > 1 else None
    could = ""
    if open_end:
        could = f"; the data allow break-even after {times_text(open_end, one.each)} {one.each}s or more"
    return f"{goal} does not break even: {one.found.reason}{could}{_quality(one)}."


def _goal(one: RowPayback) -> str:
    if one.each != "student":
        return f"{one.label} in place of {one.against}"
    if not one.beyond:
        return f"The teacher of {one.label}"
    if one.found is not None and one.found.spent.value < 0:
        return f"The teacher of {one.label}, which took less than that of {one.against},"
    return f"What the teacher of {one.label} took beyond that of {one.against}"


def _quality(one: RowPayback) -> str:
    """At which quality; or, for items, where what is saved on each was measured."""
    beside = one.quality or one.reason.split(";")[0]
    return f" ({beside})" if beside else ""


def payback_grid(comparison: Comparison) -> Grid | None:
    found = paybacks(comparison)
    if not found:
        return None
    rows = [
        (
            one.label,
            one.against,
            energy_text(one.found.spent.value) if one.found else NOTHING,
            energy_text(one.found.saved.value) if one.found else NOTHING,
            one.answer,
            count_interval(one.found, one.each) if one.found else NOTHING,
        )
        for one in found
    ]
    remarks = dict.fromkeys(one.reason for one in found if one.reason)
    beyond = f" beyond that of {comparison.baseline}'s" if any(one.beyond for one in found) else ""
    note = (
        f"Students: the teacher's energy{beyond} over what its help saves on the student stages ({_at_equal(found)}). "
        "Tokens or samples: the energy of making the student beyond its teacher over what it saves per item in use. "
        "Interval: Fieller's, 95 %; where the saving is not significantly above 0 it has no upper end, and the result "
        "is that it does not break even."
        + exam_note([row for row in comparison.rows if row.role != "teacher"])
        + "".join(f" {remark[:1].upper()}{remark[1:]}." for remark in remarks)
    )
    if doubt := estimate_note(row.with_teacher for row in comparison.rows):
        note += f" {doubt}"
    return make_grid("Break-even", "Method|Against|Spent\nonce>|Saved by\neach>|Breaks even after|95 %!", rows, note)


def _at_equal(found: Sequence[RowPayback]) -> str:
    if any(one.costs and one.costs.loss is not None for one in found):
        return "up to equal held-out loss"
    return "students that are significantly worse do not break even"
