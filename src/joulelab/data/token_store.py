"""Tokenised documents on disk: one flat file of ids read through a memory map, and where each document begins.

A corpus is tokenised once and read by many runs and ranks: opening it is quick however large it is, all of them share
one copy in the page cache, and there is no pickle, so a store from elsewhere is opened without running its code.
The same rows give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from joulelab.errors import ConfigError, JoulelabError, NotFoundError
from joulelab.runs.soundness import words_for

FORMAT = "joulelab-tokens-1"
SPECIAL_NAMES = ("pad", "mask", "cls", "sep", "unk", "bos", "eos")
TOKENS, OFFSETS, META = "tokens.bin", "offsets.npy", "meta.json"
_TOKENS_PER_WRITE = 2**20  # memory stays flat, and a check of the ids costs one pass over a megabyte or so
_WRITE_AGAIN = "make it again with `joulelab prepare binarize`"


@dataclass(frozen=True, eq=False)
class TokenStore:
    folder: Path
    tokens: NDArray[Any]
    """All ids one after another, 16 or 32 bits each; a view of the file, not to be written to."""
    offsets: NDArray[np.int64]
    """Row i is tokens[offsets[i] : offsets[i + 1]]."""
    vocab_size: int
    """All ids lie below this."""
    specials: dict[str, int]
    """pad, mask, cls, sep, unk, bos, eos -> id; only those that the tokenizer has."""
    tokenizer: str
    """Its name as the user wrote it."""
    sha256: str
    """Of the ids' file: the same documents and tokenizer have the same one."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def tokens_total(self) -> int:
        return int(self.offsets[-1])

    def row(self, number: int) -> NDArray[np.int64]:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of a store of {len(self)}")
        return self.tokens[self.offsets[number] : self.offsets[number + 1]].astype(np.int64)


