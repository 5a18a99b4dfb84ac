"""Runs as Python objects: `joulelab.load("last")` and `joulelab.load_runs("demo-*")`, with tables for pandas.

run = joulelab.load("last")
run.energy.energy_j, run.record.stages
run.to_pandas("stages")     # or totals, metrics, trace
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from joulelab.clock import NS
from joulelab.errors import DependencyMissing, UsageError
from joulelab.lookup import unknown
from joulelab.meter.figures import EnergyFigure
from joulelab.meter.integrate import power_curve
from joulelab.meter.series import load_trace
from joulelab.meter.trace import read_lines
from joulelab.runs.groups import is_pattern, run_folders_of
from joulelab.runs.index import JSON, RESULTS, RUNS, STAGES, Column
from joulelab.runs.measure.result import answer_block
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord
from joulelab.runs.store import load_record, store_root
from joulelab.units import plural

Row = dict[str, Any]


def load(name: str = "last", runs_dir: str | Path | None = None) -> LoadedRun:
    """One run: its id, the start or end of its id, its directory, or `last`."""
    found = load_runs(name, runs_dir)
    if len(found) != 1:
        raise UsageError(f"'{name}' names {len(found)} runs", f"use joulelab.load_runs({name!r})")
    return found[0]


def load_runs(name: str = "*", runs_dir: str | Path | None = None) -> LoadedRuns:
    """All runs of a group, or all that match a pattern such as `demo-*`, oldest first."""
    store = store_root(Path(runs_dir) if runs_dir is not None else None)
    if is_pattern(name) and not store.is_dir():
        raise UsageError(f"no store at {store.absolute()}", "pass runs_dir, or set JOULELAB_RUNS to its directory")
    return LoadedRuns([LoadedRun(folder) for folder in run_folders_of(store, [name])])


class LoadedRun:
    """A run of the store, also a running or killed one: its record and its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: RunRecord = load_record(folder)

    @property
    def run_id(self) -> str:
        return self.record.run_id

    @property
    def energy(self) -> EnergyFigure:
        """The energy that all commands print for this run, measured or estimated (`method`)."""
        return self.record.best_energy

    @property
    def energy_j(self) -> float | None:
        return self.energy.energy_j

    @property
    def duration_s(self) -> float:
        """Seconds that `energy` covers."""
        return self.record.best_duration_s

    def to_pandas(self, table: str = "stages") -> Any:
        """`stages`, `totals` (one row), `metrics` (of the training loop) or `trace` (power over time by device).

        Columns of the first two are those of `joulelab query --schema`; units are in the names.
        """
        return LoadedRuns([self]).to_pandas(table)

    def __str__(self) -> str:
        return answer_block(self.record, self.folder)

    __repr__ = __str__


class LoadedRuns(Sequence[LoadedRun]):
    """Several runs; `to_pandas` returns one table with a column `run_id`."""

    def __init__(self, runs: Sequence[LoadedRun]) -> None:
        self._runs = list(runs)

    def to_pandas(self, table: str = "totals") -> Any:
        if table not in TABLES:
            raise unknown("table", table, TABLES)
        try:
            import pandas as pd
        except ImportError as error:
            raise DependencyMissing(f"pandas cannot be imported ({error})", "pip install pandas") from None
        frame = pd.DataFrame([{"run_id": run.run_id, **row} for run in self._runs for row in TABLES[table](run)])
        for name in frame.columns.intersection(["created_at", "started_at", "time"]):
            frame[name] = pd.to_datetime(frame[name], utc=True, unit="s" if table == "trace" else None)
        return frame

    @overload
    def __getitem__(self, index: int) -> LoadedRun: ...
    @overload
    def __getitem__(self, index: slice) -> LoadedRuns: ...
    def __getitem__(self, index: int | slice) -> LoadedRun | LoadedRuns:
        return LoadedRuns(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[LoadedRun]:
        return iter(self._runs)

    def __repr__(self) -> str:
        return f"{plural(len(self), 'run')}: {', '.join(run.run_id for run in self._runs)}"


def _row(columns: Mapping[str, Column], of: Any) -> Row:
    """Values as pandas takes them: nested settings are left out, each result becomes a column."""
    row: Row = {}
    for name, column in columns.items():
        if column.kind == RESULTS:
            row |= {f"results.{result}": value for result, value in column.read(of)}
        elif column.kind != JSON:
            row[name] = column.read(of)
    return row


def _totals(run: LoadedRun) -> list[Row]:
    return [_row(RUNS, run.record)]


def _stages(run: LoadedRun) -> list[Row]:
    return [_row(STAGES, stage) for stage in run.record.stages]


def _metrics(run: LoadedRun) -> list[Row]:
    path = RunPaths(run.folder).metrics
    return list(read_lines(path)) if path.exists() else []


def _trace(run: LoadedRun) -> list[Row]:
    rows: list[Row] = []
    for host, attempt, path in RunPaths(run.folder).traces():
        trace = load_trace(path)
        for series in trace.devices:
            fixed = {"host": host, "attempt": attempt, "device": series.device, "component": series.component}
            for at_ns, power_w in zip(*power_curve(series), strict=True):
                times = {"time": int(at_ns) / NS + trace.offset_s, "seconds": (int(at_ns) - trace.first_ns) / NS}
                rows.append({**fixed, **times, "power_w": float(power_w)})
    return rows


TABLES: Mapping[str, Callable[[LoadedRun], list[Row]]] = {
    "stages": _stages,
    "totals": _totals,
    "metrics": _metrics,
    "trace": _trace,
}
