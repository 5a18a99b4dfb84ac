"""What the measured program leaves behind: stage marks at once and durable, phase marks in a memory-mapped ring.

A phase mark is two clock readings and 32 bytes copied into a mapped file: no system call, no lock, no allocation that
lasts. The pages belong to the kernel, so what was written survives SIGKILL of the program; the recorder drains the ring
and keeps phases as aggregates. A recorder that falls behind by a whole ring loses marks and says how many.

Between two marks a training step goes through more memory than the caches hold, so a mark costs what it has to fetch
again, several times its cost in a tight loop. Hence slots, few lookups, one place written to (a record carries its own
number, and no counter stands elsewhere), and pages that are there before the first mark.
"""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from time import monotonic_ns
from typing import NamedTuple

MAGIC = b"JLRING2\0"
CAPACITY = 1 << 16
_HEADER = struct.Struct("<8sQ")  # magic, capacity
_HEADER_BYTES = 64
# Begin ns, end ns, phase number, stage number, the record's own number from 1 on. In the machine's own order, so that
# each field is stored at once, and the number last: a record is whole when its number is the one expected there.
_RECORD = struct.Struct("qqIIQ")
_RECORD_BYTES = _RECORD.size
_pack_record = _RECORD.pack_into


class PhaseMark(NamedTuple):
    begin_ns: int
    end_ns: int
    phase: int
    stage: int
    number: int


class RingWriter:
    """The program's side: a single writer. `stage` is the number of the stage that is running now."""

    __slots__ = ("_capacity", "_map", "_written", "stage")

    def __init__(self, path: Path, capacity: int = CAPACITY) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        size = _HEADER_BYTES + capacity * _RECORD_BYTES
        with path.open("w+b") as file:
            try:
                file.write(bytes(size))  # takes room on the disk: a page that found none later would end the program
                file.flush()
            except OSError:
                path.unlink()  # the record of the failure needs the room
                raise
            self._map = mmap.mmap(file.fileno(), size)
        for place in range(0, size, mmap.PAGESIZE):
            self._map[place] = 0  # the page's first fault, now and not in a step
        self._capacity = capacity
        self._written = 0
        self.stage = 0
        _HEADER.pack_into(self._map, 0, MAGIC, capacity)

    def write(self, phase: int, begin_ns: int, end_ns: int) -> None:
        place = _HEADER_BYTES + self._written % self._capacity * _RECORD_BYTES
        self._written = number = self._written + 1
        _pack_record(self._map, place, begin_ns, end_ns, phase, self.stage, number)

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
        newest = self._newest(ring)
        oldest = max(self.read, newest - self._capacity)
        self.lost += oldest - self.read
        first, last = oldest % self._capacity, (oldest % self._capacity) + newest - oldest
        # a fast loop leaves thousands of marks a second: they are unpacked in one piece, or two where the ring turns
        for start, stop in ((first, min(last, self._capacity)), (0, max(0, last - self._capacity))):
            piece = ring[_HEADER_BYTES + start * _RECORD_BYTES : _HEADER_BYTES + stop * _RECORD_BYTES]
            yield from map(PhaseMark._make, _RECORD.iter_unpack(piece))
        self.read = newest

    def _newest(self, ring: mmap.mmap) -> int:
        """The last record's number: from the reader's place on numbers rise by one, up to where the writer stands."""
        first = self._number_at(ring, self.read)
        if first <= self.read:  # of the lap before, or never written
            return self.read
        places = range(self._capacity)
        ahead = bisect_left(places, True, key=lambda k: self._number_at(ring, self.read + k) != first + k)
        return first + ahead - 1

    def _number_at(self, ring: mmap.mmap, place: int) -> int:
        number: int = _RECORD.unpack_from(ring, _HEADER_BYTES + place % self._capacity * _RECORD_BYTES)[-1]
        return number

    def _open(self) -> mmap.mmap | None:
        if self._map is None and self._path.exists() and self._path.stat().st_size > _HEADER_BYTES:
            with self._path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            magic, self._capacity = _HEADER.unpack_from(self._map, 0)
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
        self._begin_ns = monotonic_ns()

    def __exit__(self, *_: object) -> None:
        self._ring.write(self.number, self._begin_ns, monotonic_ns())

    def exclude(self, begin_ns: int, end_ns: int) -> None:
        """Harmless where the phase is not open: its next entry sets the begin anew."""
        self._begin_ns += max(0, end_ns - max(begin_ns, self._begin_ns))
