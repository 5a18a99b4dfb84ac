"""Joules from several places put together without losing how each was obtained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from joulelab.meter.figures import EnergyFigure, missing, total
from joulelab.runs.bills import UNMETERED, Ancestor
from joulelab.runs.record import RunRecord, components_of

TEACHER_PREFIX = "teacher."
NOT_RECORDED = "the run has no recorded joules"


@dataclass(frozen=True)
class RunJoules:
    """What one run took itself, what it uses of others' work, and both together."""

    own: EnergyFigure
    inherited: EnergyFigure | None
    """None where the run used nothing that others paid for."""
    with_teacher: EnergyFigure
    inherited_but_teacher: EnergyFigure | None
    without_teacher: EnergyFigure
    """Whoever paid: which of several seeds made what all of them use is chance, and decides nothing."""
    teacher_j: float
    """Joules of `teacher.*` stages, whoever paid for them."""
    unknown: tuple[str, ...]
    """Ancestors whose joules nobody measured: they are in no sum."""
    unmetered: tuple[str, ...]
    """Those of them that are work done for this run: a sum without it is a lower bound."""
    mixed: bool
    """Whether the sum with the teacher adds estimates to measurements; it must then say so."""
    mixed_without: bool
    """The same of the sum without the teacher."""


def run_joules(record: RunRecord) -> RunJoules:
    own = record.totals.best if record.totals else missing(NOT_RECORDED)
    bills = [(ancestor, ancestor_figure(ancestor, record.policy)) for ancestor in record.inherited]
    known = [figure for _, figure in bills if figure.energy_j is not None]
    whole = is_teacher(record)  # without the teacher there is nothing to tell of it
    students = [figure for ancestor, figure in bills if whole or not made_by_teacher(ancestor)]
    but_teacher = own if whole else _own_but_teacher(record, own)
    return RunJoules(
        own=own,
        inherited=known_sum([figure for _, figure in bills]) if bills else None,
        with_teacher=own if own.energy_j is None else known_sum([own, *(figure for _, figure in bills)]),
        inherited_but_teacher=known_sum(students) if students else None,
        without_teacher=but_teacher if but_teacher.energy_j is None else known_sum([but_teacher, *students]),
        teacher_j=_teacher_j(record, bills),
        unknown=tuple(dict.fromkeys(ancestor.name for ancestor, figure in bills if figure.energy_j is None)),
        unmetered=tuple(ancestor.name for ancestor, _ in bills if ancestor.kind == UNMETERED),
        mixed=mixes_methods([own, *known]),
        mixed_without=mixes_methods([but_teacher, *students]),
    )


def _own_but_teacher(record: RunRecord, own: EnergyFigure) -> EnergyFigure:
    """The run's overhead stays with the student: nobody can tell whose it is."""
    stages = [stage for stage in record.stages if not stage.outside_totals]
    others = [stage.best for stage in stages if not stage.name.startswith(TEACHER_PREFIX)]
    return own if own.energy_j is None or len(others) == len(stages) else total(others)


def is_teacher(record: RunRecord) -> bool:
    """A run that prepares what students learn from and trains none itself."""
    names = [stage.name for stage in record.stages]
    return any(name.startswith(TEACHER_PREFIX) for name in names) and not any(
        name.startswith("student.") for name in names
    )


def known_sum(figures: Sequence[EnergyFigure]) -> EnergyFigure:
    """Of what is known; a lower bound where something that belongs to it is not."""
    known = [figure for figure in figures if figure.energy_j is not None]
    summed = total(known or figures)
    return summed.model_copy(update={"lower_bound": any(figure.lower_bound for figure in figures)})


def _teacher_j(record: RunRecord, bills: Sequence[tuple[Ancestor, EnergyFigure]]) -> float:
    own = sum(stage.best.energy_j or 0.0 for stage in record.stages if stage.name.startswith(TEACHER_PREFIX))
    return own + sum(figure.energy_j or 0.0 for ancestor, figure in bills if made_by_teacher(ancestor))


def made_by_teacher(ancestor: Ancestor) -> bool:
    """Also what a teacher did on another machine, which has no stage of ours."""
    names = (ancestor.name,) if ancestor.kind == UNMETERED else ancestor.stages
    return any(stage.startswith(TEACHER_PREFIX) for stage in names)


def ancestor_figure(ancestor: Ancestor, policy: str) -> EnergyFigure:
    """The figure a table shows for an ancestor: its measured total, else its estimate, else missing with the reason."""
    if "all" in ancestor.energy:
        return ancestor.energy["all"]
    return components_of(ancestor).best(policy)


def said_below(record: RunRecord, figure: EnergyFigure) -> str:
    """A short word for a missing figure where the notes say the same at length; empty where they do not."""
    marker = " not measured"
    notes = [note.text.replace(marker, "", 1) for note in record.validity.notes if f"{marker}: " in note.text]
    same = figure.energy_j is None and notes and figure.reason == "; ".join(notes)
    return "missing: no sensor measured it (why: How far to trust it, below)" if same else ""


def mean_figure(figures: Iterable[EnergyFigure]) -> EnergyFigure:
    """Mean over repeats. Random half-widths average out, the gain error does not."""
    parts = list(figures)
    present = [part for part in parts if part.energy_j is not None]
    return total(present).scaled(1 / len(present)) if present else total(parts)


def mixes_methods(figures: Iterable[EnergyFigure]) -> bool:
    present = [figure for figure in figures if figure.energy_j is not None]
    return len({figure.measured for figure in present}) > 1
