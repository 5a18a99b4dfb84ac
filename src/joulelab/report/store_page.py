"""One page over a whole store: energy per item over time for runs of the same kind, and a list with links to the runs.

All values come from the store's index, which holds what the records state; nothing is computed from traces here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import altair as alt

from joulelab.errors import NotFoundError
from joulelab.meter.figures import labeled_text
from joulelab.report.energy_sums import known_sum, mixes_methods
from joulelab.report.figures.chart_base import Figure, finish
from joulelab.report.opening import Tile, energy_tiles
from joulelab.report.page import ListedLine, Page
from joulelab.report.tables.grid import Cell
from joulelab.report.tables.run_list import StoredRun, list_grid, stored_run_of
from joulelab.report.wording import grams
from joulelab.runs.index import LISTING, IndexReporter, ListedRun, listed
from joulelab.runs.paths import GROUPS_FOLDER, REPORT
from joulelab.units import duration_text, plural, with_prefix


def store_page(store: Path, reporter: IndexReporter) -> Page:
    runs = stored_runs(store, reporter)
    if not runs:
        raise NotFoundError(f"no runs under {store.absolute()}", "`joulelab demo` creates some")
    trend = trend_figure(runs)
    table = list_grid(runs)
    dates = [one.run.created_at[:10] for one in runs]
    return Page(
        title=f"Store {store.absolute().name}",
        about="",
        identity=(plural(len(runs), "run"), " to ".join(dict.fromkeys((dates[0], dates[-1])))),
        tiles=store_tiles(runs),
        verdict=store_sentences(runs),
        figures=(trend,) if trend else (),
        table=table,
        listing=(
            table,
            tuple(
                ListedLine(cast("tuple[Cell, ...]", row), _link(store, one.run))
                for row, one in zip(table.rows, runs[::-1], strict=True)
            ),
        ),
        plain={"runs": [_data(one) for one in runs]},
    )


def stored_runs(store: Path, reporter: IndexReporter) -> list[StoredRun]:
    """Oldest first."""
    return [stored_run_of(listing) for (listing,) in listed(store, reporter, [LISTING])]


def _link(store: Path, run: ListedRun) -> str:
    """The run's own page, else that of its group; relative to the store."""
    places = [run.run_id, *([f"{GROUPS_FOLDER}/{run.group}"] if run.group else [])]
    return next((f"{place}/{REPORT}" for place in places if (store / place / REPORT).exists()), "")


def store_tiles(runs: Sequence[StoredRun]) -> tuple[Tile, ...]:
    programs = [one for one in runs if not one.whole_machine]
    added = programs or runs
    figures = [one.run.totals.best for one in added if one.run.totals]
    left_out = plural(len(runs) - len(added), "whole-machine estimate")
    what = "own stages of all runs" if len(added) == len(runs) else f"own stages; without {left_out}"
    whole, mixed = known_sum(figures), mixes_methods(figures)
    grades = Counter(one.run.validity.grade or "none" for one in runs)
    emitted = [one.run.co2e_g for one in runs if one.run.co2e_g]
    low, high = (sum(end) for end in zip(*emitted, strict=True)) if emitted else (0.0, 0.0)
    statuses = Counter(one.run.status for one in runs)
    with_grid = f"{len(emitted)} of {plural(len(runs), 'run')} have a grid"
    return (
        Tile("Runs", str(len(runs)), ", ".join(f"{count} {status}" for status, count in statuses.items())),
        *energy_tiles(whole, what, mixed),
        Tile("CO2e", grams(low, high) if emitted else "not computed", with_grid),
        Tile(
            "Time", duration_text(sum(one.run.totals.duration_s for one in runs if one.run.totals)), "all runs together"
        ),
        Tile("Grades", ", ".join(f"{grades[name]} {name}" for name in sorted(grades))),
    )


