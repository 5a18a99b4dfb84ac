"""The energy bill of an artefact or a run: what it took itself, what it inherited, and what N students share of that.

Lineage is a graph, and each ancestor counts once, however many ways lead to it. What came from elsewhere is a line
without joules, and in no sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from joulelab.errors import NotFoundError, UsageError
from joulelab.meter.figures import EnergyFigure, missing, total
from joulelab.report.joules import ancestor_figure, made_by_teacher, mixes_methods
from joulelab.runs.artifacts import find_artifact, read_bill
from joulelab.runs.bills import BILL, ELSEWHERE, Ancestor, Bill
from joulelab.runs.paths import GroupPaths
from joulelab.runs.record import EnergyByComponent, RunRecord
from joulelab.runs.store import find_folder, load_record

COMPONENTS = tuple(EnergyByComponent.model_fields)


@dataclass(frozen=True)
class BillLine:
    """One piece of work: a stage of the run, or an ancestor."""

    key: str
    name: str
    kind: str
    made_by: str
    figure: EnergyFigure
    components: dict[str, EnergyFigure]
    parents: tuple[str, ...]
    shared: bool
    """A teacher's work, which N students share."""

    @property
    def elsewhere(self) -> bool:
        return self.made_by == ELSEWHERE


@dataclass(frozen=True)
class EnergyBill:
    title: str
    kind: str
    made_by: str
    own: tuple[BillLine, ...]
    inherited: tuple[BillLine, ...]
    """Each ancestor once."""
    roots: tuple[str, ...]
    """Keys of the ancestors it uses directly."""
    students: int
    provisional: bool = False
    record: RunRecord | None = None
    """The run behind it, where its folder is still there."""
    duration_s: float | None = None
    own_totals: dict[str, EnergyFigure] = field(default_factory=dict)
    """What the run's record says of its own stages together, by component, and as `best` what tables show."""

    @property
    def lines(self) -> tuple[BillLine, ...]:
        return self.own + self.inherited

    @property
    def unknown(self) -> tuple[str, ...]:
        return tuple(line.name for line in self.inherited if line.figure.energy_j is None)

    @property
    def mixed(self) -> bool:
        return mixes_methods(line.figure for line in self.lines)

    def share(self, line: BillLine) -> EnergyFigure:
        """What one student has to bear of a line."""
        return scaled(line.figure, 1 / self.students) if line.shared else line.figure

    @property
    def own_figure(self) -> EnergyFigure:
        return self._own("best") or _sum(self.share(line) for line in self.own)

    @property
    def inherited_figure(self) -> EnergyFigure | None:
        return _sum(self.share(line) for line in self.inherited) if self.inherited else None

    @property
    def whole(self) -> EnergyFigure:
        return _sum([self.own_figure, *(self.share(line) for line in self.inherited)])

    def _own(self, name: str) -> EnergyFigure | None:
        """The record's own sum, as other tables have it: two neighbours' errors at their common edge cancel in it.

        None where there is none, or where N students share some of these stages.
        """
        if self.students > 1 and any(line.shared for line in self.own):
            return None
        found = self.own_totals.get(name)
        return found.model_copy(update={"reason": None}) if found and found.energy_j is not None else None

    def own_component(self, name: str) -> EnergyFigure:
        return self._own(name) or self._component(name, self.own)

    def inherited_component(self, name: str) -> EnergyFigure:
        return self._component(name, self.inherited)

    def component(self, name: str) -> EnergyFigure:
        """Own and inherited together."""
        return _sum([self.own_component(name), *([self.inherited_component(name)] if self.inherited else [])])

    def _component(self, name: str, lines: Sequence[BillLine]) -> EnergyFigure:
        parts = [line.components.get(name, missing("not in its bill")) for line in lines]
        shares = [
            scaled(part, 1 / self.students) if line.shared else part for part, line in zip(parts, lines, strict=True)
        ]
        return _sum(shares)


def scaled(figure: EnergyFigure, factor: float) -> EnergyFigure:
    if figure.energy_j is None:
        return figure
    half_width_j = None if figure.half_width_j is None else figure.half_width_j * factor
    return figure.model_copy(update={"energy_j": figure.energy_j * factor, "half_width_j": half_width_j})


