"""The store's index: one row per run in `index.parquet`, so that a list of 10,000 runs opens one file and not 10,000.

The index is a copy of what the folders say and can be thrown away at any time. A row counts while its `run.json` is the
very file it was read from (time, size, inode); of a run that nobody closed, traces and marks are watched as well. The
file is replaced whole, so readers never meet half of it and need no lock, which network file systems do not keep. Where
two programs write at once the later one stays, and rows it did not have are read again next time.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from joulelab.errors import JoulelabError
from joulelab.meter.parquet import indices, table_of
from joulelab.runs.index_rows import LISTING, RUNS, STAGE_ROWS, STAGES, SUMMARY, arrow_fields, row_of
from joulelab.runs.paths import RunPaths
from joulelab.runs.store import age, read_record, run_files, settle

INDEX = "index.parquet"
VERSION = "3"
_OF = "joulelab.index"
KEYS = FOLDER, STATE, OPEN_STATE = ("folder", "state", "open_state")
# A living run has another row every time somebody looks.
ALIVE = "alive"


@dataclass(frozen=True)
class Told:
    """Where the index says what it could not read, and what takes long."""

    unreadable: Callable[[str], None]
    reading: Callable[[int], None] = lambda count: None
    """How many runs must be read anew, before it begins."""


def refresh(store: Path, told: Told, columns: Sequence[str] | None = None) -> Any:
    """The index as it should be now, in the order of the runs' age, as an Arrow table; written back where it changed.

    Where nothing changed only the wanted columns are read at all.
    """
    import pyarrow as pa

    files = run_files(store)
    wanted = [name for name in columns or _schema().names if name not in KEYS]
    known = _read(store, [*KEYS, *wanted])
    true = _still_true(store, known, files)
    if len(true) == len(files) == known.num_rows:
        return _in_order(known)
    known = _read(store)  # whole, and perhaps written anew by somebody else since
    true = _still_true(store, known, files)
    missing = [name for name in files if name not in true]
    told.reading(len(missing))
    rows = [row for name in missing if (row := _row(store, name, files[name], told)) is not None]
    kept = known.take(indices(list(true.values())))
    table = pa.concat_tables([kept, _table(rows, told)])
    if rows or kept.num_rows != known.num_rows:
        with suppress(OSError):  # a store that may only be read is read without an index
            _write(store, table)
    return _in_order(table.select([*KEYS, *wanted]))


def _table(rows: list[dict[str, Any]], told: Told) -> Any:
    """One row that no column can hold is told and left out; all are tried together first, which is much quicker."""
    try:
        return table_of(rows, _schema())
    except (ValueError, TypeError, ArithmeticError) as error:
        if len(rows) == 1:
            told.unreadable(f"{rows[0][FOLDER]}: {type(error).__name__}: {error}")
            return table_of([], _schema())
    import pyarrow as pa

    return pa.concat_tables([_table([row], told) for row in rows])


def _in_order(table: Any) -> Any:
    names = table.column(FOLDER).to_pylist()
    return table.take(indices(sorted(range(len(names)), key=lambda place: (age(names[place]), names[place]))))


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            *((name, pa.string()) for name in KEYS),
            *arrow_fields(RUNS),
            *((name, pa.string()) for name in (LISTING, SUMMARY)),
            (STAGE_ROWS, pa.list_(pa.struct(arrow_fields(STAGES)))),
        ],
        metadata={_OF: VERSION},
    )


def _read(store: Path, columns: Sequence[str] | None = None) -> Any:
    """The index on disk; an absent, damaged or foreign one is an empty one, and is made anew."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema()
    wanted = list(columns or schema.names)
    try:
        with pq.ParquetFile(store / INDEX) as file:
            found = file.schema_arrow
            if found.equals(schema) and (found.metadata or {}).get(_OF.encode()) == VERSION.encode():
                return file.read(columns=wanted)
    except (OSError, pa.ArrowException):
        pass
    return table_of([], schema).select(wanted)


def _write(store: Path, table: Any) -> None:
    import pyarrow.parquet as pq

    temporary = store / f".{INDEX}.{secrets.token_hex(6)}.tmp"
    try:
        pq.write_table(table, temporary, compression="zstd")
        temporary.replace(store / INDEX)
    finally:
        temporary.unlink(missing_ok=True)


def _still_true(store: Path, known: Any, files: dict[str, os.stat_result]) -> dict[str, int]:
    """Folder -> row of those that need not be read again."""
    columns = [known.column(name).to_pylist() for name in KEYS]
    places = {}
    for place, (name, state, open_state) in enumerate(zip(*columns, strict=True)):
        if name not in files or _state(files[name]) != state:
            continue
        if open_state is None or open_state == _open_state(RunPaths(store / name)):
            places[name] = place
    return places


def _state(file: os.stat_result) -> str:
    return f"{file.st_mtime_ns}:{file.st_size}:{file.st_ino}"


def _open_state(paths: RunPaths) -> str:
    """What tells of a run that nobody has closed: its traces and marks."""
    found = []
    for folder in (paths.trace("", 0).parent, paths.events("", 0, 0).parent):
        with suppress(OSError), os.scandir(folder) as entries:
            found += [f"{entry.name}={_state(entry.stat())}" for entry in entries]
    return " ".join(sorted(found))


def _row(store: Path, name: str, file: os.stat_result, told: Told) -> dict[str, Any] | None:
    paths = RunPaths(store / name)
    try:
        open_state = _open_state(paths)
        written = read_record(paths)
        record = settle(paths, written)
        datetime.fromisoformat(record.created_at)
        row = row_of(record)
    except JoulelabError as error:
        told.unreadable(error.message)
        return None
    except OSError as error:  # its folder was removed or moved while we looked
        told.unreadable(f"{paths.folder}: {error.strerror or error}")
        return None
    except Exception as error:  # whatever is odd about one run, the others are listed
        told.unreadable(f"{paths.folder}: {type(error).__name__}: {error}")
        return None
    watched = None
    if written.status == "running":
        watched = ALIVE if record.status == "running" else open_state
    return {FOLDER: name, STATE: _state(file), OPEN_STATE: watched, **row}


def listed(store: Path, told: Told, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """Some columns of every run, oldest first."""
    table = refresh(store, told, columns)
    return list(zip(*(table.column(name).to_pylist() for name in columns), strict=True))
