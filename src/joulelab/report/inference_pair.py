"""A student beside its teacher in use, and after how many inferences the distillation has paid back (T*).

T* = what making the student took while its teacher existed already, over what the student takes less per item. It is
meant for rows that were run alike: same batch, sequence length, mode and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from joulelab.meter.figure_text import estimate_note
from joulelab.report.differences import CROWDED
from joulelab.report.grid import Grid, make_grid
from joulelab.report.inference_alike import doubt_about_maker, rows_run_alike
from joulelab.report.inference_notes import crowd_notes
from joulelab.report.inference_ratios import input_text
from joulelab.report.inference_rows import InferenceRow
from joulelab.report.inference_words import energy_cell
from joulelab.report.joules import mixes_methods, parts_of, why_incomplete
from joulelab.report.parts import NOT_METERED
from joulelab.report.wording import NOTHING
from joulelab.runs.record import RunRecord
from joulelab.stats import Estimate, Payback, payback
from joulelab.units import count_text, energy_text, three_digits


@dataclass(frozen=True)
class Pair:
    student: InferenceRow
    teacher: InferenceRow
    item: str
    over: int
    """Items in what the rows count: the tokens of a response, else 1."""
    found: Payback | None
    reason: str = ""
    """Why there is no answer; where there is one, whose joules were spent once."""

    @property
    def answer(self) -> str:
        if self.found is None:
            return f"unknown: {self.reason}"
        if not self.found.pays_back:
            return f"does not break even: {self.found.reason}"
        return "at once" if not self.found.count else f"after {count_text(self.found.count)} {self.item}s"


def pairs(student: RunRecord, teacher: RunRecord, made_by: RunRecord | None) -> list[Pair]:
    alike = rows_run_alike(student, teacher)
    spent = _spent_once(student, made_by)
    return [_pair(row, other, spent) for row, other in alike]


@dataclass(frozen=True)
class _Spent:
    joules: Estimate | None
    words: str
    """Whose joules these are, or why there are none."""
    estimated: bool = False


def _spent_once(student: RunRecord, made_by: RunRecord | None) -> _Spent:
    """Joules of making the student beyond its teacher: of the run that was named, or out of the student's lineage."""
    doubt = ""
    if made_by is not None:
        doubt = doubt_about_maker(student, made_by)
        parts = [part for part in parts_of(made_by) if not part.inherited or part.shared]
    else:
        parts = [part for part in parts_of(student) if part.inherited]
    figures = [part.figure for part in parts if not part.makes_the_teacher]
    known = [figure for figure in figures if figure.energy_j is not None]
    if any(figure.lower_bound and figure.energy_j is None for figure in figures):
        return _Spent(None, NOT_METERED)
    if incomplete := why_incomplete(known):
        return _Spent(None, incomplete)
    if not known:
        source = "that run" if made_by is not None else "the student's lineage"
        return _Spent(None, f"{source} has no joules of distillation (name its run with --distilled-by)")
    if mixes_methods(known):
        return _Spent(None, "the distillation is partly measured and partly estimated")
    if any(figure.crowded for figure in known):
        return _Spent(None, "others used the cores while the student was made")
    half_width_j = math.hypot(*(figure.half_width_j or 0.0 for figure in known))
    whose = "the stages that made the student, by its lineage"
    if made_by is not None:
        whose = f"all of {made_by.run_id} but its teacher's training, quality and overhead included{doubt}"
    joules = Estimate.of_half_width(sum(figure.energy_j or 0.0 for figure in known), half_width_j)
    return _Spent(joules, whose, estimated=not known[0].measured)


