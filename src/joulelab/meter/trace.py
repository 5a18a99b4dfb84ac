"""Append-only JSONL files that survive a kill: whole lines per `write()`, synced, and tolerant when read.

`read_lines` also reads the Parquet file that a closed trace becomes, so readers need not distinguish the two.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from joulelab import __version__, clock

SCHEMA_VERSION = 1


class LineFile:
    """Appends lines. One `write()` per batch survives SIGKILL of the process; `sync` survives the machine."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._torn = _ends_inside_a_line(self._fd)

    def append(self, *lines: dict[str, Any], sync: bool = False) -> None:
        """Raises OSError if the disk is full; a truncated line stays a line of its own, which readers skip."""
        data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        if self._torn:
            data = b"\n" + data
        # set before the write: if it fails halfway, the next append starts a new line
        while data:
            self._torn = True
            data = data[os.write(self._fd, data) :]
        self._torn = False
        if sync:
            self.sync()

    def sync(self) -> None:
        os.fsync(self._fd)

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
        from joulelab.meter.parquet import read_parquet_lines  # imports numpy, which a recorder rarely needs

        yield from read_parquet_lines(path)
        return
    with path.open("rb") as file:
        file.seek(offset)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            try:
                line = json.loads(raw)
            except ValueError:
                continue
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
