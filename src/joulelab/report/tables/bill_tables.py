"""The energy bill of an artifact, a run or a group: own lines, inherited lines as a lineage tree, and their sums.

Lineage is a graph, and each ancestor counts once, however many paths lead to it. External inputs without a known bill
are lines without energy, left out of every sum. N students can share a teacher's work and the data made from it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from joulelab.data.inputs import find_bill as bill_of_input
from joulelab.errors import NotFoundError, UsageError
from joulelab.meter.figures import EnergyFigure, amount_text, labeled_text, method_text, missing, uncertainty_note
from joulelab.meter.grids import Co2e, GridFactor
from joulelab.report.energy_sums import all_parts, ancestor_figure, known_sum, mixes_methods, shared_keys
from joulelab.report.tables.grid import Grid, make_grid, to_markdown, to_rich, without_column
from joulelab.report.wording import NOTHING, grams, listed
from joulelab.runs.artifacts import BILL, ELSEWHERE, UNMETERED, Ancestor, Bill, find_artifact, read_bill
from joulelab.runs.groups import GroupRecord, group_records
from joulelab.runs.paths import GroupPaths
from joulelab.runs.record import EnergyByComponent, RunRecord, program_energy
from joulelab.runs.store import find_folder, load_record, with_recorded_energy
from joulelab.units import plural

COMPONENTS = tuple(EnergyByComponent.model_fields)


@dataclass(frozen=True)
class BillLine:
    """A stage of the run, or an ancestor."""

    key: str
    name: str
    kind: str
    made_by: str
    figure: EnergyFigure
    components: dict[str, EnergyFigure]
    parents: tuple[str, ...]
    shared: bool
    """N students share it (`energy_sums.shared_keys`)."""

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
    """The run that made it, if its directory still exists."""
    duration_s: float | None = None
    grid: GridFactor | None = None
    pue: float | None = None
    """Grid and PUE of the run; of a group, if its runs agree."""
    own_totals: dict[str, EnergyFigure] = field(default_factory=dict)
    """Totals of the run's record by component, and as `best` the figure that tables show."""

    @property
    def has_teacher(self) -> bool:
        """Whether students can share anything: work of a teacher whose energy is known."""
        return any(line.shared and line.figure.energy_j is not None for line in self.lines)

    @property
    def lines(self) -> tuple[BillLine, ...]:
        return self.own + self.inherited

    @property
    def unknown(self) -> tuple[str, ...]:
        return tuple(line.name for line in self.inherited if line.figure.energy_j is None)

    @property
    def unmetered(self) -> tuple[str, ...]:
        """Unmetered work for it: the sum is a lower bound."""
        return tuple(line.name for line in self.inherited if line.kind == UNMETERED)

    @property
    def mixed(self) -> bool:
        return mixes_methods(line.figure for line in self.lines)

    def share(self, line: BillLine) -> EnergyFigure:
        """One student's share of a line."""
        return line.figure.scaled(1 / self.students) if line.shared else line.figure

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
        """The record's total, as in other tables: errors at the common edge of two stages cancel in it.

        None if there is none, or if N students share some of these stages.
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
        absent = missing("not in its bill")
        parts = [line.figure if line.kind == UNMETERED else line.components.get(name, absent) for line in lines]
        shares = [
            part.scaled(1 / self.students) if line.shared else part for part, line in zip(parts, lines, strict=True)
        ]
        return _sum(shares)


def _sum(figures: Iterable[EnergyFigure]) -> EnergyFigure:
    """Sum of the known figures, without the reasons of missing ones, which their lines state."""
    summed = known_sum(list(figures))
    return summed if summed.energy_j is None else summed.model_copy(update={"reason": None})


_TITLES = {
    "gpu": "GPU",
    "cpu": "CPU",
    "dram": "memory",
    "cpu_estimate": "CPU, estimated",
    "codecarbon": "CodeCarbon's own",
    "machine": "whole machine, estimated",
    "node": "node meter, all components",
}


def bill_view(bill: EnergyBill, co2e: Co2e | None = None) -> RenderableType:
    parts: list[RenderableType] = [
        Text(sentence, style="bold" if not place else "") for place, sentence in enumerate(sentences(bill, co2e))
    ]
    return Group(*parts, Text(""), *(to_rich(grid) for grid in bill_grids(bill)))


def bill_markdown(bill: EnergyBill, co2e: Co2e | None = None) -> str:
    opening, *others = sentences(bill, co2e)
    parts = [f"# Energy bill of {bill.title}", f"**{opening}**", *others]
    return "\n\n".join([*parts, *(to_markdown(grid).strip() for grid in bill_grids(bill))]) + "\n"


def bill_grids(bill: EnergyBill) -> tuple[Grid, ...]:
    return tree_grid(bill, most_rows=None), component_grid(bill)


def sentences(bill: EnergyBill, co2e: Co2e | None = None) -> list[str]:
    whole = bill.whole
    has_teacher = bill.has_teacher
    shared = f" when {bill.students} students share the teacher" if bill.students > 1 and has_teacher else ""
    if whole.energy_j is None:
        opening = f"Energy of {bill.title}{shared}: missing"
    else:
        opening = f"Energy of {bill.title}{shared}: {labeled_text(whole, bill.mixed)}"
    inherited = bill.inherited_figure
    if inherited is not None and inherited.energy_j is not None:
        opening += f"; own {amount_text(bill.own_figure)}, inherited {amount_text(inherited)}"
    texts = [opening + "."]
    if bill.students > 1 and not has_teacher:
        texts.append(f"--students {bill.students} has no effect: no teacher's work is in this bill.")
    if spread := uncertainty_note([whole]):
        texts.append(spread)
    program = program_energy(bill.record) if bill.kind == "run" and bill.record else None
    if program is not None and program.energy.energy_j is not None:
        once = "one run of the program" if program.count > 1 else "the program"
        texts.append(f"Everything in the run is billed; {once} used {amount_text(program.energy)}.")
    if bill.mixed:
        texts.append("The sum adds estimates to measurements.")
    if bill.unmetered:
        texts.append(f"Lower bound, because this was not metered: {listed(list(bill.unmetered))}.")
    made_elsewhere = [name for name in bill.unknown if name not in bill.unmetered]
    if made_elsewhere:
        texts.append(f"Not included (energy unknown): {listed(made_elsewhere)}.")
    if bill.kind == "run" and bill.record and bill.record.status == "running":
        texts.append("The run is still running: energy so far.")
    if bill.kind == "run" and bill.record and bill.record.status in ("failed", "truncated"):
        texts.append(f"The run is {bill.record.status}: stages that it did not reach are not included.")
    if bill.kind == "group" and bill.provisional:
        texts.append("A run of the group is still running: energy so far.")
    elif bill.provisional:
        texts.append("Provisional: the run is not closed yet; closing it replaces these figures with the final ones.")
    if co2e:
        texts.append(f"CO2e: {grams(co2e.co2e_g_low, co2e.co2e_g_high, whole.is_lower_bound)}.")
        if co2e.with_pue_co2e_g_low is not None and co2e.with_pue_co2e_g_high is not None:
            ends = co2e.with_pue_co2e_g_low, co2e.with_pue_co2e_g_high
            texts.append(f"With the building: {grams(*ends, whole.is_lower_bound)}.")
    return texts


_SCREEN_ROWS = 12
"""Rows of a bill on a screen, its sum included."""


@dataclass(frozen=True)
class _TreeRow:
    cells: tuple[str, ...]
    depth: int
    line: BillLine | None
    """None where it was counted above."""

    @property
    def size_j(self) -> float:
        """Unmetered work for the run, which makes the sum a lower bound, is not known to be small."""
        if self.line is None:
            return 0.0
        return math.inf if self.line.kind == UNMETERED else self.line.figure.energy_j or 0.0


def tree_grid(bill: EnergyBill, most_rows: int | None = _SCREEN_ROWS) -> Grid:
    """Ancestors below what used them; repeated ones are listed without their energy. Of more than `most_rows` rows, the
    smallest are joined in one, so that the rows add up to the sum."""
    by_key = {line.key: line for line in bill.inherited}
    met: set[str] = set()
    shares = bill.students > 1 and bill.has_teacher
    tree = [
        _TreeRow(_row(bill, line, "", "own, shared" if shares and line.shared else "own"), 0, line) for line in bill.own
    ]

    def add(key: str, depth: int) -> None:
        line = by_key.get(key)
        if line is None:
            return
        indent = "\u00a0\u00a0" * depth + "└ "  # plain spaces would be lost in Markdown
        if key in met:
            above = (f"{indent}{line.name}", "counted above", line.made_by, NOTHING, NOTHING, NOTHING)
            tree.append(_TreeRow(above, depth, None))
            return
        met.add(key)
        tree.append(_TreeRow(_row(bill, line, indent, "shared" if line.shared else "inherited"), depth, line))
        for parent in line.parents:
            add(parent, depth + 1)

    for key in bill.roots:
        add(key, 0)
    for key in by_key:  # ancestors without a path from the roots, as in old bills
        if key not in met:
            add(key, 0)
    shown, joined = _largest(tree, most_rows)
    rows = _reasons_once([row.cells for row in shown])
    if joined:
        rows.append(_joined_row(bill, joined))
    rows.append(
        ("sum", "", "", amount_text(_unshared(bill)), amount_text(bill.whole), method_text(bill.whole, bill.mixed))
    )
    titles = f"What!|Counted as|Made by|Energy>|Share of 1\nof {bill.students}>|Method"
    note = (
        "Own: its stages. Inherited: stages of other runs, each ancestor once. Shared: a teacher's work and data made "
        "from it, divided by the students."
    )
    if bill.students == 1 or not bill.has_teacher:
        return without_column(make_grid("Energy by source", titles, rows, note), "Share")  # it is the whole
    return make_grid("Energy by source", titles, rows, note)


def _largest(tree: Sequence[_TreeRow], most_rows: int | None) -> tuple[list[_TreeRow], list[_TreeRow]]:
    """The rows to show, in their order, and the others. A row stays as long as one below it in the tree does."""
    shown, others = list(tree), list[_TreeRow]()
    if most_rows is None or len(tree) < most_rows:
        return shown, others
    while len(shown) > most_rows - 2:  # the sum and the row of the others
        depths = [row.depth for row in shown[1:]] + [0]
        leaves = [row for row, below in zip(shown, depths, strict=True) if below <= row.depth]
        smallest = min(leaves, key=lambda row: row.size_j)
        shown.remove(smallest)
        others.append(smallest)
    return shown, others


def _joined_row(bill: EnergyBill, rows: Sequence[_TreeRow]) -> tuple[str, ...]:
    lines = [row.line for row in rows if row.line]
    whole, share = (
        _sum(figures) for figures in ([line.figure for line in lines], [bill.share(line) for line in lines])
    )
    method = method_text(whole, mixes_methods(line.figure for line in lines)) if whole.energy_j is not None else NOTHING
    unknown = sum(line.figure.energy_j is None for line in lines)
    title = plural(len(rows), "smaller row")
    return title, f"{unknown} of them missing" if unknown else "", "", amount_text(whole), amount_text(share), method


def _reasons_once(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The same long reason on consecutive lines is printed once."""
    above = ["", *(row[-1] for row in rows)]
    return [
        (*row[:-1], "missing, as above") if row[-1].startswith("missing: ") and row[-1] == before else row
        for row, before in zip(rows, above, strict=False)
    ]


