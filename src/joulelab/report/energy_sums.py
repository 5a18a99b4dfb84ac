"""Energy of a run in parts (own stages and inherited artifacts) and their sums, with the method of each kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from joulelab.meter.figures import EnergyFigure, coverage_text, missing, total
from joulelab.runs.artifacts import UNMETERED, Ancestor
from joulelab.runs.measure.result import RUN
from joulelab.runs.record import (
    MEASURED_COMPONENTS,
    EnergyByComponent,
    RunRecord,
    StageKind,
    StageRecord,
    components_of,
    kinds_of,
)

NOT_RECORDED = "the run has no recorded energy"
NOT_METERED = "some of the teacher's work was done where no meter recorded it"
COVERED_FOR_RATIOS = 0.98

PartKind = Literal["work", "setup", "repeated"]


@dataclass(frozen=True)
class Part:
    """Energy of one stage or ancestor."""

    stage: str
    """Its name in tables and figures."""
    stages: tuple[str, ...]
    """The stages it was made in: one, or all of an inherited artifact's."""
    inherited: bool
    is_teachers: bool
    """The teacher's work."""
    shared: bool
    """N students share it: the teacher's work, and data made from it (`shared_keys`)."""
    figure: EnergyFigure
    """Under the run's own policy."""
    by_scope: Mapping[str, EnergyFigure]
    """`policy`, `gpu` and `all` measured components; `scopes.py` has the scopes a reader can choose."""
    key: str | None = None
    """Key of the artifact that was made, which identifies the same work in another run's bill."""
    kind: PartKind = "work"
    kinds: tuple[StageKind, ...] = ()
    """Role and activity of its stages."""
    is_repeat: bool = False
    """One run of a measured program; all of them are the same work and have the same name."""
    duration_s: float | None = None
    """None for inherited work: the record of the run that did it has it."""

    @property
    def is_for_one_student(self) -> bool:
        """The teacher's work that no other student can use."""
        return self.is_teachers and not self.shared

    @property
    def makes_the_teacher(self) -> bool:
        """The teacher's training and the validations during it, which one artifact's bill has under one name."""
        return any(one.role == "teacher" and one.activity in ("train", "validate") for one in self.kinds)

    @property
    def is_teacher_evaluation(self) -> bool:
        """Evaluations of the teacher, which no student is trained on."""
        return self.is_teachers and bool(self.kinds) and all(one.activity == "evaluate" for one in self.kinds)

    @property
    def is_students(self) -> bool:
        return not self.is_teachers and any(one.role == "student" for one in self.kinds)

    @property
    def is_student_stage(self) -> bool:
        """What each student needs for itself, whichever run did it: its stages, those of the student that it starts
        from, and what the teacher does for it alone. Not the data."""
        return self.is_students or self.is_for_one_student


def all_parts(record: RunRecord, repeat: int | None = None) -> tuple[Part, ...]:
    """A run's energy in parts that add up to everything it used, inherited ones first, without idle baselines.

    Setup and repeated work are parts of their own kind. With `repeat` the work is that one run of a measured program;
    the setup is that of all its runs.
    """
    shared = shared_keys(record.lineage)
    inherited = [part for ancestor in record.inherited for part in _ancestor_parts(ancestor, record.policy, shared)]
    made = {name: one.key for one in record.lineage if one.key in record.made for name in one.stages}
    stages = [stage for stage in record.stages if not stage.outside_totals]
    if repeat is not None:
        stages = [stage for stage in stages if stage.repeat in (None, repeat)]
    own = [_own_part(stage, made.get(stage.name), shared) for stage in stages]
    if not inherited and all(part.kind != "work" for part in own):
        own = [replace(part, kind="work") for part in own]  # a run without stages has nothing else to compare
    return (*inherited, *own)


def method_parts(parts: Iterable[Part], include_repeated: bool = False) -> tuple[Part, ...]:
    """The parts that comparisons count: table, page, verdict and break-even use the same ones."""
    return tuple(part for part in parts if part.kind == "work" or (include_repeated and part.kind == "repeated"))