def write_store(
    folder: Path,
    rows: Iterable[Sequence[int] | NDArray[Any]],
    *,
    vocab_size: int,
    specials: Mapping[str, int],
    tokenizer: str,
) -> TokenStore:
    """Write rows as they come: neither they nor their ids have to fit into memory."""
    dtype = token_dtype(vocab_size)
    _check_specials(specials, vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    with _temporary(folder / TOKENS) as tokens_file, _temporary(folder / OFFSETS) as offsets_file:
        lengths, sha256 = _write_tokens(tokens_file, rows, dtype, vocab_size)
        if not lengths:
            raise ConfigError("there are no documents to store", "check that the text is not empty")
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
        np.save(offsets_file, offsets, allow_pickle=False)
        # A folder with a meta.json is whole: it goes before the files are exchanged and comes back last.
        (folder / META).unlink(missing_ok=True)
    meta = {
        "format": FORMAT,
        "dtype": dtype,
        "rows": len(lengths),
        "tokens": int(offsets[-1]),
        "sha256": sha256,
        "vocab_size": vocab_size,
        "specials": dict(specials),
        "tokenizer": tokenizer,
    }
    with _temporary(folder / META) as file:
        file.write((json.dumps(meta, indent=1, sort_keys=True) + "\n").encode())
    return open_store(folder)


def open_store(folder: Path) -> TokenStore:
    folder = find_store(folder)
    _refuse_what_is_no_store(folder)
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise ValueError(f"{META} does not say that it is a '{FORMAT}'")
        store = TokenStore(
            folder=folder,
            tokens=_mapped(folder / TOKENS, meta["dtype"], meta["tokens"]),
            offsets=np.load(folder / OFFSETS, allow_pickle=False),
            vocab_size=meta["vocab_size"],
            specials=dict(meta["specials"]),
            tokenizer=meta["tokenizer"],
            sha256=meta["sha256"],
        )
        _refuse_disagreement(store, meta["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JoulelabError(
            f"the token store {folder.absolute()} is damaged: {words_for(error)}", _WRITE_AGAIN
        ) from error
    return store


def find_store(named: Path) -> Path:
    """Commands of old say NAME.pickle; where there is none, the store NAME is what they mean."""
    bare = named.with_name(named.name.removesuffix(".pickle"))
    return bare if not named.exists() and is_store(bare) else named


def is_store(folder: Path) -> bool:
    return (folder / META).is_file() and (folder / TOKENS).is_file()


def verify_store(store: TokenStore) -> None:
    """Read every byte and compare; opening a store compares sizes alone, which takes no time."""
    with (store.folder / TOKENS).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != store.sha256:
        raise JoulelabError(
            f"the token store {store.folder.absolute()} is damaged: its ids are not those that were written",
            _WRITE_AGAIN,
        )


def token_dtype(vocab_size: int) -> str:
    """The smallest width that holds every id; little-endian, so that a store means the same on any machine."""
    if vocab_size < 1 or vocab_size > 2**32:
        raise ConfigError(
            f"a vocabulary of {vocab_size} ids cannot be stored; expected 1 to {2**32}", "check the tokenizer"
        )
    return "<u2" if vocab_size <= 2**16 else "<u4"


def _write_tokens(
    file: IO[bytes], rows: Iterable[Sequence[int] | NDArray[Any]], dtype: str, vocab_size: int
) -> tuple[list[int], str]:
    lengths: list[int] = []
    digest = hashlib.sha256()
    for some in _megabytes(rows):
        ids = np.concatenate(some)
        if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
            # it would wrap round in 16 bits and train on nonsense without a word
            raise ConfigError(
                f"rows {len(lengths)} to {len(lengths) + len(some) - 1} hold an id outside 0..{vocab_size - 1}",
                "the tokenizer and the vocabulary size belong to different models",
            )
        written = ids.astype(dtype).tobytes()
        file.write(written)
        digest.update(written)
        lengths.extend(len(row) for row in some)
    return lengths, digest.hexdigest()


def _megabytes(rows: Iterable[Sequence[int] | NDArray[Any]]) -> Iterator[list[NDArray[np.int64]]]:
    some: list[NDArray[np.int64]] = []
    held = 0
    for row in rows:
        ids = np.asarray(row)
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise ConfigError(f"a row is not a list of whole numbers: {row!r:.80}")
        some.append(ids.astype(np.int64))
        held += len(ids)
        if held >= _TOKENS_PER_WRITE:
            yield some
            some, held = [], 0
    if some:
        yield some


def _check_specials(specials: Mapping[str, int], vocab_size: int) -> None:
    for name, number in specials.items():
        if name not in SPECIAL_NAMES or not 0 <= number < vocab_size:
            raise ConfigError(
                f"the special token {name}={number} cannot be stored",
                f"names are {', '.join(SPECIAL_NAMES)}; ids lie in 0..{vocab_size - 1}",
            )


def _refuse_what_is_no_store(folder: Path) -> None:
    place = folder.absolute()
    if not folder.exists():
        raise NotFoundError(f"there is no token store {place}", "`joulelab prepare binarize` makes one")
    if folder.is_file():
        raise ConfigError(f"{place} is a file; a token store is a folder", _hint_for_file(folder))
    if not (folder / META).is_file():
        raise ConfigError(f"{place} holds no (complete) token store: {META} is missing", _WRITE_AGAIN)


def is_pickle(path: Path) -> bool:
    """By its first byte or its name; it is not opened."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1) == b"\x80" or path.suffix.lower() in (".pickle", ".pkl")


def _hint_for_file(path: Path) -> str:
    if is_pickle(path):
        return (
            "a pickle can run code when it is opened, so we do not; make a store from the text it was made from: "
            "joulelab prepare binarize --file_path TEXT --tokenizer_name NAME --dump_file OUT"
        )
    return "name the folder that `joulelab prepare binarize` wrote"


def refuse_pickle(path: Path) -> None:
    """Ids that the old scripts left, named where text or a store is expected."""
    if is_pickle(path):
        raise ConfigError(f"{path.absolute()} is a pickle; expected text or a token store", _hint_for_file(path))


def _mapped(path: Path, dtype: str, count: int) -> NDArray[Any]:
    if dtype not in ("<u2", "<u4"):
        raise ValueError(f"ids of type {dtype!r}, expected '<u2' or '<u4'")
    expected_bytes = count * np.dtype(dtype).itemsize
    if path.stat().st_size != expected_bytes:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, expected {expected_bytes}")
    if count == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _refuse_disagreement(store: TokenStore, rows: int) -> None:
    offsets = store.offsets
    if offsets.ndim != 1 or offsets.dtype != np.int64 or len(offsets) != rows + 1:
        raise ValueError(f"{OFFSETS} does not hold the beginnings of {rows} rows")
    if offsets[0] != 0 or offsets[-1] != len(store.tokens) or (np.diff(offsets) < 0).any():
        raise ValueError(f"{OFFSETS} does not fit {len(store.tokens)} tokens")


@contextmanager
def _temporary(path: Path) -> Iterator[IO[bytes]]:
    """Under another name until it is whole and on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
