"""What the measured program leaves behind: stage marks at once and durable, phase marks in a memory-mapped ring.

A phase mark is two clock readings and 24 bytes copied into a mapped file: no system call, no lock, no allocation that
lasts. The pages belong to the kernel, so what was written survives SIGKILL of the program; the recorder drains the ring
and keeps phases as aggregates. A recorder that falls behind by a whole ring loses marks and says how many.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = b"JLRING1\0"
CAPACITY = 1 << 16
_HEADER = struct.Struct("<8sQQ")  # magic, capacity, records written so far
_COUNT = struct.Struct("<Q")
_COUNT_OFFSET = 16
_HEADER_BYTES = 64
_RECORD = struct.Struct("<qqII")  # begin ns, end ns, phase number, stage number


class PhaseMark(NamedTuple):
    begin_ns: int
    end_ns: int
    phase: int
    stage: int


class RingWriter:
    """The program's side: a single writer. `stage` is the number of the stage that is running now."""

    def __init__(self, path: Path, capacity: int = CAPACITY) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        size = _HEADER_BYTES + capacity * _RECORD.size
        with path.open("w+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._capacity = capacity
        self._written = 0
        self.stage = 0
        _HEADER.pack_into(self._map, 0, MAGIC, capacity, 0)

    def write(self, phase: int, begin_ns: int, end_ns: int) -> None:
        slot = self._written % self._capacity
        _RECORD.pack_into(self._map, _HEADER_BYTES + slot * _RECORD.size, begin_ns, end_ns, phase, self.stage)
        # the count moves after the record is in place, so a reader never sees a half-written one
        self._written += 1
        _COUNT.pack_into(self._map, _COUNT_OFFSET, self._written)

    def close(self) -> None:
        self._map.close()


class RingReader:
    """Reads what was added since the last call; `lost` counts marks that were overwritten unread."""

    def __init__(self, path: Path, already_read: int = 0) -> None:
        self._path = path
        self._map: mmap.mmap | None = None
        self._capacity = 0
        self.read = already_read
        self.lost = 0

    def drain(self) -> Iterator[PhaseMark]:
        ring = self._open()
        if ring is None:
            return
        (written,) = _COUNT.unpack_from(ring, _COUNT_OFFSET)
        oldest = max(self.read, written - self._capacity)
        self.lost += oldest - self.read
        first, last = oldest % self._capacity, (oldest % self._capacity) + written - oldest
        # a fast loop leaves thousands of marks a second: they are unpacked in one piece, or two where the ring turns
        for start, stop in ((first, min(last, self._capacity)), (0, max(0, last - self._capacity))):
            piece = ring[_HEADER_BYTES + start * _RECORD.size : _HEADER_BYTES + stop * _RECORD.size]
            yield from map(PhaseMark._make, _RECORD.iter_unpack(piece))
        self.read = written

    def _open(self) -> mmap.mmap | None:
        if self._map is None and self._path.exists() and self._path.stat().st_size > _HEADER_BYTES:
            with self._path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            magic, self._capacity, _ = _HEADER.unpack_from(self._map, 0)
            if magic != MAGIC:
                self._map = None
        return self._map


class Phase:
    """`with phase:` around a piece of work. Reusable and nestable with others; not re-entrant with itself."""

    __slots__ = ("_begin_ns", "_ring", "number")

    def __init__(self, ring: RingWriter, number: int) -> None:
        self._ring = ring
        self.number = number
        self._begin_ns = 0

    def __enter__(self) -> None:
        self._begin_ns = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        self._ring.write(self.number, self._begin_ns, time.monotonic_ns())