def part_kind(stage: StageRecord) -> PartKind:
    return "repeated" if stage.repeated else "setup" if stage.role == "setup" else "work"


def parts_of(record: RunRecord) -> tuple[Part, ...]:
    return method_parts(all_parts(record))


def shared_keys(lineage: Iterable[Ancestor]) -> frozenset[str]:
    """Keys of what all students of a teacher share: its work, and the data made from it, as a filtered synthetic set.

    Not of what serves one student: its scores, and everything made from text that the student wrote.
    """
    by_key = {one.key: one for one in lineage}
    found = set()
    for one in by_key.values():
        made_from = {one.key: one}  # with itself
        waiting = [*one.parents]
        while waiting:
            parent = by_key.get(waiting.pop())
            if parent is not None and parent.key not in made_from:
                made_from[parent.key] = parent
                waiting += parent.parents
        is_data = {kind.role for kind in kinds_of(one)} == {"data"}
        is_taught = any(is_teacher_work(each) for each in made_from.values())
        if (is_teacher_work(one) or (is_data and is_taught)) and not any(map(_serves_one, made_from.values())):
            found.add(one.key)
    return frozenset(found)


def _serves_one(ancestor: Ancestor) -> bool:
    """Whether it is for one student, or was written by one. What made a teacher serves all of its students."""
    written = ("student", "generate")
    kinds = () if ancestor.used_as == "teacher" else kinds_of(ancestor)
    return any(kind.is_for_one_student or (kind.role, kind.activity) == written for kind in kinds)


def _own_part(stage: StageRecord, key: str | None, shared: Collection[str]) -> Part:
    kind = part_kind(stage)
    kinds = (stage.kind,)
    figures = stage.best, _scopes(stage.energy, stage.best)
    is_repeat = stage.repeat is not None
    name = RUN if is_repeat else stage.name
    is_teachers = stage.role == "teacher"
    is_shared = (is_teachers or stage.role == "data") and key in shared
    if key is None:  # no artifact was made in it, as where the teacher works during the student's training
        is_shared = is_teachers and not stage.kind.is_for_one_student
    return Part(name, (name,), False, is_teachers, is_shared, *figures, key, kind, kinds, is_repeat, stage.duration_s)


def _ancestor_parts(ancestor: Ancestor, policy: str, shared: Collection[str]) -> list[Part]:
    """One part, or separate ones for work, setup and repeated work."""
    name, kinds, stages = _part_name(ancestor), kinds_of(ancestor), ancestor.stages or (ancestor.name,)
    by_kind: list[tuple[PartKind, str, Ancestor]] = [("work", name, ancestor)]
    if ancestor.work:
        separate: list[tuple[PartKind, str, dict[str, EnergyFigure]]] = [
            ("work", name, ancestor.work),
            ("setup", f"{name}, setup", ancestor.setup),
            ("repeated", f"{name}, repeated", ancestor.repeated),
        ]
        by_kind = [
            (kind, title, ancestor.model_copy(update={"energy": energy})) for kind, title, energy in separate if energy
        ]
    return [
        Part(
            title,
            stages,
            True,
            is_teacher_work(one),
            one.key in shared,
            figure,
            _scopes(components_of(one), figure),
            one.key,
            kind,
            kinds,
        )
        for kind, title, one in by_kind
        if (figure := ancestor_figure(one, policy))
    ]


def _part_name(ancestor: Ancestor) -> str:
    """Its stages. A teacher that was trained as something else is marked, to distinguish it from the student's work."""
    name = " + ".join(ancestor.stages) or ancestor.name
    as_made = ancestor.model_copy(update={"used_as": None})
    return (
        f"{name}, of the teacher"
        if is_teacher_work(ancestor) and ancestor.stages and not is_teacher_work(as_made)
        else name
    )


