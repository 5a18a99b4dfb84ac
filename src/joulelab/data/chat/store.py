"""Encoded documents on disk: a token store, and beside it one bit per token that says whether it is trained.

The folder is written under another name and renamed when it is whole, so a folder of this name is complete, and a
rewrite that fails leaves the old one. Opening compares sizes; `verify` reads every byte. There is no pickle.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joulelab.data.chat.documents import EncodedDocument
from joulelab.data.token_store import TokenStore, open_store, verify_store, write_store
from joulelab.errors import ConfigError, JoulelabError, NotFoundError
from joulelab.runs.json_file import read_json, write_json
from joulelab.runs.soundness import words_for

FORMAT = "joulelab-documents-1"
TRAINED, MANIFEST = "trained.bin", "manifest.json"
_WRITE_AGAIN = "write it again"


@dataclass(frozen=True, eq=False)
class DocumentStore:
    folder: Path
    tokens: TokenStore
    trained: NDArray[np.uint8]
    """Eight tokens a byte, the first in the highest bit; a view of the file."""
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path) -> DocumentStore:
        if not (folder / MANIFEST).is_file():
            raise NotFoundError(f"there is no store of documents in {folder.absolute()}", "write one first")
        manifest = read_json(folder / MANIFEST)
        try:
            if manifest.get("format") != FORMAT:
                raise ValueError(f"{MANIFEST} does not say that it is a '{FORMAT}'")
            tokens = open_store(folder)
            if tokens.tokens_total != manifest["tokens"] or len(tokens) != manifest["documents"]:
                raise ValueError(f"{MANIFEST} tells of other documents than lie beside it")
            return cls(folder, tokens, _mapped(folder / TRAINED, tokens.tokens_total), manifest)
        except (OSError, ValueError, KeyError, TypeError, JoulelabError) as error:
            raise JoulelabError(
                f"the documents in {folder.absolute()} are damaged: {words_for(error)}", _WRITE_AGAIN
            ) from error

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.tokens.lengths

    @property
    def token_count(self) -> int:
        return self.tokens.tokens_total

    @property
    def trained_count(self) -> int:
        """Targets of the loss in all documents."""
        return int(self.manifest["trained_tokens"])

    @property
    def pad_id(self) -> int:
        return int(self.manifest["pad_id"])

    def document(self, number: int) -> EncodedDocument:
        ids = self.tokens.row(number)
        start = int(self.tokens.offsets[number])
        whole_bytes = self.trained[start // 8 : (start + len(ids) + 7) // 8]
        bits = np.unpackbits(whole_bytes)[start % 8 : start % 8 + len(ids)]
        return EncodedDocument(ids, bits.astype(np.bool_))

    def verify(self) -> None:
        """Read every byte and compare with what was written."""
        verify_store(self.tokens)
        with (self.folder / TRAINED).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.manifest["trained_sha256"]:
            raise JoulelabError(
                f"the documents in {self.folder.absolute()} are damaged: other tokens are trained than were written",
                _WRITE_AGAIN,
            )


def write_documents(
    folder: Path,
    documents: Iterable[EncodedDocument],
    *,
    vocab_size: int,
    pad_id: int,
    tokenizer: str,
    notes: Mapping[str, Any] | None = None,
) -> DocumentStore:
    """Write documents as they come; those without a trained token teach nothing and are left out, counted.

    `tokenizer` is its name; `notes` go into the manifest as they are (hashes, the template, counts of what was dropped)
    and are read after the last document, so that whoever makes the documents may count while they are written.
    """
    with _exchanged(folder) as temporary:
        bits = _TrainedBits(temporary / TRAINED)
        try:
            tokens = write_store(
                temporary, bits.follow(documents), vocab_size=vocab_size, specials={}, tokenizer=tokenizer
            )
        finally:
            bits.close()
        manifest = {
            **(notes or {}),
            "format": FORMAT,
            "documents": len(tokens),
            "tokens": tokens.tokens_total,
            "trained_tokens": bits.targets,
            "documents_without_trained_tokens": bits.left_out,
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
            "pad_id": pad_id,
            "tokens_sha256": tokens.sha256,
            "trained_sha256": bits.digest.hexdigest(),
        }
        write_json(temporary / MANIFEST, manifest)
    return DocumentStore.open(folder)


class _TrainedBits:
    """Writes the bits of the documents that pass through; keeps the up to seven that do not fill a byte yet."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._rest = np.empty(0, np.bool_)
        self.digest = hashlib.sha256()
        self.targets = self.left_out = 0

    def follow(self, documents: Iterable[EncodedDocument]) -> Iterator[NDArray[np.int64]]:
        for document in documents:
            if document.trained.shape != document.ids.shape:
                raise ConfigError(f"{len(document.ids)} ids and {len(document.trained)} trained bits", "one per id")
            if not document.trained_count:
                self.left_out += 1
                continue
            self.targets += document.trained_count
            self._add(document.trained)
            yield document.ids
        if not self.targets:
            raise ConfigError(
                f"none of {self.left_out:,} documents has a token to train on",
                "check that the conversations have assistant turns, and that max_tokens does not cut all of them off",
            )

    def close(self) -> None:
        if self._file.closed:
            return
        self._write(np.packbits(self._rest).tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _add(self, trained: NDArray[np.bool_]) -> None:
        bits = np.concatenate([self._rest, trained])
        whole = len(bits) // 8 * 8
        self._write(np.packbits(bits[:whole]).tobytes())
        self._rest = bits[whole:]

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)


def _mapped(path: Path, tokens: int) -> NDArray[np.uint8]:
    expected = (tokens + 7) // 8
    if path.stat().st_size != expected:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, expected {expected}")
    return np.memmap(path, dtype=np.uint8, mode="r")


@contextmanager
def _exchanged(folder: Path) -> Iterator[Path]:
    """A folder beside it to write into, which takes its place when the block ends well."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
        if folder.exists():
            folder.replace(old)
        temporary.replace(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
