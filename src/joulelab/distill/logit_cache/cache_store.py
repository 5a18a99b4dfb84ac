"""Shard files of a logit cache: written by several resumable writers, memory-mapped and read by key.

A shard is a sequence of entries, then an index, then a footer. It is written under a temporary name, synced and
renamed, so a killed writer leaves complete shards only. Every entry has a CRC that is checked on every read: a flipped
byte on a disk raises an error instead of training the student on it.

An entry is P positions of F bytes and R records of S bytes; the manifest knows F and S. Before compression they are
transposed, so that all first bytes come first, then all second bytes: the high bytes of ids are nearly always small,
which makes sampled targets about a third smaller. Hidden states do not compress and are stored as they are.

A writer finds out which documents are missing, computes these and adds them. After a kill, only what was not yet in a
shard is computed again. Several writers each take a shard of the rows (`runs.sharding`) and write separate files, into
one folder or into several that are merged.

Batches are cut before it is known what is stored, and a batch that lacks one document is computed as a whole: the last
bits of a number depend on the other rows of its batch, and a cache made in shards or in two attempts must not differ.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
import zlib
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joulelab.data.chat.packing import PADDING, PackedRows
from joulelab.distill.logit_cache.codecs import CacheManifest, Layout, read_manifest, write_manifest
from joulelab.distill.logit_cache.kd_loss import CachedTargets, TeacherHead
from joulelab.distill.logit_cache.target_encoding import (
    KEY_BYTES,
    Bytes,
    EncodedTargets,
    document_spans,
    first_occurrences,
)
from joulelab.errors import ConfigError, JoulelabError
from joulelab.meter.sensors.cpu import usable_cores
from joulelab.runs.phases import ALL, Shard

SUFFIX = ".shard"
DAMAGED = ".damaged"
"""Appended to the name of a quarantined shard, which is then no longer read."""
HEAD = "head.safetensors"
INDEX_DTYPE = np.dtype(
    [
        ("key", f"S{KEY_BYTES}"),
        ("offset", "<u8"),
        ("size", "<u4"),
        ("positions", "<u4"),
        ("records", "<u4"),
        ("crc", "<u4"),
    ]
)
_FOOTER_DTYPE = np.dtype([("magic", "S8"), ("entries", "<u8"), ("index_offset", "<u8"), ("index_crc", "<u4")])
_MAGIC = b"JOULELOG"
_ZLIB_LEVEL = 6  # 5 to 10 microseconds per token of rs50, at about 40 bytes
_MAX_THREADS = 16
_REMAKE_HINT = "run it again (the same command, or `joulelab run --resume`): the cache is then rebuilt"


# one shard file


class CacheEntry(NamedTuple):
    """The targets of one document, ready to be written."""

    key: bytes
    packed: bytes
    positions: int
    records: int


def pack_entry(key: bytes, fixed_PF: Bytes, records_RS: Bytes, layout: Layout) -> CacheEntry:
    actual, expected = (fixed_PF.shape[1], records_RS.shape[1]), (layout.fixed_bytes, layout.record_bytes)
    if actual != expected:
        raise ConfigError(
            f"an entry has {actual} bytes per position and record; expected {expected} in this cache",
            "encode with the manifest's codec",
        )
    if layout.compressed:
        packed = zlib.compress(fixed_PF.T.tobytes() + records_RS.T.tobytes(), _ZLIB_LEVEL)
    else:
        packed = fixed_PF.tobytes() + records_RS.tobytes()
    return CacheEntry(key, packed, len(fixed_PF), len(records_RS))


@dataclass(frozen=True, eq=False)
class ShardFile:
    path: Path
    bytes: Bytes
    """The memory-mapped file."""
    index: NDArray[Any]


def write_shard(path: Path, entries: Sequence[CacheEntry]) -> None:
    index = np.zeros(len(entries), dtype=INDEX_DTYPE)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for row, entry in zip(index, entries, strict=True):
                row["key"], row["offset"], row["size"] = entry.key, file.tell(), len(entry.packed)
                row["positions"], row["records"], row["crc"] = entry.positions, entry.records, zlib.crc32(entry.packed)
                file.write(entry.packed)
            # Index and footer come last, as in Parquet: entries are streamed without knowing their
            # sizes, and a file without a valid footer was never finished.
            footer = np.array((_MAGIC, len(entries), file.tell(), zlib.crc32(index.tobytes())), dtype=_FOOTER_DTYPE)
            file.write(index.tobytes())
            file.write(footer.tobytes())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def shard_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith("."))


def open_shard(path: Path) -> ShardFile:
    """Reads the index only, however large the shard is."""
    if path.stat().st_size < _FOOTER_DTYPE.itemsize:
        raise _damage_error(path, "it is truncated")
    mapped: Bytes = np.memmap(path, dtype=np.uint8, mode="r")
    footer = mapped[-_FOOTER_DTYPE.itemsize :].view(_FOOTER_DTYPE)[0]
    start, entries = int(footer["index_offset"]), int(footer["entries"])
    if footer["magic"] != _MAGIC or start + entries * INDEX_DTYPE.itemsize + _FOOTER_DTYPE.itemsize != len(mapped):
        raise _damage_error(path, "its footer is not that of a shard")
    index = mapped[start : len(mapped) - _FOOTER_DTYPE.itemsize]
    if zlib.crc32(index.tobytes()) != footer["index_crc"]:
        raise _damage_error(path, "the checksum of its index does not match")
    return ShardFile(path, np.asarray(mapped), np.frombuffer(index.tobytes(), dtype=INDEX_DTYPE))


def read_entry(shard: ShardFile, row: Any, layout: Layout) -> tuple[Bytes, Bytes]:
    """(fixed, records) of one entry; its CRC is checked."""
    start = int(row["offset"])
    packed = shard.bytes[start : start + int(row["size"])]
    if zlib.crc32(packed.data) != row["crc"]:
        raise _damage_error(shard.path, _checksum_mismatch(row), quarantine(shard.path))
    positions, records = int(row["positions"]), int(row["records"])
    middle = positions * layout.fixed_bytes
    if not layout.compressed:
        return packed[:middle].reshape(positions, -1), packed[middle:].reshape(records, layout.record_bytes)
    # Byte planes (as the shuffle filter of Blosc and HDF5): bytes of equal significance are
    # adjacent, and the nearly constant high bytes of ids compress to almost nothing.
    raw = np.frombuffer(zlib.decompress(packed.data), dtype=np.uint8)
    return raw[:middle].reshape(-1, positions).T, raw[middle:].reshape(layout.record_bytes, records).T


def verify_shard(path: Path) -> None:
    """Check every byte of a shard."""
    shard = open_shard(path)
    for row in shard.index:
        start = int(row["offset"])
        if zlib.crc32(shard.bytes[start : start + int(row["size"])].data) != row["crc"]:
            raise _damage_error(path, _checksum_mismatch(row))


def quarantine_damaged(folder: Path) -> list[str]:
    """Check every byte of every shard, before other work builds on them; messages about those quarantined."""
    messages = []
    for path in shard_files(folder):
        try:
            verify_shard(path)
        except JoulelabError as error:
            if not quarantine(path):
                raise
            messages.append(error.message)
    return messages


def quarantine(path: Path) -> bool:
    """Rename a damaged shard, so that the next reader sees that it is missing. False on a read-only disk."""
    try:
        path.replace(path.with_name(path.name + DAMAGED))
    except FileNotFoundError:  # another rank or another run has renamed it
        return True
    except OSError:
        return False
    return True


def _checksum_mismatch(row: Any) -> str:
    return f"the checksum of entry {row['key'].hex()} does not match"


def _damage_error(path: Path, reason: str, quarantined: bool | None = None) -> JoulelabError:
    """`quarantined`: whether the shard could be renamed; None: this was not tried."""
    renamed = f"; it was renamed to {path.name}{DAMAGED}" if quarantined else ""
    hint = _REMAKE_HINT if quarantined is not False else "set reuse_artifacts=false to rebuild the cache"
    return JoulelabError(f"{path} is corrupted: {reason}{renamed}", hint)


# what a writer still has to compute


@dataclass(frozen=True, eq=False)
class PendingRows:
    batches: Sequence[NDArray[np.int64]]
    """Row numbers of each batch."""
    elsewhere: frozenset[bytes]
    """Keys that other shards store or will store: a document in two batches belongs to the first of them."""
    samples: int
    """Rows that an earlier attempt has computed, and their tokens."""
    tokens: int


def pending_rows(
    folder: Path, rows: PackedRows, batch_size: int, shard: Shard = ALL, others: Iterable[Path] = ()
) -> PendingRows:
    """The batches of this shard that neither `folder` nor the caches in `others` hold completely."""
    stored, elsewhere = stored_keys([folder]), stored_keys(others)
    keys = {number: found for number in range(len(rows)) if (found := row_document_keys(rows, number))}
    numbers = list(keys)
    batches = [numbers[start : start + batch_size] for start in range(0, len(numbers), batch_size)]
    # A batch is named by its first document's key: the name does not depend on the number of shards
    # or on what is stored.
    own = shard.units([keys[batch[0]][0].hex() for batch in batches])
    elsewhere |= _keys_of_other_shards(batches, keys, set(own))
    pending, done = [], []
    for batch in (batches[index] for index in own):
        batch_keys = [key for number in batch for key in keys[number]]
        if any(key not in stored and key not in elsewhere for key in batch_keys):
            pending.append(np.array(batch, dtype=np.int64))
        elif any(key in stored for key in batch_keys):
            done += batch
    tokens = sum(int(np.count_nonzero(rows.row(number).document != PADDING)) for number in done)
    return PendingRows(pending, frozenset(elsewhere), len(done), tokens)


def row_document_keys(rows: PackedRows, number: int) -> list[bytes]:
    """Keys of the documents in a row that have targets."""
    row = rows.row(number)
    return [span.key for span in document_spans(row.ids[None], row.trained[None], row.document[None])]


def stored_keys(folders: Iterable[Path]) -> set[bytes]:
    shards = (open_shard(path) for folder in folders for path in shard_files(folder))
    # numpy strips trailing zero bytes
    return {key.ljust(KEY_BYTES, b"\0") for shard in shards for key in shard.index["key"].tolist()}


def _keys_of_other_shards(batches: Sequence[Sequence[int]], keys: dict[int, list[bytes]], own: set[int]) -> set[bytes]:
    owner: dict[bytes, int] = {}
    for index, batch in enumerate(batches):
        for number in batch:
            for key in keys[number]:
                owner.setdefault(key, index)
    return {key for key, index in owner.items() if index not in own}


# writing


@dataclass(frozen=True)
class FlushPolicy:
    """When a shard is closed: bounds the work lost by a kill, without many small files."""

    bytes: int = 64 * 2**20
    seconds: float = 60.0


DEFAULT_FLUSH = FlushPolicy()


class CacheWriter:
    """A context manager; everything added is on disk when it exits, also after an exception."""

    def __init__(
        self,
        folder: Path,
        manifest: CacheManifest,
        shard: Shard = ALL,
        flush_policy: FlushPolicy = DEFAULT_FLUSH,
        elsewhere: Set[bytes] = frozenset(),
    ) -> None:
        """`elsewhere`: keys that another writer stores."""
        folder.mkdir(parents=True, exist_ok=True)
        write_manifest(folder, manifest)
        self.folder, self.manifest, self._shard, self._flush_policy = folder, manifest, shard, flush_policy
        self._stored = stored_keys([folder]) | elsewhere
        # zlib releases the GIL; a small teacher on a GPU produces more per second than a few threads can compress
        self._pool = ThreadPoolExecutor(min(_MAX_THREADS, usable_cores()), thread_name_prefix="joulelab-cache")
        self._waiting: list[Future[CacheEntry]] = []
        self._waiting_bytes = 0
        self._written_s = time.monotonic()

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
        self._pool.shutdown()

    def missing(self, keys: Sequence[bytes]) -> list[int]:
        """Indices of the keys that are not stored yet; the first of equal ones."""
        return [index for index in first_occurrences(keys) if keys[index] not in self._stored]

    def add(self, keys: Sequence[bytes], targets: EncodedTargets) -> None:
        """Store the documents whose keys are new."""
        encoded, layout = list(targets.per_document()), self.manifest.layout
        for index in self.missing(keys):
            self._stored.add(keys[index])
            self._waiting.append(self._pool.submit(pack_entry, keys[index], *encoded[index], layout))
            self._waiting_bytes += sum(part.size for part in encoded[index])
        policy = self._flush_policy
        if self._waiting_bytes >= policy.bytes or time.monotonic() - self._written_s >= policy.seconds:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            # unique: never the name of another writer, or of an earlier attempt of this one
            shard, suffix = self._shard, f"{time.time_ns():x}-{secrets.token_hex(4)}{SUFFIX}"
            name = f"{shard.number:04d}-of-{shard.of:04d}-{suffix}"
            write_shard(self.folder / name, [entry.result() for entry in self._waiting])
        self._waiting, self._waiting_bytes, self._written_s = [], 0, time.monotonic()


def save_head(folder: Path, weight_VE: Tensor) -> None:
    """The teacher's projection to the vocabulary, which turns stored hidden states into distributions."""
    if (folder / HEAD).exists():
        return
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{HEAD}.{secrets.token_hex(4)}.tmp"
    save_file({"weight": weight_VE.detach().cpu().contiguous()}, temporary)
    temporary.replace(folder / HEAD)