def _scopes(energy: EnergyByComponent, best: EnergyFigure) -> dict[str, EnergyFigure]:
    return {"policy": best, "gpu": energy.gpu, "all": energy.under_policy("measured")}


@dataclass(frozen=True)
class RunEnergy:
    """Sums of a run's own and inherited energy, and the sums that comparisons use.

    For one repeat of a measured program, the sums for comparisons are its own; the others cover all repeats.
    """

    own: EnergyFigure
    """Setup and repeated work included."""
    inherited: EnergyFigure | None
    """None if the run reused nothing of other runs."""
    whole: EnergyFigure
    """Own and inherited, setup and repeated work included."""
    mixed_whole: bool
    with_teacher: EnergyFigure
    """For comparisons: without setup and, unless requested, without repeated work."""
    inherited_unshared: EnergyFigure | None
    """Inherited, without what the students of a teacher share."""
    without_teacher: EnergyFigure
    """Own and inherited: which of several seeds made what all of them use is chance."""
    setup: EnergyFigure | None
    repeated: EnergyFigure | None
    """Not included in `with_teacher`; None if there is none."""
    teacher_j: float
    """Energy of the teacher's stages, own and inherited."""
    unknown: tuple[str, ...]
    """Ancestors of unknown energy: they are left out of every sum."""
    unmetered: tuple[str, ...]
    """Those that did work for this run without a meter: sums without it are lower bounds."""
    mixed: bool
    """Whether the sum with the teacher adds estimates to measurements, which is printed with it."""
    incomplete: str
    """Why the sum with the teacher has no ratio; empty if it has one."""
    mixed_without: bool
    incomplete_without: str
    """The same of the sum without the teacher."""


def run_energy(record: RunRecord, repeat: int | None = None, include_repeated: bool = False) -> RunEnergy:
    parts = all_parts(record, repeat)
    counted = method_parts(parts, include_repeated)
    own = record.totals.best if record.totals else missing(NOT_RECORDED)
    bills = [part.figure for part in parts if part.inherited]
    no_teacher = is_teacher(record)  # a teacher's own run without the teacher's work would be empty
    students = [part for part in counted if no_teacher or not part.is_teachers]
    others = [part.figure for part in counted if part.inherited and (no_teacher or not part.shared)]
    apart = [part for part in parts if part not in counted]
    return RunEnergy(
        own=own,
        inherited=known_sum(bills) if bills else None,
        whole=own if own.energy_j is None else known_sum([own, *bills]),
        mixed_whole=mixes_methods([own, *bills]),
        with_teacher=_method_sum(own, counted),
        inherited_unshared=known_sum(others) if others else None,
        without_teacher=_method_sum(own, students),
        setup=_sum_of_kind(apart, "setup"),
        repeated=_sum_of_kind(apart, "repeated"),
        teacher_j=sum(part.figure.energy_j or 0.0 for part in counted if part.is_teachers),
        unknown=tuple(dict.fromkeys(_name(record, part) for part in parts if _is_unknown(part))),
        unmetered=tuple(ancestor.name for ancestor in record.inherited if ancestor.kind == UNMETERED),
        mixed=mixes_methods(part.figure for part in counted),
        incomplete=_why_no_ratio(counted),
        mixed_without=mixes_methods(part.figure for part in students),
        incomplete_without=_why_no_ratio(students),
    )


def teacher_share(record: RunRecord) -> float | None:
    """The teacher's share of the energy that comparisons count; None without energy."""
    found = run_energy(record)
    return found.teacher_j / found.with_teacher.energy_j if found.with_teacher.energy_j else None


def _method_sum(own: EnergyFigure, parts: Sequence[Part]) -> EnergyFigure:
    return own if own.energy_j is None or not parts else known_sum([part.figure for part in parts])


def _why_no_ratio(parts: Sequence[Part]) -> str:
    """Missing last readings of a killed attempt are part of the interval and do not prevent a ratio."""
    unmetered = any(part.figure.lower_bound and part.figure.energy_j is None for part in parts)
    work = [part.figure for part in parts if part.kind != "repeated"]
    return why_incomplete([known_sum(work)] if work else [], unmetered)