def _unshared(bill: EnergyBill) -> EnergyFigure:
    return replace(bill, students=1).whole


def _row(bill: EnergyBill, line: BillLine, indent: str, paid: str) -> tuple[str, ...]:
    figure = line.figure
    method = method_text(figure) if figure.energy_j is not None else f"missing: {figure.reason}"
    return f"{indent}{line.name}", paid, line.made_by, amount_text(figure), amount_text(bill.share(line)), method


def component_grid(bill: EnergyBill) -> Grid:
    rows = []
    for name in COMPONENTS:
        own, inherited, whole = bill.own_component(name), bill.inherited_component(name), bill.component(name)
        if whole.energy_j is None and name in ("machine", "node"):
            continue  # only on request, and where there is a meter
        if whole.energy_j is None:
            rows.append((_TITLES[name], NOTHING, NOTHING, NOTHING, f"missing: {own.reason}"))
        else:
            rows.append(
                (
                    _TITLES[name],
                    amount_text(own),
                    amount_text(inherited) if bill.inherited else NOTHING,
                    amount_text(whole),
                    method_text(whole),
                )
            )
    note = "Estimates and CodeCarbon's figures are reported separately and never added to measured energy."
    if bill.component("node").energy_j is not None:
        note += " The node's own meter contains all components and all jobs of the node, and is not added either."
    return make_grid("By component and method", "Component!|Own>|Inherited>|Total>|Method", rows, note)


