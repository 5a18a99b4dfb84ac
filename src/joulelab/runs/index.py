"""The store's index: one row per run in `index.sqlite`, so that listing 10,000 runs opens one file; and SQL over it.

The index is a copy of the records and can be deleted at any time. A row is valid while its `run.json` is the file that
it was read from (time, size, inode); for a run that was never closed, traces and marks are compared too. The file is
replaced as a whole, so readers never see a partial one and need no lock, which network file systems may not provide. If
two processes write concurrently, the later one wins, and rows that it did not have are read again next time. SQLite is
part of Python, so listing needs no optional package.

`joulelab runs` lists the columns of the tables `runs` and `stages`, and `joulelab query` runs SQL over them and over
`samples`, the traces themselves. DuckDB reads them in place. A query cannot write, or read elsewhere: a single SELECT,
files of the store only, and the configuration is locked before the query runs.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sqlite3
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from joulelab.errors import JoulelabError, UsageError
from joulelab.lookup import CALCULATIONS, require_extra
from joulelab.meter.figures import EnergyFigure, ErrorComponent
from joulelab.meter.trace import SUFFIX, is_whole, lines_table, read_lines
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import Grade, Result, RunRecord, StageRecord, Status, flat_summary, repeat_mean
from joulelab.runs.store import age, current_record, read_record, run_files

TEXT, NUMBER, INTEGER, YES_NO = "text", "number", "integer", "yes/no"
TIME, RESULTS, JSON = "time", "numbers by name", "JSON"


@dataclass(frozen=True)
class Column:
    kind: str
    about: str
    read: Callable[[Any], Any]
    """The value, from a record (`runs`) or a stage record (`stages`)."""


def _path(path: str) -> Callable[[Any], Any]:
    """Attribute path of a record, e.g. `totals.best.energy_j`; None if a part of it is missing."""

    def read(record: Any) -> Any:
        for name in path.split("."):
            record = getattr(record, name, None)
        return record

    return read


def _columns(*rows: tuple[str, str, str | Callable[[Any], Any], str]) -> dict[str, Column]:
    """Rows of (name, kind, attribute path or function, description)."""
    return {
        name: Column(kind, about, _path(where) if isinstance(where, str) else where)
        for name, kind, where, about in rows
    }


def _energies(of: str) -> tuple[tuple[str, str, str, str], ...]:
    return (
        ("gpu_j", NUMBER, f"{of}.gpu.energy_j", "energy of the GPUs; null if not measured"),
        ("cpu_j", NUMBER, f"{of}.cpu.energy_j", "energy of the CPU packages (RAPL)"),
        ("dram_j", NUMBER, f"{of}.dram.energy_j", "energy of the memory (RAPL)"),
        ("cpu_estimate_j", NUMBER, f"{of}.cpu_estimate.energy_j", "estimated CPU energy; never part of energy_j"),
        ("codecarbon_j", NUMBER, f"{of}.codecarbon.energy_j", "energy reported by CodeCarbon, if enabled"),
        ("machine_j", NUMBER, f"{of}.machine.energy_j", "estimate for the whole machine, with `--scope machine`"),
    )


def _results(record: RunRecord) -> list[tuple[str, float]]:
    return [(name, result.value) for name, result in record.results.items()]


def _of_repeats(record: RunRecord, *names: str) -> Any:
    value: Any = repeat_mean(record)
    for name in names:
        value = getattr(value, name, None)
    return value


RUNS: Mapping[str, Column] = _columns(
    ("run_id", TEXT, "run_id", "the run's folder in the store"),
    ("name", TEXT, "name", "name of the experiment"),
    ("label", TEXT, "label", "name of its method in comparisons"),
    ("status", TEXT, "status", "queued, running, done, failed or truncated"),
    ("grade", TEXT, "validity.grade", "validity of the measurement, A to C"),
    ("pipeline", TEXT, lambda record: record.spec.get("pipeline"), "pipeline that ran the stages"),
    (
        "provenance",
        TEXT,
        lambda record: "imported" if record.spec.get("pipeline") == "import" else "recorded",
        "recorded by joulelab, or imported from logs of other tools",
    ),
    ("seed", INTEGER, lambda record: record.spec.get("seed"), "random seed"),
    ("group_id", TEXT, "group", "its group, if any"),
    ("created_at", TIME, "created_at", "when its folder was created"),
    ("host", TEXT, lambda record: record.attempts[-1].host if record.attempts else None, "host of the latest attempt"),
    ("attempts", INTEGER, lambda record: len(record.attempts), "number of attempts"),
    ("duration_s", NUMBER, "totals.duration_s", "seconds of all attempts, without idle baselines"),
    ("policy", TEXT, "totals.policy", "what energy_j means: measured, gpu_only, codecarbon or machine"),
    (
        "energy_j",
        NUMBER,
        "totals.energy_j",
        "energy of this run (policy), without reused artifacts; null: not measured",
    ),
    ("repeats", INTEGER, lambda record: _of_repeats(record, "count"), "number of repeats of `measure`; else null"),
    (
        "energy_per_repeat_j",
        NUMBER,
        lambda record: _of_repeats(record, "energy", "energy_j"),
        "mean energy over these repeats, without warm-ups",
    ),
    (
        "shown_energy_j",
        NUMBER,
        "best_energy.energy_j",
        "energy shown in tables: of a measured program, else of all stages; measured or estimated",
    ),
    ("shown_method", TEXT, "best_energy.method", "counter, integrated, estimated or missing"),
    ("half_width_j", NUMBER, "best_energy.half_width_j", "random 95 % half-width of shown_energy_j"),
    ("gain_error_rel", NUMBER, "best_energy.gain_error_rel", "gain error of the sensors"),
    ("coverage", NUMBER, "best_energy.coverage", "share of the time covered by the sensors"),
    (
        "lower_bound",
        YES_NO,
        "best_energy.is_lower_bound",
        "readings are incomplete: more energy was used than shown_energy_j",
    ),
    *_energies("totals"),
    ("idle_power_w", NUMBER, "totals.idle_power_w", "mean idle power, if measured"),
    ("above_idle_j", NUMBER, "totals.above_idle_j", "energy_j minus idle power over the covered time"),
    ("above_idle_half_width_j", NUMBER, "totals.above_idle.half_width_j", "95 % half-width of above_idle_j"),
    ("co2e_g_low", NUMBER, "totals.co2e.co2e_g_low", "grams of CO2e, low end; null without a grid"),
    ("co2e_g_high", NUMBER, "totals.co2e.co2e_g_high", "grams of CO2e, high end"),
    ("cost_low", NUMBER, "totals.cost.low", "cost, low end; null without a price"),
    ("cost_high", NUMBER, "totals.cost.high", "cost, high end"),
    ("results", RESULTS, _results, "quality by name: results['student.accuracy']"),
    ("settings", JSON, lambda record: json.dumps(record.spec), "settings->>'$.training.learning_rate'"),
    ("error", TEXT, "error.message", "why it failed"),
)

STAGES: Mapping[str, Column] = _columns(
    ("stage", TEXT, "name", "name of the stage"),
    ("role", TEXT, "role", "whose work: data, teacher, student, evaluation, inference, setup or idle"),
    ("activity", TEXT, "activity", "what is done: train, evaluate, cache, generate, judge, infer, load, ..."),
    ("part_of", TEXT, "part_of", "the stage that this setup or repeated work was split from"),
    ("repeated", YES_NO, "repeated", "work that was lost in an interruption and repeated by a later attempt"),
    ("repeat", INTEGER, "repeat", "repeat number of a measured program; null for everything else"),
    ("number", INTEGER, "number", "its position in the run"),
    ("status", TEXT, "status", "running, done, failed or truncated"),
    ("grade", TEXT, "validity.grade", "validity of its measurement, A to C"),
    ("outside_totals", YES_NO, "outside_totals", "true for idle baselines"),
    ("started_at", TIME, lambda s: s.segments[0].started_at if s.segments else None, "start of its first segment"),
    ("segments", INTEGER, lambda stage: len(stage.segments), "number of time segments"),
    ("duration_s", NUMBER, "duration_s", "seconds of all its segments"),
    ("energy_j", NUMBER, "energy_j", "energy under the run's policy"),
    ("shown_energy_j", NUMBER, "best.energy_j", "energy shown in tables: energy_j, else the estimate"),
    ("shown_method", TEXT, "best.method", "counter, integrated, estimated or missing"),
    ("half_width_j", NUMBER, "best.half_width_j", "random 95 % half-width of shown_energy_j"),
    *_energies("energy"),
    ("above_idle_j", NUMBER, "above_idle_j", "energy_j minus idle power over the covered time"),
    ("above_idle_half_width_j", NUMBER, "above_idle.half_width_j", "95 % half-width of above_idle_j"),
    ("mean_power_w", NUMBER, "mean_power_w", "mean power"),
    ("peak_power_w", NUMBER, "peak_power_w", "highest power that the sensors recorded"),
    ("samples", INTEGER, "samples", "processed samples"),
    ("tokens", INTEGER, "tokens", "processed tokens"),
    ("j_per_sample", NUMBER, "j_per_sample", "energy per sample"),
    ("j_per_token", NUMBER, "j_per_token", "energy per token"),
    ("samples_per_s", NUMBER, "samples_per_s", "samples per second"),
    ("tokens_per_s", NUMBER, "tokens_per_s", "tokens per second"),
)

# Further columns, printed or shown as they are.
LISTING, LIST_ROW, SUMMARY, STAGE_ROWS = "listing", "list_row", "summary", "stage_rows"


def row_of(record: RunRecord) -> dict[str, Any]:
    """A run as one row of the index, including its stages."""
    listing = json.dumps(_listing(record))
    return {
        **_fitting(RUNS, record),
        LISTING: listing,
        LIST_ROW: CALCULATIONS.resolve("list-row")(listing),
        SUMMARY: json.dumps(flat_summary(record), indent=2),
        STAGE_ROWS: [_fitting(STAGES, stage) for stage in record.stages],
    }


def _listing(record: RunRecord) -> dict[str, Any]:
    totals, repeats = record.totals, repeat_mean(record)
    return {
        "repeats": repeats.count if repeats else None,
        "record": record.model_dump(include={"run_id", "name", "label", "status", "group", "created_at"}),
        "grade": record.validity.grade,
        "trains_student": record.trains_student,
        "pipeline": record.spec.get("pipeline", ""),
        "tags": [str(tag) for tag in record.spec.get("tags") or ()],
        "per_item": per_item(record),
        "teacher_share": CALCULATIONS.resolve("teacher-share")(record),
        "co2e_g": [co2e.co2e_g_low, co2e.co2e_g_high] if (co2e := totals.co2e if totals else None) else None,
        "results": {name: result.model_dump() for name, result in record.results.items()},
        "totals": totals
        and {
            "policy": totals.policy,
            "energy_j": record.best_energy.energy_j if record.best_energy.measured else totals.energy_j,
            "duration_s": record.best_duration_s,
        },
        "best": totals and record.best_energy.model_dump(exclude={"reason", "fix"}),
    }


def per_item(record: RunRecord) -> tuple[str, float | None, float | None]:
    """Item, joules per item and their half-width: of training or inference, else of the whole run.

    A student that is trained twice (SFT, then distillation) counts by its last training: the first one may be reused.
    """
    order = ("inference", "student", "teacher")
    stages = (
        [] if record.spec.get("pipeline") == "measure" else [stage for stage in record.stages if not stage.repeated]
    )
    work = [stage for stage in stages if stage.activity in ("train", "infer", "generate")]
    work += [stage for stage in stages if stage.role == "inference" and stage not in work]
    work = [*reversed([stage for stage in work if stage.activity == "train"]), *work]
    work.sort(key=lambda stage: order.index(stage.role) if stage.role in order else len(order))
    for stage in work:
        for item, each in (("token", stage.j_per_token), ("sample", stage.j_per_sample)):
            if each is not None:
                energy_j, half_width_j = stage.best.energy_j, stage.best.half_width_j
                relative = half_width_j / energy_j if energy_j and half_width_j is not None else None
                return f"J per {item}, {stage.name}", each, None if relative is None else each * relative
    best = record.best_energy if record.totals else None
    return "J per run", best.energy_j if best else None, best.half_width_j if best else None


@dataclass(frozen=True, slots=True)
class ListedTotals:
    policy: str
    energy_j: float | None
    duration_s: float
    best: EnergyFigure


@dataclass(frozen=True, slots=True)
class ListedValidity:
    grade: Grade | None


@dataclass(frozen=True, slots=True)
class ListedRun:
    """The part of a record that a list of runs shows; ten thousand full records would take seconds to build.

    For a measured program the totals are those of one run of it: the mean over its `repeats`, without warm-ups.
    """

    run_id: str
    name: str
    label: str
    status: Status
    group: str | None
    created_at: str
    totals: ListedTotals | None
    results: dict[str, Result]
    validity: ListedValidity
    repeats: int | None = None
    trains_student: bool = False
    pipeline: str = ""
    tags: tuple[str, ...] = ()
    per_item: tuple[str, float | None, float | None] = ("J per run", None, None)
    """What energy is divided by, joules per item, and their half-width."""
    teacher_share: float | None = None
    """The teacher's fraction of the energy that comparisons count, inherited energy included."""
    co2e_g: tuple[float, float] | None = None