def merge_caches(sources: Sequence[Path], target: Path) -> None:
    """Put the shards of several writers into one folder, as hard links if the file system allows it."""
    target.mkdir(parents=True, exist_ok=True)
    for source in sources:
        write_manifest(target, read_manifest(source))
        for path in [*shard_files(source), *source.glob(HEAD)]:
            _link(path, target / path.name)


def _link(source: Path, target: Path) -> None:
    with suppress(FileExistsError):
        try:
            os.link(source, target)
        except FileExistsError:
            raise
        except OSError:  # another file system
            shutil.copyfile(source, target)


# reading


class LogitCache:
    """A cache as training reads it: memory-mapped, looked up by key."""

    def __init__(self, folder: Path, manifest: CacheManifest, shards: Sequence[ShardFile]) -> None:
        self.folder, self.manifest, self._shards = folder, manifest, shards
        index = np.concatenate([shard.index for shard in shards])
        owner = np.repeat(np.arange(len(shards)), [len(shard.index) for shard in shards])
        order = np.argsort(index["key"], kind="stable")
        self._index, self._owner = index[order], owner[order]
        self._head: TeacherHead | None = None

    @classmethod
    def open(cls, folder: Path) -> LogitCache:
        """Reads the indices only; entries are read on access."""
        manifest = read_manifest(folder)
        paths = shard_files(folder)
        if not paths:
            raise JoulelabError(f"the cache {folder} is empty", "run it again: the teacher computes it again")
        return cls(folder, manifest, [open_shard(path) for path in paths])

    def __len__(self) -> int:
        """Number of entries; a document that was written twice counts twice."""
        return len(self._index)

    @property
    def positions(self) -> int:
        return int(self._index["positions"].sum())

    @property
    def size_bytes(self) -> int:
        return sum(len(shard.bytes) for shard in self._shards)

    @property
    def bytes_per_token(self) -> float:
        """Per trained token, index included; a stored head is not counted."""
        return self.size_bytes / self.positions

    def targets(self, keys: Sequence[bytes], device: torch.device | None = None) -> CachedTargets:
        """The positions of these documents, one document after another."""
        places = self._find(keys)
        if (places < 0).any():
            raise JoulelabError(
                f"{(places < 0).sum()} of {len(keys)} documents of the batch are not in the cache {self.folder}: the "
                "tokens, or the trained mask, differ from those the teacher was given",
                "make the cache from the same documents with the same tokenizer and masks; "
                "with several writers, wait for all of them",
            )
        layout = self.manifest.layout
        entries = [
            read_entry(self._shards[self._owner[place]], self._index[place], layout) for place in places.tolist()
        ]
        fixed_NF = _concatenate([fixed for fixed, _ in entries], layout.fixed_bytes)
        records_RS = _concatenate([records for _, records in entries], layout.record_bytes)
        targets = CachedTargets(fixed_NF, records_RS, self.manifest, self.head())
        return targets if device is None else targets.to(device)

    def head(self) -> TeacherHead | None:
        """The teacher's projection to the vocabulary, if the cache holds hidden states."""
        if self._head is None and self.manifest.codec_spec.is_exact:
            from safetensors.torch import load_file

            if not (self.folder / HEAD).is_file():
                raise JoulelabError(f"{self.folder / HEAD} is missing", "rebuild the cache")
            weights = load_file(self.folder / HEAD)
            self._head = TeacherHead(weights["weight"], weights.get("bias"))
        return self._head

    def _find(self, keys: Sequence[bytes]) -> NDArray[np.int64]:
        """Position of each key in the index; -1 if it is not there."""
        wanted: NDArray[Any] = np.array(list(keys), dtype=self._index["key"].dtype)
        places = np.searchsorted(self._index["key"], wanted).clip(max=len(self._index) - 1)
        return np.where(self._index["key"][places] == wanted, places, -1)


def _concatenate(parts: Sequence[Bytes], width: int) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty((0, width), dtype=np.uint8), *parts]))