def find_bill(store: Path, name: str, students: int = 1) -> EnergyBill:
    """The bill of a run, a group, an artifact's directory or a copy of it, `RUN/ARTIFACT`, or an artifact's key."""
    folder = Path(name).absolute()
    if (folder / BILL).is_file():
        return artifact_bill(_read(folder), store, students)
    is_input = folder.exists() and not (folder / "run.json").exists() and not (folder / "group.json").exists()
    of_input = bill_of_input(folder, (store,)) if is_input else None
    if of_input is not None:
        return artifact_bill(of_input, store, students)
    run_name, _, artifact = name.rpartition("/")
    if run_name and not folder.exists():
        found = find_folder(store, run_name) / "artifacts" / artifact
        if not (found / BILL).is_file():
            known = ", ".join(sorted(path.parent.name for path in found.parent.glob(f"*/{BILL}"))) or "none"
            raise NotFoundError(f"{found.parent.parent.name} has no artifact '{artifact}'", f"its artifacts: {known}")
        return artifact_bill(_read(found), store, students)
    try:
        place = find_folder(store, name)
    except NotFoundError:
        by_key = find_artifact(store, name) if store.is_dir() else None
        if by_key is None:
            raise
        return artifact_bill(by_key.bill, store, students)
    if GroupPaths(place).record.exists():
        return group_bill(*group_records(place), students)
    return run_bill(load_record(place), students)


