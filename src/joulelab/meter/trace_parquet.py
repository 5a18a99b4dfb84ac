"""A closed trace as Parquet: the same lines in columns, a tenth of the size, and quick to read into arrays.

While a run goes on its trace is JSONL, which survives a kill. Afterwards the lines are copied into columns of fixed
types; whatever does not fit one (a header, a list of processes, a null) stands as JSON in the column `rest`, so that
every line comes back as it was. `copy_to_parquet` reads the copy back and compares it before it gets its name.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from joulelab.errors import JoulelabError
from joulelab.meter.arrow_arrays import array_of

Line = dict[str, Any]

SUFFIX = ".parquet"
REST = "rest"
MISFIT = "misfit"
"""True where a typed field held something else, which then stands in `rest`."""

TEXTS = ("kind", "timestamp", "device", "gpu_uuid", "gpu_name")
INTEGERS = ("mono_ns", "counter_mono_ns", "wall_us", "wall_us_mono_ns", "gpu_index", "throttle_reasons")
NUMBERS = (
    *("power_watts", "energy_counter_j", "counter_read_s", "power_limit_w", "busy_thread_s", "late_s"),
    *("gpu_utilization_percent", "memory_utilization_percent", "cpu_utilization_percent"),
    *("memory_used_MB", "memory_total_MB", "host_memory_used_MB", "temperature_C"),
    *("sm_clock_MHz", "memory_clock_MHz"),
)
LISTS = ("sample_us", "sample_mw")
MAPS = ("rapl", "counters_j")

_ROWS = 20_000
_LAST_BYTES = b"PAR1"
_LARGEST_EXACT = 2**53


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()  # half a surrogate pair is JSON, and no UTF-8


def _is_integer(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_number(value: object) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) <= _LARGEST_EXACT)


def _is_list(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_integer, value))


def _is_map(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


_FITS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(TEXTS, _is_text),
    **dict.fromkeys(INTEGERS, _is_integer),
    **dict.fromkeys(NUMBERS, _is_number),
    **dict.fromkeys(LISTS, _is_list),
    **dict.fromkeys(MAPS, _is_map),
}


def _schema() -> Any:
    import pyarrow as pa

    kinds = [
        *((name, pa.string()) for name in TEXTS),
        *((name, pa.int64()) for name in INTEGERS),
        *((name, pa.float64()) for name in NUMBERS),
        *((name, pa.list_(pa.int64())) for name in LISTS),
        *((name, pa.map_(pa.string(), pa.float64())) for name in MAPS),
    ]
    return pa.schema([*kinds, (REST, pa.string()), (MISFIT, pa.bool_())])


def copy_to_parquet(jsonl: Path, read: Callable[[Path], Iterator[Line]]) -> Path:
    """The trace as `<stem>.parquet` beside it: written, synced, read back, compared, and only then named.

    `read` gives the lines of the JSONL, which is left to the caller.
    """
    final = jsonl.with_suffix(SUFFIX)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        write_parquet(temporary, read(jsonl))
        _require_same(jsonl, read(jsonl), read_parquet_lines(temporary))
        temporary.replace(final)
        _sync(final.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return final


def _require_same(jsonl: Path, written: Iterator[Line], copied: Iterator[Line]) -> None:
    for number, (line, copy) in enumerate(zip_longest(written, copied), 1):
        if line != copy and json.dumps(line, sort_keys=True) != json.dumps(copy, sort_keys=True):  # NaN is not itself
            raise JoulelabError(
                f"{jsonl}: line {number} does not come back from Parquet as it was", "the JSONL stays; it is the trace"
            )


def is_whole(path: Path) -> bool:
    """Whether a file ends as Parquet does; one that a full disk or a copy has cut off cannot be read at all."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - len(_LAST_BYTES)))
        return file.read() == _LAST_BYTES


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_parquet(path: Path, lines: Iterable[Line]) -> None:
    import pyarrow.parquet as pq

    schema = _schema()
    remaining = iter(lines)
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=["kind", "device", "gpu_uuid", "gpu_name", REST],
        # neighbouring stamps differ by little
        column_encoding={"mono_ns": "DELTA_BINARY_PACKED", "timestamp": "DELTA_BYTE_ARRAY"},
    ) as writer:
        while chunk := list(islice(remaining, _ROWS)):
            writer.write_table(_table(chunk, schema))
    _sync(path)


def lines_table(lines: Iterable[Line]) -> Any:
    """Lines as the columns they have in Parquet, in memory."""
    return _table(list(lines), _schema())


def _table(lines: list[Line], schema: Any) -> Any:
    import pyarrow as pa

    columns: dict[str, list[Any]] = {name: [None] * len(lines) for name in schema.names}
    for row, line in enumerate(lines):
        rest: Line = {}
        for name, value in line.items():
            fits = _FITS.get(name)
            if fits is not None and fits(value):
                columns[name][row] = list(value.items()) if name in MAPS else value
            else:
                rest[name] = value
        columns[MISFIT][row] = any(name in _FITS and value is not None for name, value in rest.items())
        columns[REST][row] = json.dumps(rest, separators=(",", ":"), sort_keys=True) if rest else None
    return pa.Table.from_arrays([array_of(columns[field.name], field.type) for field in schema], schema=schema)


def read_parquet_lines(path: Path) -> Iterator[Line]:
    """Every line as it was written; a trace that is no Parquet file, or not one of ours, is an error with its name."""
    for batch in read_batches(path):
        present = {name: batch.column(name) for name in batch.schema.names if name != MISFIT}
        columns = {name: column.to_pylist() for name, column in present.items() if column.null_count < batch.num_rows}
        rests = columns.pop(REST, [None] * batch.num_rows)
        maps = [name for name in MAPS if name in columns]
        for row in range(batch.num_rows):
            line = {name: values[row] for name, values in columns.items() if values[row] is not None}
            for name in maps:
                if name in line:
                    line[name] = dict(line[name])
            if rests[row]:
                line |= json.loads(rests[row])
            yield line


def read_batches(path: Path, columns: list[str] | None = None) -> Iterator[Any]:
    """The record batches of a trace, some columns or all of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if REST not in file.schema_arrow.names:
                raise JoulelabError(f"{path} is a Parquet file, and not a trace of joulelab")
            known = [name for name in columns if name in file.schema_arrow.names] if columns else None
            yield from file.iter_batches(batch_size=_ROWS, columns=known)
    except (pa.ArrowInvalid, OSError) as error:
        raise JoulelabError(f"{path} cannot be read: {error}", "restore it from a copy") from None
