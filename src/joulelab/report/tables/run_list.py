"""The table of all runs, on the page of a store and in the web view.

A row is computed once, when the index reads the run: ten thousand of them would take a second. After a change here,
increase the version of the index.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from joulelab.meter.figures import MACHINE_BASE, labeled_text
from joulelab.report.compare.quality import quality_of
from joulelab.report.tables.grid import Cell, Grid, make_grid
from joulelab.report.wording import NOTHING
from joulelab.runs.index import ListedRun, listed_run
from joulelab.runs.record import RunRecord
from joulelab.units import duration_text, percent_text, with_prefix


@dataclass(frozen=True)
class StoredRun:
    run: ListedRun

    @property
    def kind(self) -> str:
        """Runs of one kind are comparable over time: experiment, label, scope and the item of its energy."""
        name = self.run.name if self.run.label == self.run.name else f"{self.run.name}, {self.run.label}"
        return f"{name}{', whole machine' if self.whole_machine else ''}: {self.run.per_item[0]}"

    @property
    def per_item_j(self) -> float | None:
        return self.run.per_item[1]

    @property
    def half_width_j(self) -> float | None:
        return self.run.per_item[2]

    @property
    def energy_j(self) -> float | None:
        return self.run.totals.best.energy_j if self.run.totals else None

    @property
    def whole_machine(self) -> bool:
        """It counts all processes, so it is neither added to nor compared with the energy of programs."""
        return self.run.totals is not None and MACHINE_BASE in self.run.totals.best.sources


def stored_run_of(listing: str) -> StoredRun:
    """From a row of the index."""
    return StoredRun(listed_run(listing))


def list_grid(runs: Sequence[StoredRun]) -> Grid:
    """Newest first."""
    rows = [list_cells(one) for one in reversed(runs)]
    note = (
        "Own energy: the run's own stages. Teacher: its share of the energy that comparisons count, inherited energy "
        "included. A run that belongs to a group links to the group's page."
    )
    return make_grid("All runs, newest first", LIST_TITLES, rows, note)


LIST_TITLES = "Run|Own energy>|Label|Status|Quality>|Teacher>|Per item>|Time>|Grade|Started!"


def list_cells(one: StoredRun) -> tuple[Cell, ...]:
    """Cells of one run, under `LIST_TITLES`."""
    run = one.run
    quality = quality_of(cast(RunRecord, run))  # a listed run has the results that it reads
    best = run.totals.best if run.totals else None
    duration_s = run.totals.duration_s if run.totals else None
    item = one.kind.rpartition(": ")[2].partition(",")[0].removeprefix("J per ")
    each = f"{with_prefix(one.per_item_j, 'J')}/{item}" if one.per_item_j is not None else NOTHING
    return (
        Cell(run.run_id, run.run_id),
        Cell(labeled_text(best) if best else NOTHING, one.energy_j),
        Cell(run.label, run.label),
        Cell(run.status, run.status),
        Cell(quality.text(with_interval=False), quality.result.value) if quality else Cell(NOTHING),
        Cell(percent_text(run.teacher_share, 0) if run.teacher_share else NOTHING, run.teacher_share),
        Cell(each, one.per_item_j),
        Cell(duration_text(duration_s) if duration_s is not None else NOTHING, duration_s),
        Cell(run.validity.grade or NOTHING, run.validity.grade or ""),
        Cell(run.created_at[:16].replace("T", " "), run.created_at),
    )


def list_row(listing: str) -> str:
    """JSON of a row of the web view: its texts with the tags, and the values that it is sorted by."""
    one = stored_run_of(listing)
    tags = ", ".join(one.run.tags)
    cells = (*list_cells(one), Cell(tags or NOTHING, tags))
    return row_text(
        {
            "cells": cells,
            "values": [cell.value if _is_json(cell.value) else None for cell in cells],
            "status": one.run.status,
            "group": one.run.group,
            "tags": one.run.tags,
        }
    )


def _is_json(value: float | str | None) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def row_text(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"))