def _sum_of_kind(parts: Sequence[Part], kind: PartKind) -> EnergyFigure | None:
    figures = [part.figure for part in parts if part.kind == kind]
    return known_sum(figures) if figures else None


def _is_unknown(part: Part) -> bool:
    return part.inherited and part.figure.energy_j is None


def _name(record: RunRecord, part: Part) -> str:
    return next(ancestor.name for ancestor in record.inherited if ancestor.key == part.key)


def is_teacher(record: RunRecord) -> bool:
    """Whether the run prepares a teacher and trains no student."""
    roles = {stage.role for stage in record.stages}
    return "teacher" in roles and "student" not in roles


def known_sum(figures: Sequence[EnergyFigure]) -> EnergyFigure:
    """Sum of the known figures; a lower bound if some figure that belongs to it is unknown."""
    known = [figure for figure in figures if figure.energy_j is not None]
    summed = total(known or figures)
    return summed.model_copy(update={"lower_bound": any(one.lower_bound or one.is_lower_bound for one in figures)})


def is_teacher_work(ancestor: Ancestor) -> bool:
    """Whether it is a teacher's work: made by a teacher (on any machine), or used as a teacher or to make one."""
    return ancestor.used_as == "teacher" or any(kind.role == "teacher" for kind in kinds_of(ancestor))


def ancestor_figure(ancestor: Ancestor, policy: str) -> EnergyFigure:
    """The figure that tables show: measured total, else estimate, else missing with the reason."""
    if "all" in ancestor.energy:
        return ancestor.energy["all"]
    return components_of(ancestor).best(policy)


def brief_missing_text(record: RunRecord, figure: EnergyFigure) -> str:
    """A short text for a missing figure if the validity notes contain its reasons; otherwise empty."""
    marker = " not measured"
    starts = tuple(f"{component}{marker}: " for component in MEASURED_COMPONENTS)
    notes = [note.text.replace(marker, "", 1) for note in record.validity.notes if note.text.startswith(starts)]
    same = figure.energy_j is None and notes and figure.reason == "; ".join(notes)
    return "missing: no sensor (reasons under Validity notes)" if same else ""


def mean_figure(figures: Iterable[EnergyFigure]) -> EnergyFigure:
    """Mean over repeats, coverage included. Random half-widths average out, the gain error does not."""
    parts = list(figures)
    present = [part for part in parts if part.energy_j is not None]
    # Sum over n, divided by n: independent errors add in quadrature and shrink by sqrt(n), shared
    # ones add linearly and stay, gain errors stay as they are.
    return total(present, [1.0] * len(present)).scaled(1 / len(present)) if present else total(parts)


def why_incomplete(figures: Iterable[EnergyFigure], unmetered: bool = False) -> str:
    """Why these figures have no ratio; empty if they are complete.

    Up to 2 % of time without readings biases a ratio by no more than that; tables mark such figures with ≥.
    `unmetered`: work that belongs to them was done without a meter.
    """
    least = min((figure.coverage for figure in figures if figure.is_lower_bound), default=1.0)
    if least < COVERED_FOR_RATIOS:
        return f"readings are missing ({coverage_text(least)})"
    return "some of the work was not metered" if unmetered else ""


def missing_time_rel(figure: EnergyFigure) -> float:
    """Energy that a lower bound may miss because of time without readings, relative to it."""
    if not figure.energy_j or not figure.is_lower_bound:
        return 0.0
    lacking_j = sum(error.half_width_j for error in figure.errors if error.name == "missing time")
    return lacking_j / abs(figure.energy_j)


def mixes_methods(figures: Iterable[EnergyFigure]) -> bool:
    present = [figure for figure in figures if figure.energy_j is not None]
    return len({figure.measured for figure in present}) > 1