def listed_run(listing: str) -> ListedRun:
    """From the index; not validated again."""
    values = json.loads(listing)
    totals = None
    if values["totals"] is not None:
        best = values["best"]
        errors = tuple(ErrorComponent.model_construct(**error) for error in best["errors"])
        figure = {**best, "errors": errors, "sources": tuple(best["sources"]), "reason": None, "fix": None}
        totals = ListedTotals(**values["totals"], best=EnergyFigure.model_construct(**figure))
    results = {name: Result.model_construct(**result) for name, result in values["results"].items()}
    return ListedRun(
        **values["record"],
        totals=totals,
        results=results,
        validity=ListedValidity(values["grade"]),
        repeats=values["repeats"],
        trains_student=values["trains_student"],
        pipeline=values["pipeline"],
        tags=tuple(values["tags"]),
        per_item=tuple(values["per_item"]),
        teacher_share=values["teacher_share"],
        co2e_g=values["co2e_g"] and tuple(values["co2e_g"]),
    )


def _fitting(columns: Mapping[str, Column], record: RunRecord | StageRecord) -> dict[str, Any]:
    """Settings may have any type; a value that a column cannot hold becomes null, so that one run hides no other."""
    values = {name: column.read(record) for name, column in columns.items()}
    return {name: value if _FITS[columns[name].kind](value) else None for name, value in values.items()}


