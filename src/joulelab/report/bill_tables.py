"""A bill for people: the tree of its lineage, and the sums by component and method."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from joulelab.meter.figure_text import amount_text, labeled_text, method_text, uncertainty_note
from joulelab.meter.figures import EnergyFigure
from joulelab.report.bill_model import COMPONENTS, BillLine, EnergyBill
from joulelab.report.grid import Grid, make_grid, to_markdown, to_rich
from joulelab.report.wording import NOTHING, grams, listed
from joulelab.runs.carbon import Co2e

_TITLES = {
    "gpu": "GPU",
    "cpu": "CPU",
    "dram": "memory",
    "cpu_estimate": "CPU, estimated",
    "codecarbon": "CodeCarbon's own",
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
    return tree_grid(bill), component_grid(bill)


def sentences(bill: EnergyBill, co2e: Co2e | None = None) -> list[str]:
    whole = bill.whole
    shared = f" when {bill.students} students share the teacher" if bill.students > 1 else ""
    if whole.energy_j is None:
        opening = f"Energy of {bill.title}{shared}: missing"
    else:
        opening = f"Energy of {bill.title}{shared}: {labeled_text(whole, bill.mixed)}"
    inherited = bill.inherited_figure
    if inherited is not None and inherited.energy_j is not None:
        opening += f"; own {amount_text(bill.own_figure)}, inherited {amount_text(inherited)}"
    texts = [opening + "."]
    if spread := uncertainty_note([whole]):
        texts.append(spread)
    if bill.mixed:
        texts.append("The sum adds estimates to measurements.")
    if bill.unmetered:
        texts.append(f"A lower bound: no meter of its run saw {listed(list(bill.unmetered))}.")
    made_elsewhere = [name for name in bill.unknown if name not in bill.unmetered]
    if made_elsewhere:
        texts.append(f"In no sum, because nobody measured it here: what {listed(made_elsewhere)} took to make.")
    if bill.kind == "run" and bill.record and bill.record.status == "running":
        texts.append("The run still goes on: these are the joules so far.")
    if bill.kind == "group" and bill.provisional:
        texts.append("A run of the group still goes on: these are the joules so far.")
    elif bill.provisional:
        texts.append("Provisional: its run has not been closed, which replaces the joules by the final ones.")
    if co2e:
        texts.append(f"CO2e: {grams(co2e.co2e_g_low, co2e.co2e_g_high, whole.is_lower_bound)}.")
        if co2e.with_pue_co2e_g_low is not None and co2e.with_pue_co2e_g_high is not None:
            ends = co2e.with_pue_co2e_g_low, co2e.with_pue_co2e_g_high
            texts.append(f"With the building: {grams(*ends, whole.is_lower_bound)}.")
    return texts


def tree_grid(bill: EnergyBill) -> Grid:
    """Ancestors under what used them; one that was met before is named again without its joules."""
    by_key = {line.key: line for line in bill.inherited}
    met: set[str] = set()
    rows = [_row(bill, line, "", "own") for line in bill.own]

    def add(key: str, depth: int) -> None:
        line = by_key.get(key)
        if line is None:
            return
        indent = "\u00a0\u00a0" * depth + "└ "  # plain spaces would be lost in Markdown
        if key in met:
            rows.append((f"{indent}{line.name}", "counted above", line.made_by, NOTHING, NOTHING, NOTHING))
            return
        met.add(key)
        rows.append(_row(bill, line, indent, "shared" if line.shared else "inherited"))
        for parent in line.parents:
            add(parent, depth + 1)

    for key in bill.roots:
        add(key, 0)
    for key in by_key:  # what no path leads to, as the ancestors of an old bill
        if key not in met:
            add(key, 0)
    rows = _reasons_once(rows)
    rows.append(
        ("sum", "", "", amount_text(_unshared(bill)), amount_text(bill.whole), method_text(bill.whole, bill.mixed))
    )
    titles = f"What!|Paid|Made by|Energy>|Share of 1\nof {bill.students}>|Method"
    note = "Shared: a teacher's work, divided by the students that share it. Each ancestor counts once."
    if bill.students == 1:
        return _without_share(make_grid("Where it comes from", titles, rows, note))
    return make_grid("Where it comes from", titles, rows, note)


def _reasons_once(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Where no sensor was there, every line would say so at the same length."""
    above = ["", *(row[-1] for row in rows)]
    return [
        (*row[:-1], "missing, as above") if row[-1].startswith("missing: ") and row[-1] == before else row
        for row, before in zip(rows, above, strict=False)
    ]


def _unshared(bill: EnergyBill) -> EnergyFigure:
    return replace(bill, students=1).whole


def _without_share(grid: Grid) -> Grid:
    """With one student the share is the whole."""
    keep = [place for place, column in enumerate(grid.columns) if not column.title.startswith("Share")]
    return Grid(
        grid.caption,
        tuple(grid.columns[place] for place in keep),
        tuple(tuple(row[place] for place in keep) for row in grid.rows),
        grid.note,
    )


def _row(bill: EnergyBill, line: BillLine, indent: str, paid: str) -> tuple[str, ...]:
    figure = line.figure
    method = method_text(figure) if figure.energy_j is not None else f"missing: {figure.reason}"
    return f"{indent}{line.name}", paid, line.made_by, amount_text(figure), amount_text(bill.share(line)), method


def component_grid(bill: EnergyBill) -> Grid:
    rows = []
    for name in COMPONENTS:
        own, inherited, whole = bill.own_component(name), bill.inherited_component(name), bill.component(name)
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
    note = "Estimates and CodeCarbon's figures stand beside the measured ones and are never added to them."
    return make_grid("By component and method", "Component!|Own>|Inherited>|Together>|Method", rows, note)
