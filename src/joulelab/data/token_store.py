"""The store for tokenized data on disk: ragged rows in flat columns, read through a memory map.

A store is a folder:

    manifest.json       format, rows, items, columns, attributes, attachments, and the sha256 of every other file
    offsets.npy         int64, rows + 1: row i has the items offsets[i] to offsets[i + 1]
    tokens.bin, ...     one file per column, with a value per item (token ids, loss mask) or per row (labels)
    questions.json, ... attachments: data that only some readers need

Opening is quick however large a store is, because only sizes and offsets are checked; `verify` reads every byte. All
processes share one copy in the page cache. There is no pickle, so a store from elsewhere cannot run code. Equal rows
give equal bytes, little-endian on every machine. A store is written under a temporary name and renamed when it is
complete: a failed write leaves the previous store.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joulelab.errors import ConfigError, JoulelabError, NotFoundError
from joulelab.runs.artifacts import error_text
from joulelab.runs.paths import read_json, write_json

FORMAT = "joulelab-store-1"
MANIFEST, OFFSETS, TOKENS = "manifest.json", "offsets.npy", "tokens.bin"
SPECIAL_NAMES = ("pad", "mask", "cls", "sep", "unk", "bos", "eos")
BITS = "bit"
"""A column of this type holds eight booleans a byte, the first one in the highest bit."""
_EARLIER_META = "meta.json"  # the manifest of "joulelab-tokens-1"
_ITEMS_PER_WRITE = 2**20  # memory stays flat, and range checks and hashing work on a few megabytes at a time
_ROWS_PER_BLOCK = 1_000
_REBUILD_TOKENS = "rebuild it with `joulelab prepare binarize`"

Ids = NDArray[np.int64]
Lengths = Sequence[int]


@dataclass(frozen=True)
class Column:
    dtype: str
    """Little-endian NumPy integer type, or `BITS`."""
    per: Literal["item", "row"] = "item"
    width: int = 1
    """Values per item or row; more than 1 makes the column two-dimensional."""
    limit: int | None = None
    """Values are in 0..limit-1; None: in the range of the type."""

    def size_bytes(self, count: int) -> int:
        return (count + 7) // 8 if self.dtype == BITS else count * self.width * np.dtype(self.dtype).itemsize


def token_column(vocab_size: int) -> Column:
    """The narrowest column that holds every id of the vocabulary."""
    if not 1 <= vocab_size <= 2**32:
        raise ConfigError(f"vocabulary size {vocab_size} is not in 1..{2**32}", "check the tokenizer")
    return Column("<u2" if vocab_size <= 2**16 else "<u4", limit=vocab_size)


class RaggedStore:
    """An open store. Subclasses name the columns they need and give them types."""

    COLUMNS: ClassVar[tuple[str, ...]] = ("tokens",)
    NOUN: ClassVar[str] = "token store"
    HINT: ClassVar[str] = "write it again"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / MANIFEST).is_file() and not (folder / _EARLIER_META).is_file():
            raise NotFoundError(f"no complete {self.NOUN} in {folder.absolute()}: {MANIFEST} is missing", self.HINT)
        try:
            self.manifest = _read_manifest(folder)
            self.offsets = _map_offsets(folder / OFFSETS, self.manifest["rows"], self.manifest["items"])
            self.columns = {name: self._map(name, entry) for name, entry in self.manifest["columns"].items()}
            for name, entry in self.manifest["attachments"].items():
                _check_size(_file(folder, name, "json"), entry["bytes"])
            missing = [name for name in self.COLUMNS if name not in self.columns]
            if missing:
                raise ValueError(f"column {', '.join(missing)} is missing")
            self.attributes: Mapping[str, Any] = self.manifest["attributes"]
            self._read_attributes()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, JoulelabError) as error:
            raise JoulelabError(
                f"the {self.NOUN} {folder.absolute()} is corrupted: {error_text(error)}", self.HINT
            ) from error
        self.tokens = self.columns["tokens"]

    @classmethod
    def open(cls, folder: Path) -> Self:
        return cls(folder)

    def _read_attributes(self) -> None:
        """Subclasses take what they need from `self.attributes`."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Ids:
        return np.diff(self.offsets)

    @property
    def tokens_total(self) -> int:
        return int(self.offsets[-1])

    def span(self, row: int) -> slice:
        """The items of a row in the columns."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a {self.NOUN} of {len(self)} rows")
        return slice(int(self.offsets[row]), int(self.offsets[row + 1]))

    def row(self, number: int) -> Ids:
        """A copy of the row's token ids."""
        return self.tokens[self.span(number)].astype(np.int64)

    def bits(self, name: str, items: slice) -> NDArray[np.bool_]:
        """The values of a `BITS` column for a span of items."""
        packed = self.columns[name][items.start // 8 : (items.stop + 7) // 8]
        first = items.start % 8
        return np.unpackbits(packed)[first : first + items.stop - items.start].astype(np.bool_)

    def attachment(self, name: str) -> dict[str, Any]:
        return read_json(_file(self.folder, name, "json"))

    def sha256_of(self, column: str) -> str:
        return str(self.manifest["columns"][column]["sha256"])

    def verify(self) -> None:
        """Read every byte and compare it with what was written."""
        written = {f"{name}.bin": entry["sha256"] for name, entry in self.manifest["columns"].items()}
        written |= {f"{name}.json": entry["sha256"] for name, entry in self.manifest["attachments"].items()}
        if "offsets_sha256" in self.manifest:  # stores of the first release have none
            written[OFFSETS] = self.manifest["offsets_sha256"]
        for name, sha256 in written.items():
            if _sha256(self.folder / name) != sha256:
                raise JoulelabError(
                    f"the {self.NOUN} {self.folder.absolute()} is corrupted: {name} has changed since it was written",
                    self.HINT,
                )

    def _map(self, name: str, entry: Mapping[str, Any]) -> NDArray[Any]:
        column = Column(entry["dtype"], entry["per"], entry["width"])
        count = self.manifest["items" if column.per == "item" else "rows"]
        path = _file(self.folder, name, "bin")
        dtype = np.dtype(np.uint8 if column.dtype == BITS else column.dtype)
        if dtype.kind not in "iu":
            raise ValueError(f"{path.name} has the type {column.dtype!r}, expected integers or bits")
        _check_size(path, column.size_bytes(count))
        # An empty file cannot be mapped. A plain view, because np.memmap runs Python code on every index.
        flat = np.memmap(path, dtype=dtype, mode="r").view(np.ndarray) if path.stat().st_size else np.empty(0, dtype)
        return flat.reshape(-1, column.width) if column.width > 1 else flat


class TokenStore(RaggedStore):
    """Token ids of documents and the tokenizer's special tokens: what `joulelab prepare binarize` writes."""

    HINT = _REBUILD_TOKENS

    def _read_attributes(self) -> None:
        self.vocab_size: int = self.attributes["vocab_size"]
        self.specials: dict[str, int] = dict(self.attributes["specials"])
        """pad, mask, cls, sep, unk, bos, eos -> id; only those that the tokenizer has."""
        self.tokenizer: str = self.attributes["tokenizer"]
        self.sha256 = self.sha256_of("tokens")


class StoreWriter:
    """Appends rows; what is set in `attributes` and attached until the `store_writer` block ends is kept with them."""

    def __init__(self, folder: Path, columns: Mapping[str, Column]) -> None:
        self.attributes: dict[str, Any] = {}
        self._folder = folder
        self._attachments: dict[str, Mapping[str, Any]] = {}
        self._columns = columns
        self._files = {name: _ColumnFile(folder / f"{name}.bin", name, column) for name, column in columns.items()}
        self._lengths: list[Ids] = []
        self._waiting_lengths: list[int] = []
        self._waiting_items = 0

    def append(self, lengths: Lengths, **values: ArrayLike) -> None:
        """Rows of these lengths: all items of an item column one after another, one entry per row of a row column."""
        items = sum(lengths)
        if values.keys() != self._columns.keys():
            raise ValueError(f"columns {sorted(values)}, expected {sorted(self._columns)}")
        for name, column in self._columns.items():
            self._files[name].add(values[name], items if column.per == "item" else len(lengths))
        self._waiting_lengths.extend(lengths)
        self._waiting_items += items
        if self._waiting_items >= _ITEMS_PER_WRITE:
            self._flush()

    def attach(self, name: str, content: Mapping[str, Any]) -> None:
        self._attachments[name] = content

    def _flush(self) -> None:
        for file in self._files.values():
            file.flush()
        self._lengths.append(np.array(self._waiting_lengths, dtype=np.int64))
        self._waiting_lengths, self._waiting_items = [], 0

    def finish(self) -> None:
        self._flush()
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(self._lengths))])
        if len(offsets) == 1:
            raise ConfigError("there are no rows to store", "check that the input is not empty")
        with (self._folder / OFFSETS).open("wb") as file:
            np.save(file, offsets.astype("<i8"), allow_pickle=False)
            _sync(file)
        attachments = {}
        for name, content in sorted(self._attachments.items()):
            path = _file(self._folder, name, "json")
            write_json(path, dict(content))
            attachments[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        manifest = {
            "format": FORMAT,
            "rows": len(offsets) - 1,
            "items": int(offsets[-1]),
            "columns": {name: file.finish() for name, file in sorted(self._files.items())},
            "offsets_sha256": _sha256(self._folder / OFFSETS),
            "attachments": attachments,
            "attributes": self.attributes,
        }
        write_json(self._folder / MANIFEST, manifest)

    def close(self) -> None:
        for file in self._files.values():
            file.file.close()


class _ColumnFile:
    def __init__(self, path: Path, name: str, column: Column) -> None:
        self.file = path.open("wb")
        self._name, self._column = name, column
        self._digest = hashlib.sha256()
        self._waiting: list[NDArray[Any]] = []
        self._rest = np.empty(0, np.bool_)  # up to seven bits that do not fill a byte yet

    def add(self, values: ArrayLike, count: int) -> None:
        array = np.asarray(values)
        shape = (count,) if self._column.width == 1 else (count, self._column.width)
        kind = "b" if self._column.dtype == BITS else "iu"
        if array.shape != shape or (count and array.dtype.kind not in kind):
            expected = "booleans" if self._column.dtype == BITS else "integers"
            raise ConfigError(
                f"column {self._name} got {values!r:.80} ({array.dtype}, shape {array.shape}); "
                f"expected {expected}, shape {shape}"
            )
        if count:
            self._waiting.append(array)

    def flush(self) -> None:
        if not self._waiting:
            return
        if self._column.dtype == BITS:
            bits = np.concatenate([self._rest, *self._waiting])
            whole = len(bits) // 8 * 8
            self._write(np.packbits(bits[:whole]))
            self._rest = bits[whole:]
        else:
            self._write(narrow(np.concatenate(self._waiting, dtype=np.int64), self._column, self._name))
        self._waiting = []

    def finish(self) -> dict[str, Any]:
        self._write(np.packbits(self._rest))
        _sync(self.file)
        column = self._column
        return {"dtype": column.dtype, "per": column.per, "width": column.width, "sha256": self._digest.hexdigest()}

    def _write(self, array: NDArray[Any]) -> None:
        data = array.tobytes()
        self.file.write(data)
        self._digest.update(data)


@contextmanager
def store_writer(folder: Path, columns: Mapping[str, Column], *, keep_existing: bool = False) -> Iterator[StoreWriter]:
    """Write a store; it gets its name when the block ends without an exception.

    `keep_existing`: if another process completes the same store first, that one is kept. Its readers may already have
    it open, and equal rows give equal bytes.
    """
    if folder.exists() and not is_store(folder) and (folder.is_file() or any(folder.iterdir())):
        raise ConfigError(f"{folder.absolute()} is not empty and contains no store", "choose another folder")
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir(parents=True)
    try:
        writer = StoreWriter(temporary, columns)
        try:
            yield writer
            writer.finish()
        finally:
            writer.close()
        _move_into_place(temporary, folder, keep_existing)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def narrow(ids: Ids, column: Column, name: str = "tokens") -> NDArray[Any]:
    """The ids in the column's type. An id outside its range would wrap around without an error."""
    bounds = np.iinfo(column.dtype)
    lowest, highest = (bounds.min, bounds.max) if column.limit is None else (0, column.limit - 1)
    if ids.size and (ids.min() < lowest or ids.max() > highest):
        outside = ids[(ids < lowest) | (ids > highest)]
        raise ConfigError(
            f"column {name} contains {outside[0]}, which is outside {lowest}..{highest}",
            "check that the tokenizer and the vocabulary size belong to the same model",
        )
    return ids.astype(column.dtype)


def write_store(
    folder: Path,
    rows: Iterable[Sequence[int] | NDArray[Any]],
    *,
    vocab_size: int,
    specials: Mapping[str, int],
    tokenizer: str,
) -> TokenStore:
    """Write rows of token ids as they come: they need not fit into memory."""
    return write_blocks(folder, _blocks(rows), vocab_size=vocab_size, specials=specials, tokenizer=tokenizer)


def write_blocks(
    folder: Path,
    blocks: Iterable[tuple[Lengths, ArrayLike]],
    *,
    vocab_size: int,
    specials: Mapping[str, int],
    tokenizer: str,
) -> TokenStore:
    """Like `write_store`, with many rows at a time: their lengths, and their ids one after another."""
    for name, number in specials.items():
        if name not in SPECIAL_NAMES or not 0 <= number < vocab_size:
            raise ConfigError(
                f"special token {name}={number} is not supported",
                f"names are {', '.join(SPECIAL_NAMES)}; ids are in 0..{vocab_size - 1}",
            )
    with store_writer(folder, {"tokens": token_column(vocab_size)}) as writer:
        for lengths, ids in blocks:
            writer.append(lengths, tokens=ids)
        writer.attributes.update(vocab_size=vocab_size, specials=dict(specials), tokenizer=tokenizer)
    return TokenStore(folder)


def _blocks(rows: Iterable[Sequence[int] | NDArray[Any]]) -> Iterator[tuple[Lengths, ArrayLike]]:
    left = iter(rows)
    while some := list(islice(left, _ROWS_PER_BLOCK)):
        arrays = [np.asarray(row) for row in some if len(row)]
        yield [len(row) for row in some], np.concatenate(arrays) if arrays else []


def open_store(folder: Path) -> TokenStore:
    folder = find_store(folder)
    if not folder.exists():
        raise NotFoundError(f"there is no token store {folder.absolute()}", "`joulelab prepare binarize` writes one")
    if folder.is_file():
        raise ConfigError(f"{folder.absolute()} is a file; a token store is a folder", _hint_for_file(folder))
    return TokenStore(folder)


def find_store(named: Path) -> Path:
    """Older commands pass NAME.pickle; where there is no such file, the store NAME is meant."""
    bare = named.with_name(named.name.removesuffix(".pickle"))
    return bare if not named.exists() and is_store(bare) else named


def is_store(folder: Path) -> bool:
    manifests = (folder / MANIFEST, folder / _EARLIER_META)
    return (folder / OFFSETS).is_file() and any(path.is_file() for path in manifests)


def is_pickle(path: Path) -> bool:
    """By its first byte or its name; it is not opened."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1) == b"\x80" or path.suffix.lower() in (".pickle", ".pkl")


def refuse_pickle(path: Path) -> None:
    """For a path where text or a token store is expected."""
    if is_pickle(path):
        raise ConfigError(f"{path.absolute()} is a pickle; expected text or a token store", _hint_for_file(path))


def _hint_for_file(path: Path) -> str:
    if is_pickle(path):
        return (
            "convert token ids of the original script, or build a store from the text: "
            f"joulelab prepare binarize --file_path {path} --tokenizer_name NAME --dump_file OUT"
        )
    return "pass the folder that `joulelab prepare binarize` wrote"


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    if manifest.get("format") == FORMAT:
        return manifest
    return _earlier_manifest(folder, manifest)


def _earlier_manifest(folder: Path, documents: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a store that the first release wrote for a user: token ids, or chat documents with loss mask.

    Its other stores were artifacts of runs. Their keys contain the code version, so they are built again.
    """
    meta = read_json(folder / _EARLIER_META) if (folder / _EARLIER_META).is_file() else {}
    if meta.get("format") != "joulelab-tokens-1" or documents.get("format") not in (None, "joulelab-documents-1"):
        found = documents.get("format", meta.get("format"))
        raise ValueError(f"its format is {found!r}, expected {FORMAT!r}")
    attributes = {name: meta[name] for name in ("vocab_size", "specials", "tokenizer")}
    columns = {"tokens": {"dtype": meta["dtype"], "per": "item", "width": 1, "sha256": meta["sha256"]}}
    if documents:
        attributes |= {name: value for name, value in documents.items() if name != "format"}
        columns["trained"] = {"dtype": BITS, "per": "item", "width": 1, "sha256": documents["trained_sha256"]}
    return {
        "rows": meta["rows"],
        "items": meta["tokens"],
        "columns": columns,
        "attributes": attributes,
        "attachments": {},
    }


def _map_offsets(path: Path, rows: int, items: int) -> Ids:
    offsets: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)
    if offsets.dtype != np.dtype("<i8") or offsets.shape != (rows + 1,):
        raise ValueError(f"{path.name} does not contain the offsets of {rows} rows")
    # Monotone offsets within the file are all that indexing relies on; with these checked, a
    # corrupted store cannot read outside its columns.
    if offsets[0] != 0 or offsets[-1] != items or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{path.name} does not match {items} items")
    return offsets


def _file(folder: Path, name: str, suffix: str) -> Path:
    if not name.isidentifier():  # a manifest from elsewhere may name any path
        raise ValueError(f"{name!r} is not a name of a column or attachment")
    return folder / f"{name}.{suffix}"


def _check_size(path: Path, expected: int) -> None:
    if path.stat().st_size != expected:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, expected {expected}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _move_into_place(temporary: Path, folder: Path, keep_existing: bool) -> None:
    try:
        # rename(2) of a directory replaces an empty one or fails, atomically: readers see the old
        # or the new store.
        temporary.rename(folder)  # onto nothing, or onto an empty folder
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if keep_existing and is_store(folder):
            return
        previous = temporary.with_suffix(".old")
        folder.rename(previous)
        temporary.rename(folder)
        shutil.rmtree(previous, ignore_errors=True)