_FITS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys((TEXT, TIME, JSON), lambda value: isinstance(value, str)),
    NUMBER: lambda value: isinstance(value, int | float),
    INTEGER: lambda value: type(value) is int and -(2**63) <= value < 2**63,
    YES_NO: lambda value: isinstance(value, bool),
    RESULTS: lambda value: isinstance(value, list),
}


INDEX = "index.sqlite"
VERSION = 12
KEYS = FOLDER, STATE, OPEN_STATE = ("folder", "state", "open_state")
_ROW = "row"
"""Everything else about a run: JSON, compressed, because 10,000 rows of it are 100 MB."""
# The row of a running run is replaced every time it is read.
ALIVE = "alive"


@dataclass(frozen=True)
class IndexReporter:
    """Receives problems and progress of reading a store."""

    unreadable: Callable[[str], None]
    reading: Callable[[int], None] = lambda count: None
    """Called with the number of runs that must be read, before it begins."""


def listed(store: Path, reporter: IndexReporter, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """Some columns of every run, oldest first, from the up-to-date index; it is written back if it changed."""
    files = run_files(store)
    known = _read(store, with_rows=not set(columns) <= {*KEYS, LISTING, LIST_ROW})
    rows = {name: row for name, row in known.items() if name in files and _is_valid(store, name, files[name], row)}
    gone, missing = [name for name in known if name not in rows], [name for name in files if name not in rows]
    if missing:
        reporter.reading(len(missing))
    read = {name: row for name in missing if (row := read_row(store, name, files[name], reporter)) is not None}
    if gone or read:
        with suppress(OSError):  # a read-only store is read without an index
            _write(store, gone, read, bool(known))
    rows |= read
    names = sorted(rows, key=lambda name: (age(name), name))
    return [tuple(rows[name][column] for column in columns) for name in names]


def _read(store: Path, with_rows: bool) -> dict[str, dict[str, Any]]:
    """The index on disk by folder; one that is absent, corrupted or of another version counts as empty.

    A list of runs does without the compressed rows.
    """
    names = [*KEYS, LISTING, LIST_ROW, *([_ROW] if with_rows else [])]
    place, query = quote(str((store / INDEX).absolute())), f"select {', '.join(names)} from runs"
    try:
        # immutable: the file is replaced and never changed, so it is read without a lock
        with closing(sqlite3.connect(f"file:{place}?mode=ro&immutable=1", uri=True)) as connection:
            if connection.execute("pragma user_version").fetchone()[0] != VERSION:
                return {}
            rows = [dict(zip(names, values, strict=True)) for values in connection.execute(query)]
        unpacked = [json.loads(zlib.decompress(row.pop(_ROW))) if with_rows else {} for row in rows]
        return {row[FOLDER]: row | values for row, values in zip(rows, unpacked, strict=True)}
    except (sqlite3.Error, zlib.error, ValueError):
        return {}


def _write(store: Path, gone: Sequence[str], read: Mapping[str, Mapping[str, Any]], keep: bool) -> None:
    # A random name and not the pid: processes on two nodes that share the store may have the same
    # pid.
    temporary = store / f".{INDEX}.{secrets.token_hex(6)}.tmp"
    names = [*KEYS, LISTING, LIST_ROW, _ROW]
    try:
        if keep:
            shutil.copyfile(store / INDEX, temporary)
        # nolock: no other process knows this name, and some network file systems have no locks
        place = f"file:{quote(str(temporary.absolute()))}?nolock=1"
        with closing(sqlite3.connect(place, uri=True, isolation_level=None)) as connection:
            connection.execute("pragma journal_mode = off")  # a partial file is never renamed into place
            connection.execute("pragma synchronous = off")
            connection.execute("begin")
            connection.execute(f"create table if not exists runs ({', '.join(names)}, primary key ({FOLDER}))")
            connection.execute(f"pragma user_version = {VERSION}")
            connection.executemany(f"delete from runs where {FOLDER} = ?", [(name,) for name in gone])
            rows = [[row[name] for name in names] for row in read.values()]
            connection.executemany(f"insert or replace into runs values ({', '.join('?' * len(names))})", rows)
            connection.execute("commit")
        temporary.replace(store / INDEX)
        (store / "index.parquet").unlink(missing_ok=True)  # the index of the first release
    except sqlite3.OperationalError as error:  # the folder cannot be written, or the disk is full
        raise OSError(str(error)) from None
    except sqlite3.DatabaseError:  # the copied index is corrupted in a part that was not read: the next one starts anew
        (store / INDEX).unlink(missing_ok=True)
    finally:
        temporary.unlink(missing_ok=True)


def _is_valid(store: Path, name: str, file: os.stat_result, row: Mapping[str, Any]) -> bool:
    """Whether the run need not be read again."""
    if file_state(file) != row[STATE]:
        return False
    return row[OPEN_STATE] is None or row[OPEN_STATE] == _open_state(RunPaths(store / name))


def file_state(file: os.stat_result) -> str:
    """Changes whenever a file is replaced or written."""
    return f"{file.st_mtime_ns}:{file.st_size}:{file.st_ino}"


def _open_state(paths: RunPaths) -> str:
    """State of a run that was never closed: that of its traces and marks."""
    states = []
    for folder in (paths.trace("", 0).parent, paths.events("", 0, 0).parent):
        with suppress(OSError), os.scandir(folder) as entries:
            states += [f"{entry.name}={file_state(entry.stat())}" for entry in entries]
    return " ".join(sorted(states))


def read_row(store: Path, name: str, file: os.stat_result, reporter: IndexReporter) -> dict[str, Any] | None:
    """The row of one run as it is now; None, and a report, if it cannot be read."""
    paths = RunPaths(store / name)
    try:
        open_state = _open_state(paths)
        written = read_record(paths)
        record = current_record(paths, written)
        datetime.fromisoformat(record.created_at)
        row = row_of(record)
        packed = zlib.compress(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode(), 1)
    except JoulelabError as error:
        reporter.unreadable(error.message)
        return None
    except OSError as error:  # its folder was removed or moved meanwhile
        reporter.unreadable(f"{paths.folder}: {error.strerror or error}")
        return None
    except Exception as error:  # a problem with one run must not hide the others
        reporter.unreadable(f"{paths.folder}: {type(error).__name__}: {error}")
        return None
    watched = None
    if written.status == "running":
        watched = ALIVE if record.status == "running" else open_state
    return {FOLDER: name, STATE: file_state(file), OPEN_STATE: watched, **row, _ROW: packed}


RUN_ID = ("run_id", TEXT, "the run")
SAMPLES: tuple[tuple[str, str, str], ...] = (
    RUN_ID,
    ("host", TEXT, "machine"),
    ("attempt", INTEGER, "number of the attempt"),
    ("kind", TEXT, "gpu, host, rapl, counters, estimate, samples (the driver's 20 ms buffer), gap, warning, ..."),
    ("time", TIME, "wall time of the reading"),
    ("mono_ns", INTEGER, "monotonic nanoseconds of that machine, for durations"),
    ("device", TEXT, "GPU, counter or host"),
    ("power_watts", NUMBER, "power as reported by the sensor"),
    ("energy_counter_j", NUMBER, "counter reading, not the energy of the run: take differences"),
    ("gpu_utilization_percent", NUMBER, "share of time in which some kernel ran"),
    ("memory_used_MB", NUMBER, "MiB of GPU memory"),
    ("temperature_C", NUMBER, "degrees Celsius"),
    ("sm_clock_MHz", NUMBER, "SM clock of the GPU"),
    ("cpu_utilization_percent", NUMBER, "mean over all hardware threads of the host"),
    ("host_memory_used_MB", NUMBER, "MiB of the host's memory"),
    ("busy_thread_s", NUMBER, "CPU seconds of the program so far, for the estimate"),
    ("rapl", "numbers by name", "counter readings by RAPL domain in joules: rapl['package-0']"),
    ("sample_us", "list of integers", "for kind samples: times in microseconds"),
    ("sample_mw", "list of integers", "for kind samples: milliwatts"),
    ("rest", "JSON", "all other fields of the line"),
)
_HINT = "joulelab query --schema lists the tables and columns"


@dataclass(frozen=True)
class QueryResult:
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def schema() -> Mapping[str, list[tuple[str, str, str]]]:
    """Table -> (column, kind, description)."""
    return {
        "runs": [(name, column.kind, column.about) for name, column in RUNS.items()],
        "stages": [RUN_ID, *((name, column.kind, column.about) for name, column in STAGES.items())],
        "samples": list(SAMPLES),
    }


def run_query(store: Path, sql: str, reporter: IndexReporter, limit_s: float = 300.0) -> QueryResult:
    """The rows of one SELECT; a query that takes longer than `limit_s` is interrupted."""
    require_extra("joulelab query", "query")
    import duckdb

    connection = duckdb.connect()
    try:
        _require_one_select(duckdb, connection, sql)
        _make_tables(connection, store, sql, reporter)
        _lock(connection, store)
        watchdog = threading.Timer(limit_s, connection.interrupt)
        watchdog.start()
        try:
            result = connection.execute(sql)
            return QueryResult(tuple(column[0] for column in result.description), result.fetchall())
        finally:
            watchdog.cancel()
    except duckdb.InterruptException:
        raise UsageError(
            f"the query was stopped after {limit_s:g} s", "select fewer rows, or raise the limit with --time-limit"
        ) from None
    except duckdb.Error as error:
        raise UsageError(str(error).strip(), _HINT) from None
    finally:
        connection.close()


def _require_one_select(duckdb: Any, connection: Any, sql: str) -> None:
    statements = connection.extract_statements(sql)
    allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in allowed:
        kinds = ", ".join(statement.type.name for statement in statements) or "nothing"
        raise UsageError(f"expected a single SELECT, found {kinds}", "the store is read-only; " + _HINT)


def _make_tables(connection: Any, store: Path, sql: str, reporter: IndexReporter) -> None:
    columns = [FOLDER, *RUNS, STAGE_ROWS]
    rows = listed(store, reporter, columns)
    named = [dict(zip(columns, row, strict=True)) for row in rows]
    for row in named:
        row["results"] = [tuple(pair) for pair in row["results"] or ()]  # JSON has no tuples, which a map is made of
    connection.register("index_rows", _index_table(named))
    connection.execute(f"create table runs as select {', '.join(RUNS)} from index_rows")
    connection.execute("alter table runs alter created_at type timestamptz")
    of_stage = ", ".join(f"stage_row.{name}" for name in STAGES)
    connection.execute(
        f"create table stages as select run_id, {of_stage} from "
        f"(select run_id, unnest({STAGE_ROWS}) as stage_row from index_rows)"
    )
    connection.execute("alter table stages alter started_at type timestamptz")
    connection.unregister("index_rows")
    if re.search(r"\bsamples\b", sql, re.I):
        _make_samples(connection, store, [row[0] for row in rows], reporter)


def _index_table(rows: list[dict[str, Any]]) -> Any:
    """The index in Arrow's types, which DuckDB reads."""
    import pyarrow as pa

    kinds = {
        TEXT: pa.string(),
        NUMBER: pa.float64(),
        INTEGER: pa.int64(),
        YES_NO: pa.bool_(),
        TIME: pa.string(),
        JSON: pa.string(),
        RESULTS: pa.map_(pa.string(), pa.float64()),
    }
    stage = pa.struct([(name, kinds[column.kind]) for name, column in STAGES.items()])
    of_run = [(name, kinds[column.kind]) for name, column in RUNS.items()]
    return pa.Table.from_pylist(rows, pa.schema([*of_run, (STAGE_ROWS, pa.list_(stage))]))


def _make_samples(connection: Any, store: Path, folders: list[str], reporter: IndexReporter) -> None:
    """One view over all traces; JSONL traces are read into memory, Parquet traces stay on disk."""
    parts, closed = [], []
    for number, (folder, host, attempt, path) in enumerate(_traces(store, folders)):
        if path.suffix == SUFFIX and not is_whole(path):
            reporter.unreadable(f"{path}: its end is missing")
        elif path.suffix == SUFFIX:
            closed.append(path)
        else:
            connection.register(f"trace_{number}", lines_table(read_lines(path)))
            identity = f"{_text(folder)} as run_id, {_text(host)} as host, {attempt} as attempt"
            parts.append(f"select {identity}, * from trace_{number}")
    if closed:
        files = ", ".join(_text(str(path.absolute())) for path in closed)
        parts.append(
            "select parse_path(filename)[-3] as run_id, regexp_extract(parse_filename(filename), '^(.*)\\.\\d+\\.', 1) "
            "as host, regexp_extract(parse_filename(filename), '\\.(\\d+)\\.', 1)::bigint as attempt, "
            f"* exclude (filename) from read_parquet([{files}], filename = true, union_by_name = true)"
        )
    if not parts:
        raise JoulelabError(f"no run under {store.absolute()} has a trace yet", "`joulelab runs` lists all runs")
    chosen = ", ".join("timestamp::timestamptz as time" if name == "time" else name for name, *_ in SAMPLES)
    connection.execute(f"create view samples as select {chosen} from ({' union all by name '.join(parts)})")


def _traces(store: Path, folders: list[str]) -> list[tuple[str, str, int, Path]]:
    return [(name, *trace) for name in folders for trace in RunPaths(store / name).traces()]


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _lock(connection: Any, store: Path) -> None:
    # DuckDB compares paths without their links; a run of `--run-dir` is a link in the store.
    outside = {folder.resolve() for folder in map(store.joinpath, run_files(store)) if folder.is_symlink()}
    allowed = ", ".join(_text(str(folder)) for folder in (store.absolute(), *sorted(outside)))
    connection.execute(f"set allowed_directories = [{allowed}]")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")
