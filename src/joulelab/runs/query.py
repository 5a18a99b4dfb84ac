"""SQL over a store: the tables `runs` and `stages` from its index, `samples` from the traces themselves.

DuckDB reads them where they are. Nothing can be written or read elsewhere: one SELECT at a time, files of the store
only, and the settings that say so are locked before the question is asked.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulelab.errors import DependencyMissing, JoulelabError, UsageError
from joulelab.meter.parquet import SUFFIX, is_whole, lines_table
from joulelab.meter.trace import read_lines
from joulelab.runs.index import Told, refresh
from joulelab.runs.index_rows import INTEGER, NUMBER, RUNS, STAGE_ROWS, STAGES, TEXT, TIME
from joulelab.runs.paths import RunPaths

RUN_ID = ("run_id", TEXT, "the run")
SAMPLES: tuple[tuple[str, str, str], ...] = (
    RUN_ID,
    ("host", TEXT, "machine"),
    ("attempt", INTEGER, "which start of the run"),
    ("kind", TEXT, "gpu, host, rapl, counters, estimate, samples (the driver's 20 ms buffer), gap, warning, ..."),
    ("time", TIME, "wall time of the reading"),
    ("mono_ns", INTEGER, "monotonic nanoseconds of that machine, to compute with"),
    ("device", TEXT, "which card, counter or host"),
    ("power_watts", NUMBER, "power as the sensor said"),
    ("energy_counter_j", NUMBER, "the counter's reading, not the run's energy: take differences"),
    ("gpu_utilization_percent", NUMBER, "share of time in which some kernel ran"),
    ("memory_used_MB", NUMBER, "MiB of GPU memory"),
    ("temperature_C", NUMBER, "degrees Celsius"),
    ("sm_clock_MHz", NUMBER, "clock of the card's processors"),
    ("cpu_utilization_percent", NUMBER, "of all hardware threads of the host"),
    ("host_memory_used_MB", NUMBER, "MiB of the host's memory"),
    ("busy_thread_s", NUMBER, "CPU seconds of the program so far, for the estimate"),
    ("rapl", "numbers by name", "joules by RAPL domain, as the counters stand: rapl['package-0']"),
    ("sample_us", "list of integers", "of kind samples: when, in microseconds"),
    ("sample_mw", "list of integers", "of kind samples: milliwatts"),
    ("rest", "JSON", "all other fields of the line"),
)
_HINT = "joulelab query --schema lists the tables and columns"


@dataclass(frozen=True)
class Answer:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def schema() -> Mapping[str, list[tuple[str, str, str]]]:
    """Table -> (column, kind, what it is)."""
    return {
        "runs": [(name, column.kind, column.about) for name, column in RUNS.items()],
        "stages": [RUN_ID, *((name, column.kind, column.about) for name, column in STAGES.items())],
        "samples": list(SAMPLES),
    }


def ask(store: Path, sql: str, told: Told) -> Answer:
    duckdb = _duckdb()
    connection = duckdb.connect()
    try:
        _require_one_select(duckdb, connection, sql)
        _make_tables(connection, store, sql, told)
        _lock(connection, store)
        found = connection.execute(sql)
        return Answer(tuple(column[0] for column in found.description), found.fetchall())
    except duckdb.Error as error:
        raise UsageError(str(error).strip(), _HINT) from None
    finally:
        connection.close()


def _duckdb() -> Any:
    try:
        import duckdb

        importlib.import_module("pytz")  # which DuckDB wants for times with a zone, and does not bring along
    except ImportError:
        raise DependencyMissing(
            "`joulelab query` asks DuckDB (with pytz), which is not installed", "pip install 'joulelab[query]'"
        ) from None
    return duckdb


def _require_one_select(duckdb: Any, connection: Any, sql: str) -> None:
    statements = connection.extract_statements(sql)
    allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in allowed:
        kinds = ", ".join(statement.type.name for statement in statements) or "nothing"
        raise UsageError(f"one SELECT is answered, and this is {kinds}", "the store is only read; " + _HINT)


def _make_tables(connection: Any, store: Path, sql: str, told: Told) -> None:
    table = refresh(store, told, [*RUNS, STAGE_ROWS])
    connection.register("index_rows", table)
    connection.execute(f"create table runs as select {', '.join(RUNS)} from index_rows")
    connection.execute("alter table runs alter created_at type timestamptz")
    columns = ", ".join(f"stage_row.{name}" for name in STAGES)
    connection.execute(
        f"create table stages as select run_id, {columns} from "
        f"(select run_id, unnest({STAGE_ROWS}) as stage_row from index_rows)"
    )
    connection.execute("alter table stages alter started_at type timestamptz")
    connection.unregister("index_rows")
    if re.search(r"\bsamples\b", sql, re.I):
        _make_samples(connection, store, table.column("folder").to_pylist(), told)


def _make_samples(connection: Any, store: Path, folders: list[str], told: Told) -> None:
    """One view over all traces; those still in JSONL are read into memory, those in Parquet stay on disk."""
    parts, closed = [], []
    for number, (folder, host, attempt, path) in enumerate(_traces(store, folders)):
        if path.suffix == SUFFIX and not is_whole(path):
            told.unreadable(f"{path}: its end is missing")
        elif path.suffix == SUFFIX:
            closed.append(path)
        else:
            connection.register(f"trace_{number}", lines_table(read_lines(path)))
            whose = f"{_text(folder)} as run_id, {_text(host)} as host, {attempt} as attempt"
            parts.append(f"select {whose}, * from trace_{number}")
    if closed:
        files = ", ".join(_text(str(path.absolute())) for path in closed)
        parts.append(
            "select parse_path(filename)[-3] as run_id, regexp_extract(parse_filename(filename), '^(.*)\\.\\d+\\.', 1) "
            "as host, regexp_extract(parse_filename(filename), '\\.(\\d+)\\.', 1)::bigint as attempt, "
            f"* exclude (filename) from read_parquet([{files}], filename = true, union_by_name = true)"
        )
    if not parts:
        raise JoulelabError(f"no run under {store.absolute()} has a trace yet", "`joulelab runs` lists them")
    chosen = ", ".join("timestamp::timestamptz as time" if name == "time" else name for name, *_ in SAMPLES)
    connection.execute(f"create view samples as select {chosen} from ({' union all by name '.join(parts)})")


def _traces(store: Path, folders: list[str]) -> list[tuple[str, str, int, Path]]:
    return [(name, *trace) for name in folders for trace in RunPaths(store / name).traces()]


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _lock(connection: Any, store: Path) -> None:
    connection.execute(f"set allowed_directories = [{_text(str(store.absolute()))}]")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")