def _pair(student: InferenceRow, teacher: InferenceRow, spent: _Spent) -> Pair:
    tokens = int(student.values.get("new_tokens", 0))
    item, over = ("token", tokens) if tokens else (str(student.values["item"]), 1)

    def answer(found: Payback | None, reason: str = "") -> Pair:
        return Pair(student, teacher, item, over, found, reason)

    ours, theirs = student.energy, teacher.energy
    if ours is None or theirs is None:
        return answer(None, str((student if ours is None else teacher).values["why_no_energy"]))
    if ours.estimated != theirs.estimated:
        return answer(None, "one side is measured and the other estimated")
    if ours.estimated and (student.crowded or teacher.crowded):
        return answer(None, CROWDED)
    if spent.joules is None:
        return answer(None, spent.words)
    if spent.estimated != ours.estimated:
        return answer(None, "the distillation is measured and the use estimated, or the other way round")
    each = [Estimate.of_half_width(one.gross_j / over, one.gross_half_width_j / over) for one in (theirs, ours)]
    article = "an" if item[0] in "aeiou" else "a"
    return answer(payback(spent.joules, each[0] - each[1], f"{article} {item}"), spent.words)


def pair_grid(student: RunRecord, teacher: RunRecord, found: Sequence[Pair]) -> Grid:
    rows = []
    for one in found:
        how = f"{input_text(one.student)}, {one.student.name}"
        other = one.teacher.name if one.teacher.name != one.student.name else ""
        rows.append((how, f"student: {student.label}", *_cells(one.student, one.over)))
        rows.append((other, f"teacher: {teacher.label}", *_cells(one.teacher, one.over)))
        rows.append(("", "T*", NOTHING, NOTHING, _saved(one), _spent(one), _told(one)))
    rows_in_use = [(who, row) for one in found for who, row in (("student", one.student), ("teacher", one.teacher))]
    note = "".join(f"{text} " for text in crowd_notes(rows_in_use)) + (
        f"{_each_words(found[0])} T*: joules spent on making the student beyond its teacher, over the "
        "joules it takes less each time; Fieller's 95 % interval. Quality is not in this table: T* means something "
        "where the student is good enough."
    )
    note += "".join(f" Spent once: {words}." for words in dict.fromkeys(one.reason for one in found if one.found))
    energies = [row.energy for one in found for row in (one.student, one.teacher) if row.energy]
    if doubt := estimate_note(energy.gross() for energy in energies):
        note += f" {doubt}"
    of = found[0].item if found[0].over > 1 else "call"
    titles = f"How!|Who!|Median ms\nper {of}>|Mean W>|Energy\nper {found[0].item}>|Spent once>|Breaks even"
    return make_grid("Student against teacher in use", titles, rows, note)


def _each_words(pair: Pair) -> str:
    if pair.over == 1:
        return f"Energy per {pair.item}, gross."
    return f"Time and gross energy per token: those of a whole response, its prompt read, over its {pair.over} tokens."


def _cells(row: InferenceRow, over: int) -> tuple[str, str, str, str, str]:
    energy, latency = row.energy, f"{1000 * row.latency_s / over:.4g}"
    if energy is None:
        return latency, "missing", "missing", NOTHING, NOTHING
    return latency, three_digits(energy.power_w), energy_cell(energy, over), NOTHING, NOTHING


def _saved(one: Pair) -> str:
    return NOTHING if one.found is None else f"saves {energy_text(one.found.saved.value)}"


def _spent(one: Pair) -> str:
    return NOTHING if one.found is None else energy_text(one.found.spent.value)


def _told(one: Pair) -> str:
    if one.found is None or math.isinf(one.found.low) or not one.found.pays_back:
        return one.answer
    high = "no upper end" if math.isinf(one.found.high) else count_text(one.found.high)
    return f"{one.answer} [{count_text(one.found.low)} to {high}]"


def pair_data(found: Sequence[Pair]) -> list[dict[str, Any]]:
    return [
        {
            "stage": one.student.stage,
            "item": one.item,
            "student": None if one.student.energy is None else one.student.energy.model_dump(),
            "teacher": None if one.teacher.energy is None else one.teacher.energy.model_dump(),
            "items_per_row": one.over,
            "student_median_s_per_call": one.student.latency_s,
            "teacher_median_s_per_call": one.teacher.latency_s,
            "spent_j": None if one.found is None else one.found.spent.value,
            "saved_j_per_item": None if one.found is None else one.found.saved.value,
            "pays_back_after": None if one.found is None else one.found.count,
            "low": None if one.found is None or math.isinf(one.found.low) else one.found.low,
            "high": None if one.found is None or math.isinf(one.found.high) else one.found.high,
            "answer": one.answer,
        }
        for one in found
    ]
