"""What the measured program writes: stage marks, at once and durable, and phase marks in a memory-mapped ring.

A phase mark is two clock readings and 32 bytes copied into a mapped file: no system call, no lock, no allocation that
lasts. The pages belong to the kernel, so what was written survives SIGKILL of the program. The recorder drains the ring
and keeps phases as aggregates: a week of steps is a few kilobytes. If it falls behind by a whole ring, marks are lost
and counted. Durations fall into logarithmic bins, 20 to a decade. A quantile is the mean duration in its bin: right to
about 6 %, and exact where all durations are equal.

Between two marks a training step uses more memory than the caches hold, so a mark costs what it has to fetch again,
several times its cost in a tight loop. Hence slots, few lookups, one place to write to (a record carries its own
number, there is no counter elsewhere), and pages that exist before the first mark.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import struct
import tempfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

from joulelab.clock import NS

MAGIC = b"JLRING2\0"
CAPACITY = 1 << 16
_HEADER = struct.Struct("<8sQ")  # magic, capacity
_HEADER_BYTES = 64
# Begin ns, end ns, phase number, stage number, the record's own number from 1 on. In native byte order, so that
# each field is one store, and the number last: a record is complete when its number is the expected one.
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
                file.write(bytes(size))  # allocates disk space: a page fault without space would kill the program later
                file.flush()
            except OSError:
                remove_ring(path)  # the record of the failure needs the space
                raise
            self._map = mmap.mmap(file.fileno(), size)
        for place in range(0, size, mmap.PAGESIZE):
            self._map[place] = 0  # the first page fault happens now and not in a step
        self._capacity = capacity
        self._written = 0
        self.stage = 0
        _HEADER.pack_into(self._map, 0, MAGIC, capacity)

    def write(self, phase: int, begin_ns: int, end_ns: int) -> None:
        place = _HEADER_BYTES + self._written % self._capacity * _RECORD_BYTES
        # The number is the commit: the recorder takes a record for complete only when its last
        # field is the expected number. On x86 stores become visible in program order, and pack_into
        # writes the fields in order.
        self._written = number = self._written + 1
        _pack_record(self._map, place, begin_ns, end_ns, phase, self.stage, number)

    def detach(self) -> None:
        """In a forked child: write to private memory, since the ring has a single writer, the parent."""
        self._map = mmap.mmap(-1, len(self._map))

    def close(self) -> None:
        self._map.close()


# mmap(2): file systems without shared mappings (FUSE with direct_io, some cluster file systems) refuse with these.
_NO_SHARED_MAPPING = (errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


def create_ring(path: Path) -> RingWriter:
    """A ring at `path`; where its file system cannot share mapped files, one in the temporary directory of this machine
    with a link to it at `path`."""
    try:
        return RingWriter(path)
    except OSError as error:
        if error.errno not in _NO_SHARED_MAPPING:
            raise
    path.unlink()
    descriptor, local = tempfile.mkstemp(prefix="joulelab-", suffix=".ring")
    os.close(descriptor)
    path.symlink_to(local)
    return RingWriter(path)


def remove_ring(path: Path) -> None:
    local = path.resolve()
    path.unlink(missing_ok=True)
    local.unlink(missing_ok=True)


class RingReader:
    """Reads what was added since the last call; `lost` counts marks that were overwritten unread."""

    def __init__(self, path: Path, already_read: int = 0) -> None:
        self._path = path
        self._map: mmap.mmap | bytes | None = None
        self._capacity = 0
        self.read = already_read
        self.lost = 0

    def drain(self) -> Iterator[PhaseMark]:
        ring = self._open()
        if ring is None:
            return
        newest = self._newest(ring)
        # A writer that has lapped the reader has overwritten the oldest unread records; they are
        # counted, and the quantiles of a phase stay right as long as losses do not depend on
        # duration.
        oldest = max(self.read, newest - self._capacity)
        self.lost += oldest - self.read
        first, last = oldest % self._capacity, (oldest % self._capacity) + newest - oldest
        # a fast loop writes thousands of marks a second: they are unpacked in one block, or in two where the ring wraps
        for start, stop in ((first, min(last, self._capacity)), (0, max(0, last - self._capacity))):
            block = ring[_HEADER_BYTES + start * _RECORD_BYTES : _HEADER_BYTES + stop * _RECORD_BYTES]
            yield from map(PhaseMark._make, _RECORD.iter_unpack(block))
        self.read = newest

    def _newest(self, ring: mmap.mmap | bytes) -> int:
        """The last record's number: from the reader's position numbers increase by one up to the writer's."""
        first = self._number_at(ring, self.read)
        if first <= self.read:  # of the previous round, or never written
            return self.read
        places = range(self._capacity)
        # Numbers increase by one from the reader's position to the newest record and then fall by
        # one ring: a rotated sorted array, so its end is found by bisection in 16 steps instead of
        # a scan over 65,536 records.
        ahead = bisect_left(places, True, key=lambda k: self._number_at(ring, self.read + k) != first + k)
        return first + ahead - 1

    def _number_at(self, ring: mmap.mmap | bytes, place: int) -> int:
        number: int = _RECORD.unpack_from(ring, _HEADER_BYTES + place % self._capacity * _RECORD_BYTES)[-1]
        return number

    def _open(self) -> mmap.mmap | bytes | None:
        if self._map is None and self._path.exists() and self._path.stat().st_size > _HEADER_BYTES:
            with self._path.open("rb") as file:
                try:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                except OSError:  # copied to a file system without shared mappings; its writer has ended
                    self._map = file.read()
            magic, self._capacity = _HEADER.unpack_from(self._map, 0)
            if magic != MAGIC:
                self._map = None
        return self._map