def store_sentences(runs: Sequence[StoredRun]) -> tuple[str, ...]:
    known = [one for one in runs if one.energy_j is not None]
    if not known:
        return ("No run of this store has energy.",)
    top = max(known, key=lambda one: one.energy_j or 0.0)
    most = f"The largest is {top.run.run_id} with {labeled_text(top.run.totals.best)}." if top.run.totals else ""
    kinds = _trend_kinds(runs)
    if not kinds:
        return (most, "No kind of run was repeated, so there is no trend.")
    kind, ones = next(iter(kinds.items()))
    first, last = (with_prefix(one.per_item_j or 0.0, "J") for one in (ones[0], ones[-1]))
    count = plural(len(ones), "run")
    dates = [one.run.created_at[:10] for one in (ones[0], ones[-1])]
    return (most, f"{kind}: {first} in the first of {count} ({dates[0]}), {last} in the last ({dates[1]}).")


def _trend_kinds(runs: Sequence[StoredRun]) -> dict[str, list[StoredRun]]:
    """Kinds with at least two finished runs and energy per item, the most frequent first."""
    found: dict[str, list[StoredRun]] = {}
    for one in runs:
        if one.per_item_j is not None and one.run.status == "done":
            found.setdefault(one.kind, []).append(one)
    several = {kind: ones for kind, ones in found.items() if len(ones) > 1}
    return dict(sorted(several.items(), key=lambda item: -len(item[1])))


def trend_figure(runs: Sequence[StoredRun]) -> Figure | None:
    """Energy per item over time, one kind at a time; estimates and measurements are different marks."""
    kinds = _trend_kinds(runs)
    if not kinds:
        return None
    rows = [
        {
            "kind": kind,
            "time": one.run.created_at,
            "joules": one.per_item_j,
            "low": max(0.0, (one.per_item_j or 0.0) - (one.half_width_j or 0.0)),
            "high": (one.per_item_j or 0.0) + (one.half_width_j or 0.0),
            "energy": with_prefix(one.per_item_j or 0.0, "J"),
            "method": "estimated" if one.run.totals and one.run.totals.best.method == "estimated" else "measured",
            "run": one.run.run_id,
        }
        for kind, ones in kinds.items()
        for one in ones
    ]
    names = list(kinds)
    chosen = alt.param(
        name="kind", value=names[0], bind=alt.binding_select(options=names, name="Runs of the same kind ")
    )
    base = alt.Chart(alt.NamedData("trend")).transform_filter("datum.kind == kind")
    # vega's own formats are `03 AM` at full hours and `03:10` between them, without AM or PM
    x = alt.X("time:T", title="Start of the run", axis=alt.Axis(format={"hours": "%H:%M", "minutes": "%H:%M"}))
    y = alt.Y("joules:Q", title="Energy per item (J)", scale=alt.Scale(zero=True), axis=alt.Axis(format="~s"))
    line = base.mark_line(opacity=0.4, color="#0072B2").encode(x=x, y=y)
    bars = base.mark_rule(opacity=0.6, color="#0072B2").encode(
        x=x, y=alt.Y("low:Q", title="Energy per item (J)"), y2="high:Q"
    )
    shapes = alt.Shape(
        "method:N", title="Method", scale=alt.Scale(domain=["measured", "estimated"], range=["circle", "triangle-up"])
    )
    points = base.mark_point(filled=True, size=90, color="#0072B2", opacity=1).encode(
        x=x, y=y, shape=shapes, tooltip=["run:N", "energy:N", "method:N", "time:T"]
    )
    height = 300
    spec = finish(alt.layer(line, bars, points).add_params(chosen), height, trend=rows)
    described = f"Energy per item over time for {plural(len(names), 'kind')} of runs; first {names[0]}: " + "; ".join(
        f"{one.run.created_at[:10]} {with_prefix(one.per_item_j or 0.0, 'J')}" for one in kinds[names[0]]
    )
    caption = "One mark per finished run; bar: random 95 % interval. A kind: same experiment, label, scope and item."
    return Figure("Energy per item over time", spec, described, caption, height, name="trend")


def _data(one: StoredRun) -> dict[str, Any]:
    """As in the page's JSON download."""
    facts = {"run_id": one.run.run_id, "label": one.run.label, "status": one.run.status, "kind": one.kind}
    return {**facts, "created_at": one.run.created_at, "energy_j": one.energy_j, "j_per_item": one.per_item_j}
