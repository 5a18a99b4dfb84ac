"""The table of all runs, kept up to date: read from the store's index once, then only what changes.

A new, changed or removed run shows in the time stamps of the `run.json` files; a running run is polled as `joulelab
watch` does it. Every row has the number of the refresh that changed it, so that any number of pages can ask for what
changed since their last answer.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from joulelab.cluster.watch import LiveRun, RunWatcher, energy_text_of
from joulelab.errors import JoulelabError
from joulelab.meter.figures import labeled_text
from joulelab.report.energy_sums import known_sum, mixes_methods
from joulelab.report.tables.run_list import LIST_TITLES, row_text
from joulelab.report.wording import NOTHING
from joulelab.runs.groups import load_group
from joulelab.runs.index import (
    FOLDER,
    LIST_ROW,
    LISTING,
    OPEN_STATE,
    STATE,
    IndexReporter,
    file_state,
    listed,
    listed_run,
    read_row,
)
from joulelab.runs.paths import GROUPS_FOLDER
from joulelab.runs.store import group_folders, run_files
from joulelab.units import duration_text, power_text

TITLES = f"{LIST_TITLES}|Tags"
REFRESH_S = 2.0
# A refresh takes at most this share of one core, however large the store is.
_LOAD = 0.1
_MOST_GONE = 10_000
_ENERGY = LIST_TITLES.split("|").index("Own energy>")
_STATUS = LIST_TITLES.split("|").index("Status")


class StoreView:
    def __init__(self, store: Path) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._version = 0
        self._due_s = 0.0
        self._states: dict[str, str] = {}
        self._rows: dict[str, tuple[int, str]] = {}
        """Folder -> number of the refresh that changed the row, and the row as JSON."""
        self._running: dict[str, tuple[RunWatcher, dict[str, Any]]] = {}
        """With the row as it is in the index."""
        self._gone: list[tuple[int, str]] = []
        self._groups: tuple[int, str] = (0, "[]")
        self._groups_read: list[str] = []

    def changes(self, since: int) -> str:
        """JSON of the rows, removed runs and groups that changed after refresh `since`; 0: everything."""
        with self._lock:
            if time.monotonic() >= self._due_s:
                began_s = time.thread_time()
                self._refresh()
                spent_s = time.thread_time() - began_s
                self._due_s = time.monotonic() + max(REFRESH_S, spent_s / _LOAD)
            rows = ",".join(row for version, row in self._rows.values() if version > since)
            gone = [name for version, name in self._gone if version > since and name not in self._rows]
            groups = self._groups[1] if self._groups[0] > since else "null"
            return f'{{"version":{self._version},"rows":[{rows}],"gone":{json.dumps(gone)},"groups":{groups}}}'

    def _refresh(self) -> None:
        self._version += 1
        reporter = IndexReporter(lambda text: None)  # `joulelab runs` names what is unreadable
        if self._version == 1:
            for folder, state, open_state, row in listed(self.store, reporter, [FOLDER, STATE, OPEN_STATE, LIST_ROW]):
                self._states[folder] = state
                self._take(folder, open_state, row)
        else:
            states = {name: file_state(file) for name, file in run_files(self.store).items()}
            for name in [name for name, state in states.items() if self._states.get(name) != state]:
                self._read(name, reporter)
            for name in [name for name in self._rows if name not in states]:
                del self._rows[name]
                self._running.pop(name, None)
                self._gone = [*self._gone[-_MOST_GONE:], (self._version, name)]
            self._states = states
        for name in list(self._running):
            self._poll(name, reporter)
        self._read_groups()

    def _read(self, name: str, reporter: IndexReporter) -> None:
        with suppress(OSError):  # removed meanwhile
            row = read_row(self.store, name, (self.store / name / "run.json").stat(), reporter)
            if row is not None:
                self._take(name, row[OPEN_STATE], row[LIST_ROW])

    def _take(self, folder: str, open_state: str | None, row: str) -> None:
        # only the record of a run that was never closed has an open state
        if open_state is not None and (data := json.loads(row))["status"] == "running":
            watcher, _ = self._running.get(folder) or (RunWatcher(self.store / folder), None)
            self._running[folder] = (watcher, data)
        else:
            self._running.pop(folder, None)
        self._put(folder, row)

    def _poll(self, name: str, reporter: IndexReporter) -> None:
        watcher, row = self._running[name]
        try:
            live = watcher.poll()
        except (JoulelabError, OSError, ValueError):
            return
        if live.status == "running":
            self._put(name, row_text(live_row(row, live)))
        else:
            self._read(name, reporter)

    def _put(self, folder: str, row: str) -> None:
        row = f'{{"id":{json.dumps(folder)},{row[1:]}'
        if folder not in self._rows or self._rows[folder][1] != row:
            self._rows[folder] = (self._version, row)

    def _read_groups(self) -> None:
        place = self.store / GROUPS_FOLDER
        folders = sorted(path.name for path in place.iterdir()) if place.is_dir() else []
        if folders == self._groups_read:
            return
        rows = []
        for folder in group_folders(self.store):
            with suppress(JoulelabError, OSError):  # its runs are still listed
                group = load_group(folder)
                rows.append({"id": folder.name, "name": group.name, "about": group.about, "created": group.created_at})
        # a group whose file is not written yet is read at the next refresh
        self._groups_read = sorted(row["id"] for row in rows)
        text = json.dumps(rows, ensure_ascii=False)
        if text != self._groups[1]:
            self._groups = (self._version, text)


def group_facts(store: Path) -> dict[str, dict[str, Any]]:
    """Group -> energy of its runs' own stages together, their time and their worst grade, as the group's page has them.

    Computed when somebody looks at the groups: the list of runs does without these sums.
    """
    listings = dict(listed(store, IndexReporter(lambda text: None), [FOLDER, LISTING]))
    found: dict[str, dict[str, Any]] = {}
    for folder in group_folders(store):
        with suppress(JoulelabError, OSError):  # its runs are still listed
            members = [member.run_id for member in load_group(folder).members if member.run_id in listings]
            runs = [run for name in members if (run := listed_run(listings[name])).totals]
            figures = [run.totals.best for run in runs if run.totals]
            if not figures:
                continue
            energy, seconds = known_sum(figures), sum(run.totals.duration_s for run in runs if run.totals)
            found[folder.name] = {
                "runs": members,
                "energy": labeled_text(energy, mixes_methods(figures)),
                "energy_j": energy.energy_j,
                "time": duration_text(seconds),
                "time_s": seconds,
                "grade": max(run.validity.grade or "" for run in runs) or NOTHING,
            }
    return found


def live_row(row: dict[str, Any], live: LiveRun) -> dict[str, Any]:
    """The row of a running run with its latest readings."""
    now = ", ".join(filter(None, [live.stage, "" if live.power_w is None else power_text(live.power_w)]))
    cells, values = list(row["cells"]), list(row["values"])
    cells[_ENERGY], values[_ENERGY] = energy_text_of(live), live.energy_j
    cells[_STATUS] = f"running: {now}" if now else "running"
    return {**row, "cells": cells, "values": values}