def _read(folder: Path) -> Bill:
    bill = read_bill(folder)
    if bill is None:
        raise UsageError(
            f"{folder / BILL} is not a bill of this version, or states an impossible energy",
            "the run's record has the same figures",
        )
    return bill


def artifact_bill(bill: Bill, store: Path, students: int = 1) -> EnergyBill:
    bill = with_recorded_energy(bill, store)
    artifact = bill.artifact
    shared = shared_keys((*bill.ancestry, artifact))
    folder = store / artifact.made_by
    record = load_record(folder) if (folder / "run.json").exists() else None
    policy = record.policy if record else "measured"
    stages = [stage for name in artifact.stages if record and (stage := record.stage(name))]
    return EnergyBill(
        title=artifact.name,
        kind=artifact.kind,
        made_by=artifact.made_by,
        own=_own_lines(artifact, policy, shared),
        inherited=tuple(_ancestor_line(ancestor, policy, shared) for ancestor in bill.ancestry),
        roots=artifact.parents,
        students=students,
        provisional=bill.provisional,
        record=record,
        duration_s=sum(stage.duration_s for stage in stages) if stages else None,
        **_carbon([record] if record else []),
    )


def run_bill(record: RunRecord, students: int = 1) -> EnergyBill:
    shared = {part.stage for part in all_parts(record) if part.shared and not part.inherited}
    own = tuple(
        BillLine(
            key=stage.name,
            name=stage.name,
            kind="stage",
            made_by=record.run_id,
            figure=stage.best,
            components={name: getattr(stage.energy, name) for name in COMPONENTS},
            parents=(),
            shared=(stage.part_of or stage.name) in shared,
        )
        for stage in record.stages
        if not stage.outside_totals
    )
    if not own:
        raise UsageError(f"{record.run_id} has no stage yet, so nothing to bill", f"its status is {record.status}")
    keys = shared_keys(record.lineage)
    inherited = tuple(_ancestor_line(ancestor, record.policy, keys) for ancestor in record.inherited)
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
    """Energy of all runs of a group, plus what they reused of other runs, each once."""
    if students > 1:
        newest = records[-1].run_id if records else "RUN"
        raise UsageError(
            f"{group.group_id} is a group, whose runs are counted whole",
            f"share the teacher of one run: joulelab bill {newest} --students {students}",
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
        raise UsageError(f"no run of {group.group_id} has energy yet, so nothing to bill", "wait for the first of them")
    members = {record.run_id for record in records}
    foreign = {
        ancestor.key: _ancestor_line(ancestor, record.policy, keys)
        for record in records
        for keys in [shared_keys(record.lineage)]
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


def _own_lines(artifact: Ancestor, policy: str, shared: Collection[str]) -> tuple[BillLine, ...]:
    """One line, or separate lines for work, setup and repeated work."""
    if not artifact.work:
        return (_ancestor_line(artifact, policy, shared),)
    kinds = ((artifact.name, "work"), (f"{artifact.name}, setup", "setup"), (f"{artifact.name}, repeated", "repeated"))
    return tuple(
        _ancestor_line(artifact.model_copy(update={"name": name, "energy": energy}), policy, shared)
        for name, kind in kinds
        if (energy := getattr(artifact, kind))
    )


def _roots(lines: Sequence[BillLine]) -> tuple[str, ...]:
    """Ancestors used directly, not only by other ancestors."""
    used = {parent for line in lines for parent in line.parents}
    return tuple(line.key for line in lines if line.key not in used)


def _carbon(records: Sequence[RunRecord]) -> dict[str, Any]:
    found = [{"grid": record.totals.grid, "pue": record.totals.pue} for record in records if record.totals]
    return found[0] if found and all(one == found[0] for one in found) else {}


def _ancestor_line(ancestor: Ancestor, policy: str, shared: Collection[str]) -> BillLine:
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
        shared=ancestor.key in shared,
    )