class Phase:
    """`with phase:` around part of a step. Reusable, nestable with other phases; not re-entrant."""

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
        """No effect if the phase is not open: entering it sets the begin again."""
        self._begin_ns += max(0, end_ns - max(begin_ns, self._begin_ns))


BINS_PER_DECADE = 20
Key = tuple[int, int]  # stage number, phase number


@dataclass
class PhaseAggregate:
    count: int = 0
    sum_s: float = 0.0
    max_s: float = 0.0
    bins: dict[int, int] = field(default_factory=dict)
    bin_sums_s: dict[int, float] = field(default_factory=dict)
    """Sum of the durations in a bin; lines of the first release lack it, and the middle of the bin is used instead."""

    def add(self, duration_s: float) -> None:
        self.count += 1
        self.sum_s += duration_s
        self.max_s = max(self.max_s, duration_s)
        # Bins of equal ratio: 20 per decade are 12 % wide, whether a phase takes 3 us or 3 s, and 9
        # decades fit in 180 counters. Each bin also keeps its sum, so a quantile is the mean of its
        # bin and not the bin's middle.
        number = math.floor(math.log10(max(duration_s, 1e-9)) * BINS_PER_DECADE)
        self.bins[number] = self.bins.get(number, 0) + 1
        self.bin_sums_s[number] = self.bin_sums_s.get(number, 0.0) + duration_s

    def merge(self, other: PhaseAggregate) -> None:
        self.count += other.count
        self.sum_s += other.sum_s
        self.max_s = max(self.max_s, other.max_s)
        for number, count in other.bins.items():
            self.bins[number] = self.bins.get(number, 0) + count
            sum_s = other.bin_sums_s.get(number, count * 10 ** ((number + 0.5) / BINS_PER_DECADE))
            self.bin_sums_s[number] = self.bin_sums_s.get(number, 0.0) + sum_s

    def quantile_s(self, share: float) -> float:
        wanted, seen = share * self.count, 0
        for number in sorted(self.bins):
            seen += self.bins[number]
            if seen >= wanted:
                return min(self.max_s, self.bin_sums_s[number] / self.bins[number])
        return self.max_s


class PhaseBook:
    """Aggregates by stage and phase, as the recorder keeps them and as a reader of the events merges them."""

    def __init__(self) -> None:
        self.rows: dict[Key, PhaseAggregate] = {}

    def add_marks(self, marks: Iterable[PhaseMark]) -> None:
        for begin_ns, end_ns, phase, stage, _ in marks:
            row = self.rows.get((stage, phase))
            if row is None:
                row = self.rows[stage, phase] = PhaseAggregate()
            row.add((end_ns - begin_ns) / NS)

    def add_line(self, line: dict[str, Any]) -> None:
        for entry in line["rows"]:
            bins = {int(number): count for number, count in entry["bins"].items()}
            sums_s = {int(number): sum_s for number, sum_s in entry.get("bin_sums_s", {}).items()}
            aggregate = PhaseAggregate(entry["count"], entry["sum_s"], entry["max_s"], bins, sums_s)
            self.rows.setdefault((entry["stage"], entry["phase"]), PhaseAggregate()).merge(aggregate)

    def to_line(self, marks_read: int, marks_lost: int) -> dict[str, Any]:
        """`marks_read` is the position in the ring to resume from if the recorder is killed after this line."""
        rows = [
            {
                "stage": stage,
                "phase": phase,
                "count": row.count,
                "sum_s": round(row.sum_s, 9),
                "max_s": round(row.max_s, 9),
                "bins": {str(number): count for number, count in sorted(row.bins.items())},
                "bin_sums_s": {str(number): round(sum_s, 9) for number, sum_s in sorted(row.bin_sums_s.items())},
            }
            for (stage, phase), row in sorted(self.rows.items())
        ]
        return {"kind": "phases", "marks_read": marks_read, "marks_lost": marks_lost, "rows": rows}
