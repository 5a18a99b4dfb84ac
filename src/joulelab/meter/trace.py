"""Traces: append-only JSONL while a run is active, Parquet once it is closed; readers need not distinguish the two.

JSONL survives a kill: whole lines per `write()`, synced, and tolerant when read. Afterwards the lines are copied into
columns of fixed types, a tenth of the size and fast to read into arrays. What does not fit a column (a header, a list
of processes, a null) is JSON in the column `rest`, so that every line is restored exactly; `copy_to_parquet` reads the
copy back and compares it before renaming it into place. Parquet needs pyarrow, which the base installation does not
have: there a closed trace stays JSONL.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joulelab import __version__, clock
from joulelab.errors import JoulelabError
from joulelab.lookup import require_packages

SCHEMA_VERSION = 1


class LineFile:
    """Appends lines. One `write()` per batch survives SIGKILL of the process; `sync` survives the machine."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        # O_APPEND makes position and write one step in the kernel, so that lines of two processes
        # that share a file do not overwrite each other.
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._torn = _ends_inside_a_line(self._fd)

    def append(self, *lines: dict[str, Any], sync: bool = False) -> None:
        """Raises OSError if the disk is full; a truncated line stays a separate line, which readers skip."""
        data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        if self._torn:
            data = b"\n" + data
        # set before the write: if it fails halfway, the next append starts a new line
        while data:
            self._torn = True
            # A write may be short where the disk is full or a signal arrives; the rest is written
            # or the error raised.
            data = data[os.write(self._fd, data) :]
        self._torn = False
        if sync:
            self.sync()

    def sync(self) -> None:
        os.fsync(self._fd)

    def detach(self) -> None:
        """In a forked child: append to a file that is deleted with the child, since the file is the parent's."""
        with tempfile.TemporaryFile() as private:
            os.dup2(private.fileno(), self._fd, inheritable=False)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _ends_inside_a_line(fd: int) -> bool:
    """After a kill or a full disk the last line may lack its newline; the next one must not be joined to it."""
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def header(**facts: Any) -> dict[str, Any]:
    """The first line of every trace and event file: host, process, version and clocks."""
    return {
        "kind": "header",
        **clock.now().fields(),
        "schema_version": SCHEMA_VERSION,
        "joulelab": __version__,
        "host": os.uname().nodename,
        "boot_id": clock.boot_id(),
        "pid": os.getpid(),
        "clocks": {"mono_ns": "CLOCK_MONOTONIC, nanoseconds, this boot", "timestamp": "wall, ISO 8601 with offset"},
        **facts,
    }


def read_lines(path: Path, offset: int = 0) -> Iterator[dict[str, Any]]:
    """The complete lines of a file from a byte offset; a last line that a kill truncated is skipped.

    A trace that was closed and copied into Parquet gives the same lines.
    """
    path = where_now(path)
    if path.suffix == ".parquet":
        yield from read_parquet_lines(path)
        return
    with path.open("rb") as file:
        file.seek(offset)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                yield line


class NewLines:
    """Follows a file that is being written: every call of `read` gives the lines since the one before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return  # still being written: read again next time
                self._offset += len(raw)
                with suppress(ValueError, RecursionError):  # a line that a full disk cut short
                    line = json.loads(raw)
                    if isinstance(line, dict):
                        yield line


def where_now(path: Path) -> Path:
    """The current file of a trace: it may have become Parquet in the meantime."""
    copy = path.with_suffix(".parquet")
    return copy if path.suffix == ".jsonl" and not path.exists() and copy.exists() else path


def open_trace(path: Path) -> LineFile:
    """Open a trace for appending; one that became Parquet during standby is converted back to JSONL first."""
    closed = where_now(path)
    if closed != path:
        temporary = path.with_suffix(".reopened")
        temporary.unlink(missing_ok=True)
        copy = LineFile(temporary)
        for line in read_lines(closed):
            copy.append(line)
        copy.sync()
        copy.close()
        temporary.replace(path)
    return LineFile(path)


def read_header(path: Path) -> dict[str, Any]:
    first = next(read_lines(path), {})
    return first if first.get("kind") == "header" else {}


def numbers_in(array: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The numbers of an Arrow array, 0 where there is none, and where there is one."""
    # filled first: pyarrow converts integers with nulls to floats, which cannot hold every nanosecond
    return array.fill_null(0).to_numpy(zero_copy_only=False), array.is_valid().to_numpy(zero_copy_only=False)


Line = dict[str, Any]

