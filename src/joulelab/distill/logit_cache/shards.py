"""Files of a cache: entries one after another, then an index, then a footer; whole or not there at all.

A shard is written under another name, synced and renamed, so a killed writer leaves whole shards and nothing else.
Every entry has a CRC that is looked at whenever it is read: a flipped byte on a disk is an error, not a lesson.

An entry is P positions of F bytes and R records of S bytes; the manifest knows F and S. Before zlib sees them they are
turned, so that all first bytes stand together, then all second bytes: ids' high bytes are nearly always small, and
draws take a good third less room. Hidden states are noise to zlib and are left as they are.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from joulelab.distill.logit_cache.keys import KEY_BYTES
from joulelab.errors import ConfigError, JoulelabError

SUFFIX = ".shard"
Bytes = NDArray[np.uint8]
INDEX = np.dtype(
    [
        ("key", f"S{KEY_BYTES}"),
        ("offset", "<u8"),
        ("size", "<u4"),
        ("positions", "<u4"),
        ("records", "<u4"),
        ("crc", "<u4"),
    ]
)
_FOOTER = np.dtype([("magic", "S8"), ("entries", "<u8"), ("index_offset", "<u8"), ("index_crc", "<u4")])
_MAGIC = b"JOULELOG"
_LEVEL = 6  # of zlib: 5 to 10 microseconds a token of rs50, at some 40 bytes
DAMAGED = ".damaged"
"""Behind the name of a shard that was set aside: nobody takes it for one any more."""
_MAKE_AGAIN = "run it again (the same command, or `joulelab run --resume`): the cache is then made anew"


class Layout(NamedTuple):
    """How entries of a cache lie in its files."""

    fixed_bytes: int
    record_bytes: int
    squeezed: bool


class Entry(NamedTuple):
    """What is kept for one key, ready for the disk."""

    key: bytes
    packed: bytes
    positions: int
    records: int


def pack_entry(key: bytes, fixed_PF: Bytes, records_RS: Bytes, layout: Layout) -> Entry:
    found, expected = (fixed_PF.shape[1], records_RS.shape[1]), (layout.fixed_bytes, layout.record_bytes)
    if found != expected:
        raise ConfigError(
            f"an entry has {found} bytes a position and a record; this cache has {expected}",
            "encode with the manifest's codec",
        )
    if layout.squeezed:
        packed = zlib.compress(fixed_PF.T.tobytes() + records_RS.T.tobytes(), _LEVEL)
    else:
        packed = fixed_PF.tobytes() + records_RS.tobytes()
    return Entry(key, packed, len(fixed_PF), len(records_RS))


@dataclass(frozen=True, eq=False)
class Shard:
    path: Path
    bytes: Bytes
    """A view of the file."""
    index: NDArray[Any]


def write_shard(path: Path, entries: Sequence[Entry]) -> None:
    index = np.zeros(len(entries), dtype=INDEX)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for row, entry in zip(index, entries, strict=True):
                row["key"], row["offset"], row["size"] = entry.key, file.tell(), len(entry.packed)
                row["positions"], row["records"], row["crc"] = entry.positions, entry.records, zlib.crc32(entry.packed)
                file.write(entry.packed)
            footer = np.array((_MAGIC, len(entries), file.tell(), zlib.crc32(index.tobytes())), dtype=_FOOTER)
            file.write(index.tobytes())
            file.write(footer.tobytes())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def shard_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith("."))


def open_shard(path: Path) -> Shard:
    """Opening reads the index alone, however large the shard is."""
    if path.stat().st_size < _FOOTER.itemsize:
        raise _damaged(path, "it is cut off")
    mapped: Bytes = np.memmap(path, dtype=np.uint8, mode="r")
    footer = mapped[-_FOOTER.itemsize :].view(_FOOTER)[0]
    start, entries = int(footer["index_offset"]), int(footer["entries"])
    if footer["magic"] != _MAGIC or start + entries * INDEX.itemsize + _FOOTER.itemsize != len(mapped):
        raise _damaged(path, "its last bytes are not those of a shard")
    index = mapped[start : len(mapped) - _FOOTER.itemsize]
    if zlib.crc32(index.tobytes()) != footer["index_crc"]:
        raise _damaged(path, "its index is not the one that was written")
    return Shard(path, np.asarray(mapped), np.frombuffer(index.tobytes(), dtype=INDEX))


def read_entry(shard: Shard, row: Any, layout: Layout) -> tuple[Bytes, Bytes]:
    """(fixed, records) of one entry, after a look at its CRC."""
    start = int(row["offset"])
    packed = shard.bytes[start : start + int(row["size"])]
    if zlib.crc32(packed.data) != row["crc"]:
        raise _damaged(
            shard.path, f"the entry {row['key'].hex()} is not the one that was written", set_aside(shard.path)
        )
    positions, records = int(row["positions"]), int(row["records"])
    middle = positions * layout.fixed_bytes
    if not layout.squeezed:
        return packed[:middle].reshape(positions, -1), packed[middle:].reshape(records, layout.record_bytes)
    raw = np.frombuffer(zlib.decompress(packed.data), dtype=np.uint8)
    return raw[:middle].reshape(-1, positions).T, raw[middle:].reshape(layout.record_bytes, records).T


def verify_shard(path: Path) -> None:
    """Read every byte of it."""
    shard = open_shard(path)
    for row in shard.index:
        start = int(row["offset"])
        if zlib.crc32(shard.bytes[start : start + int(row["size"])].data) != row["crc"]:
            raise _damaged(path, f"the entry {row['key'].hex()} is not the one that was written")


def set_damaged_aside(folder: Path) -> list[str]:
    """Read every byte of every shard, before others build on them; what is damaged is told and no longer there."""
    told = []
    for path in shard_files(folder):
        try:
            verify_shard(path)
        except JoulelabError as error:
            if not set_aside(path):
                raise
            told.append(error.message)
    return told


def set_aside(path: Path) -> bool:
    """Whoever looks for the cache next sees that a file is lacking. False where the disk lets nobody write."""
    try:
        path.replace(path.with_name(path.name + DAMAGED))
    except FileNotFoundError:  # another rank or another run has seen it too
        return True
    except OSError:
        return False
    return True


def _damaged(path: Path, how: str, is_aside: bool | None = None) -> JoulelabError:
    """`is_aside`: whether it could be set aside, where that was tried."""
    told = f"; it was set aside as {path.name}{DAMAGED}" if is_aside else ""
    hint = _MAKE_AGAIN if is_aside is not False else "set reuse_artifacts=false, and the cache is made anew"
    return JoulelabError(f"{path} is damaged: {how}{told}", hint)