def _sum(figures: Iterable[EnergyFigure]) -> EnergyFigure:
    """Of what is known; what is not stands in no sum, and its reasons would only repeat its lines."""
    parts = list(figures)
    known = [figure for figure in parts if figure.energy_j is not None]
    if known:
        return total(known).model_copy(update={"reason": None})
    return parts[0] if parts else missing("nothing to add")


def find_bill(store: Path, name: str, students: int = 1) -> EnergyBill:
    """Of a run, of an artefact's folder, of `RUN/ARTEFACT`, or of an artefact's key."""
    folder = Path(name)
    if (folder / BILL).is_file():
        return artefact_bill(_read(folder), store, students)
    run_name, _, artefact = name.rpartition("/")
    if folder.is_dir() and run_name and not (folder / "run.json").exists():
        raise NotFoundError(f"{name} is a folder without {BILL} or run.json", "name an artefact's folder, or a run's")
    if run_name and not folder.exists():
        found = find_folder(store, run_name) / "artifacts" / artefact
        if not (found / BILL).is_file():
            known = ", ".join(sorted(path.parent.name for path in found.parent.glob(f"*/{BILL}"))) or "none"
            raise NotFoundError(f"{found.parent.parent.name} has no artefact '{artefact}'", f"its artefacts: {known}")
        return artefact_bill(_read(found), store, students)
    try:
        place = find_folder(store, name)
    except NotFoundError:
        by_key = find_artifact(store, name) if store.is_dir() else None
        if by_key is None:
            raise
        return artefact_bill(by_key.bill, store, students)
    if GroupPaths(place).record.exists():
        raise UsageError(
            f"{place.name} is a group; a bill is of a run or an artefact", "joulelab compare tells of groups"
        )
    return run_bill(load_record(place), students)


def _read(folder: Path) -> Bill:
    bill = read_bill(folder)
    if bill is None:
        raise UsageError(f"{folder / BILL} is not a bill of this version", "the run's record has the same joules")
    return bill


def artefact_bill(bill: Bill, store: Path, students: int = 1) -> EnergyBill:
    artefact = bill.artefact
    folder = store / artefact.made_by
    record = load_record(folder) if (folder / "run.json").exists() else None
    policy = record.policy if record else "measured"
    stages = [stage for name in artefact.stages if record and (stage := record.stage(name))]
    return EnergyBill(
        title=artefact.name,
        kind=artefact.kind,
        made_by=artefact.made_by,
        own=(_ancestor_line(artefact, policy),),
        inherited=tuple(_ancestor_line(ancestor, policy) for ancestor in bill.ancestry),
        roots=artefact.parents,
        students=students,
        provisional=bill.provisional,
        record=record,
        duration_s=sum(stage.duration_s for stage in stages) if stages else None,
    )


def run_bill(record: RunRecord, students: int = 1) -> EnergyBill:
    own = tuple(
        BillLine(
            key=stage.name,
            name=stage.name,
            kind="stage",
            made_by=record.run_id,
            figure=stage.best,
            components={name: getattr(stage.energy, name) for name in COMPONENTS},
            parents=(),
            shared=stage.name.startswith("teacher."),
        )
        for stage in record.stages
        if not stage.outside_totals
    )
    if not own:
        raise UsageError(f"{record.run_id} has no stage yet, so nothing to bill", f"its status is {record.status}")
    inherited = tuple(_ancestor_line(ancestor, record.policy) for ancestor in record.inherited)
    used = {parent for line in inherited for parent in line.parents}
    return EnergyBill(
        title=record.run_id,
        kind="run",
        made_by=record.run_id,
        own=own,
        inherited=inherited,
        roots=tuple(line.key for line in inherited if line.key not in used),
        students=students,
        record=record,
        duration_s=record.totals.duration_s if record.totals else None,
        own_totals={name: getattr(record.totals, name) for name in ("best", *COMPONENTS)} if record.totals else {},
    )


def _ancestor_line(ancestor: Ancestor, policy: str) -> BillLine:
    figure = ancestor_figure(ancestor, policy)
    components = {name: figure_ for name, figure_ in ancestor.energy.items() if name in COMPONENTS}
    return BillLine(
        key=ancestor.key,
        name=ancestor.name,
        kind=ancestor.kind,
        made_by=ancestor.made_by,
        figure=figure,
        components=components or {"all": figure},
        parents=ancestor.parents,
        shared=made_by_teacher(ancestor),
    )