SUFFIX = ".parquet"
REST = "rest"
MISFIT = "misfit"
"""True where a typed field has a value of another type, which is then in `rest`."""

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
    return isinstance(value, str) and value.isprintable()  # half a surrogate pair is valid JSON and invalid UTF-8


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
    """Copy a trace to `<stem>.parquet` next to it: write, sync, read back, compare, and only then rename.

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
                f"{jsonl}: line {number} differs after conversion to Parquet", "the JSONL file is kept as the trace"
            )


def is_whole(path: Path) -> bool:
    """Whether a file has Parquet's footer; one that a full disk or a copy truncated cannot be read at all."""
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
        # neighboring stamps differ by little
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
    return pa.Table.from_arrays([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


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
    require_packages(f"the trace {path}", "pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if REST not in file.schema_arrow.names:
                raise JoulelabError(f"{path} is a Parquet file but not a trace of joulelab")
            known = [name for name in columns if name in file.schema_arrow.names] if columns else None
            yield from file.iter_batches(batch_size=_ROWS, columns=known)
    except (pa.ArrowInvalid, OSError) as error:
        raise JoulelabError(f"{path} cannot be read: {error}", "restore it from a copy") from None


Array = NDArray[Any]
Chunks = dict[str, list[tuple[Array, Array]]]
"""Device -> chunks of (times in monotonic nanoseconds, values), in the order of the trace."""

READINGS = ("gpu", "samples", "rapl", "counters", "estimate", "host", "cores")
_RARE_COLUMNS = ["kind", "timestamp", "mono_ns", "device", REST]
_READING_COLUMNS = [
    *("kind", "mono_ns", "device", "power_watts", "energy_counter_j", "counter_mono_ns", "counter_read_s"),
    *("busy_thread_s", "sample_us", "sample_mw", "wall_us", "wall_us_mono_ns", "rapl", "counters_j", MISFIT),
]


@dataclass
class Readings:
    counters: Chunks = field(default_factory=dict)
    powers: Chunks = field(default_factory=dict)
    samples: Chunks = field(default_factory=dict)
    read_times: Chunks = field(default_factory=dict)
    stamps: list[int] = field(default_factory=list)
    """First and last stamp of each chunk of the trace."""
    misfit: bool = False
    """Some line has text in place of a number; then the lines must be read one by one."""


def read_rare_lines(path: Path) -> list[dict[str, Any]]:
    """Every line that is not a reading: headers, added devices, gaps, warnings, the end."""
    found = []
    for batch in read_batches(path, _RARE_COLUMNS):
        codes, kinds = _codes(batch.column("kind"))
        wanted = [number for number, kind in enumerate(kinds) if kind not in READINGS]
        for row in batch.take(np.flatnonzero(np.isin(codes, wanted))).to_pylist():
            rest = row.pop(REST)
            line = {name: value for name, value in row.items() if value is not None}
            found.append(line | (json.loads(rest) if rest else {}))
    return found


def read_readings(path: Path) -> Readings:
    found = Readings()
    for batch in read_batches(path, _READING_COLUMNS):
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        if columns[MISFIT].true_count:
            found.misfit = True
            return found
        _take(found, columns)
    return found


def _take(found: Readings, columns: dict[str, Any]) -> None:
    mono_ns, known = numbers_in(columns["mono_ns"])
    if (stamps := mono_ns[known & (mono_ns != 0)]).size:
        found.stamps += [int(stamps.min()), int(stamps.max())]
    kind_codes, kinds = _codes(columns["kind"])
    device_codes, devices = _codes(columns["device"])

    def is_kind(name: str) -> Any:
        return np.equal(kind_codes, kinds.index(name) if name in kinds else len(kinds))

    power_w, has_power = numbers_in(columns["power_watts"])
    counter_j, has_counter = numbers_in(columns["energy_counter_j"])
    counter_ns, has_stamp = numbers_in(columns["counter_mono_ns"])
    read_s = np.zeros(len(counter_j))
    if "counter_read_s" in columns:  # traces of the first release do not have it
        read_s = np.nan_to_num(numbers_in(columns["counter_read_s"])[0])
    busy_s, has_busy = numbers_in(columns["busy_thread_s"])
    gpu, estimate, samples = is_kind("gpu"), is_kind("estimate"), is_kind("samples")
    for number, device in enumerate(devices):
        mine = device_codes == number
        _add(found.powers, device, mono_ns, power_w, mine & gpu & has_power)
        counted = np.flatnonzero(mine & gpu & has_counter)
        if counted.size:
            stamps_ns = np.where(has_stamp[counted], counter_ns[counted], mono_ns[counted])
            found.counters.setdefault(device, []).append((stamps_ns, counter_j[counted]))
            found.read_times.setdefault(device, []).append((stamps_ns, read_s[counted]))
        _add(found.counters, device, mono_ns, busy_s, mine & estimate & has_busy)
        _take_samples(found, device, columns, np.flatnonzero(mine & samples))
    _take_map(found, columns["rapl"], np.flatnonzero(is_kind("rapl")), mono_ns, "rapl:")
    _take_map(found, columns["counters_j"], np.flatnonzero(is_kind("counters")), mono_ns, "")


def _codes(column: Any) -> tuple[Array, list[str]]:
    """A text column as indices into a list of its values; -1 for null."""
    encoded = column.dictionary_encode()
    codes, known = numbers_in(encoded.indices)
    return np.where(known, codes, -1), encoded.dictionary.to_pylist()


def _add(chunks: Chunks, device: str, times: Array, values: Array, chosen: Array) -> None:
    if chosen.any():
        chunks.setdefault(device, []).append((times[chosen], values[chosen]))


def _take_samples(found: Readings, device: str, columns: dict[str, Any], rows: Array) -> None:
    """Each line places its samples by a pair of wall and monotonic time."""
    if not len(rows):
        return
    wall_us, _ = numbers_in(columns["wall_us"])
    wall_ns, _ = numbers_in(columns["wall_us_mono_ns"])
    stamps, powers = columns["sample_us"].take(rows), columns["sample_mw"].take(rows)
    lengths, _ = numbers_in(stamps.value_lengths())
    begin_ns = np.repeat(wall_ns[rows] - wall_us[rows] * 1000, lengths)
    stamps_us, _ = numbers_in(stamps.flatten())
    powers_mw, _ = numbers_in(powers.flatten())
    found.samples.setdefault(device, []).append((begin_ns + stamps_us * 1000, powers_mw / 1000))


def _take_map(found: Readings, column: Any, rows: Array, mono_ns: Array, prefix: str) -> None:
    if not len(rows):
        return
    chosen = column.take(rows)
    offsets, _ = numbers_in(chosen.offsets)
    times = np.repeat(mono_ns[rows], np.diff(offsets))
    inside = slice(int(offsets[0]), int(offsets[-1]))
    codes, names = _codes(chosen.keys)
    values, _ = numbers_in(chosen.items)
    for number, name in enumerate(names):
        _add(found.counters, f"{prefix}{name}", times, values[inside], codes[inside] == number)
