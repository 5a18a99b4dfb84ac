"""The energy bill of an artefact or a run: what it took itself, what it inherited, and what N students share of that.

Lineage is a graph, and each ancestor counts once, however many ways lead to it. What came from elsewhere is a line
without joules, and in no sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from joulelab.data.inputs import find_bill as bill_of_input
from joulelab.errors import NotFoundError, UsageError
from joulelab.report.bill_model import COMPONENTS, BillLine, EnergyBill
from joulelab.report.joules import ancestor_figure, is_teachers
from joulelab.runs.artifacts import find_artifact, read_bill
from joulelab.runs.bills import BILL, Ancestor, Bill
from joulelab.runs.groups import GroupRecord, group_records
from joulelab.runs.paths import GroupPaths
from joulelab.runs.record import RunRecord
from joulelab.runs.store import find_folder, load_record, settled


def find_bill(store: Path, name: str, students: int = 1) -> EnergyBill:
    """Of a run, a group, an artefact's folder or a delivered copy, `RUN/ARTEFACT`, or an artefact's key."""
    folder = Path(name).absolute()
    if (folder / BILL).is_file():
        return artefact_bill(_read(folder), store, students)
    is_input = folder.exists() and not (folder / "run.json").exists() and not (folder / "group.json").exists()
    of_input = bill_of_input(folder, (store,)) if is_input else None
    if of_input is not None:
        return artefact_bill(of_input, store, students)
    run_name, _, artefact = name.rpartition("/")
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
        return group_bill(*group_records(place), students)
    return run_bill(load_record(place), students)


def _read(folder: Path) -> Bill:
    bill = read_bill(folder)
    if bill is None:
        raise UsageError(f"{folder / BILL} is not a bill of this version", "the run's record has the same joules")
    return bill


def artefact_bill(bill: Bill, store: Path, students: int = 1) -> EnergyBill:
    bill = settled(bill, store)
    artefact = bill.artefact
    folder = store / artefact.made_by
    record = load_record(folder) if (folder / "run.json").exists() else None
    policy = record.policy if record else "measured"
    stages = [stage for name in artefact.stages if record and (stage := record.stage(name))]
    return EnergyBill(
        title=artefact.name,
        kind=artefact.kind,
        made_by=artefact.made_by,
        own=_own_lines(artefact, policy),
        inherited=tuple(_ancestor_line(ancestor, policy) for ancestor in bill.ancestry),
        roots=artefact.parents,
        students=students,
        provisional=bill.provisional,
        record=record,
        duration_s=sum(stage.duration_s for stage in stages) if stages else None,
        **_carbon([record] if record else []),
    )


def run_bill(record: RunRecord, students: int = 1) -> EnergyBill:
    teachers = {stage.name for stage in record.stages if stage.role == "teacher"}
    own = tuple(
        BillLine(
            key=stage.name,
            name=stage.name,
            kind="stage",
            made_by=record.run_id,
            figure=stage.best,
            components={name: getattr(stage.energy, name) for name in COMPONENTS},
            parents=(),
            shared=(stage.part_of or stage.name) in teachers,
        )
        for stage in record.stages
        if not stage.outside_totals
    )
    if not own:
        raise UsageError(f"{record.run_id} has no stage yet, so nothing to bill", f"its status is {record.status}")
    inherited = tuple(_ancestor_line(ancestor, record.policy) for ancestor in record.inherited)
    return EnergyBill(
        title=record.run_id,
        kind="run",
        made_by=record.run_id,
        own=own,
        inherited=inherited,
        roots=_roots(inherited),
        students=students,
        record=record,
        duration_s=record.totals.duration_s if record.totals else None,
        own_totals={name: getattr(record.totals, name) for name in ("best", *COMPONENTS)} if record.totals else {},
        **_carbon([record]),
    )


def group_bill(group: GroupRecord, records: Sequence[RunRecord], students: int = 1) -> EnergyBill:
    """What all runs of a group took, and once what they used of others: the whole experiment."""
    if students > 1:
        newest = records[-1].run_id if records else "RUN"
        raise UsageError(
            f"{group.group_id} is a group, whose runs are counted whole",
            f"let students share the teacher of one run: joulelab bill {newest} --students {students}",
        )
    own = tuple(
        BillLine(
            key=record.run_id,
            name=f"{record.label}, seed {record.spec.get('seed', 0)}",
            kind="run",
            made_by=record.run_id,
            figure=record.totals.best,
            components={name: getattr(record.totals, name) for name in COMPONENTS},
            parents=(),
            shared=False,
        )
        for record in records
        if record.totals
    )
    if not own:
        raise UsageError(f"no run of {group.group_id} has joules yet, so nothing to bill", "wait for the first of them")
    members = {record.run_id for record in records}
    foreign = {
        ancestor.key: _ancestor_line(ancestor, record.policy)
        for record in records
        for ancestor in record.inherited
        if ancestor.made_by not in members
    }
    inherited = tuple(foreign.values())
    return EnergyBill(
        title=group.group_id,
        kind="group",
        made_by=group.group_id,
        own=own,
        inherited=inherited,
        roots=_roots(inherited),
        students=1,
        provisional=any(record.status == "running" for record in records),
        duration_s=sum(record.totals.duration_s for record in records if record.totals),
        **_carbon(records),
    )


def _own_lines(artefact: Ancestor, policy: str) -> tuple[BillLine, ...]:
    """One; where making it had setup or repeated work, these are lines of their own."""
    if not artefact.work:
        return (_ancestor_line(artefact, policy),)
    kinds = ((artefact.name, "work"), (f"{artefact.name}, setup", "setup"), (f"{artefact.name}, repeated", "repeated"))
    return tuple(
        _ancestor_line(artefact.model_copy(update={"name": name, "energy": energy}), policy)
        for name, kind in kinds
        if (energy := getattr(artefact, kind))
    )


def _roots(lines: Sequence[BillLine]) -> tuple[str, ...]:
    """What was used itself, and not only by another ancestor."""
    used = {parent for line in lines for parent in line.parents}
    return tuple(line.key for line in lines if line.key not in used)


def _carbon(records: Sequence[RunRecord]) -> dict[str, Any]:
    told = [{"grid": record.totals.grid, "pue": record.totals.pue} for record in records if record.totals]
    return told[0] if told and all(one == told[0] for one in told) else {}


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
        shared=is_teachers(ancestor),
    )
