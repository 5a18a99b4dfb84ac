"""Sources of models and datasets as a user names them: `sample:NAME`, a path, or a name on the Hugging Face hub.

A path that exists takes precedence over the hub, so that an offline run never depends on the names there.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from joulelab.data import samples
from joulelab.errors import ConfigError, NotFoundError
from joulelab.runs.artifacts import BILL, CONTENTS

SAMPLE_PREFIX = "sample:"
_DATA_SUFFIXES = (".csv", ".jsonl", ".parquet", ".json", ".txt", ".gz")
_EXPECTED = "write sample:NAME (see `joulelab samples list`), an existing path, or a hub id such as org/name"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*(:\w[\w.-]*)?)?")  # a dataset may name a configuration


@dataclass(frozen=True)
class Source:
    kind: Literal["sample", "file", "folder", "hub"]
    name: str  # as the user wrote it, without `sample:`
    path: Path | None  # None for the hub alone


def parse(name: str) -> Source:
    text = name.strip()
    if not text:
        raise ConfigError("the name of a model or dataset is empty", _EXPECTED)
    if text.startswith(SAMPLE_PREFIX):
        sample = text.removeprefix(SAMPLE_PREFIX)
        return Source("sample", sample, samples.locate(sample))
    path = Path(text).expanduser()
    if path.exists():
        return Source("folder" if path.is_dir() else "file", text, path)
    if _looks_like_a_path(text):
        raise NotFoundError(f"there is no file or folder {path.absolute()}", _EXPECTED)
    if not _HUB_ID.fullmatch(text):
        raise NotFoundError(f"'{text}' is neither a sample nor an existing path nor a hub id", _EXPECTED)
    return Source("hub", text, None)


def refuse_missing_file(name: str) -> None:
    """Refuse a name of the form of a hub id whose folder is here, as in `folder/nope`: a mistyped path. Only for names
    that are not in the hub's cache: a folder of this machine may have the name of an organization."""
    if _is_in_a_folder(name):
        raise NotFoundError(f"there is no file or folder {Path(name).expanduser().absolute()}", _EXPECTED)


def hub_hint(name: str) -> str:
    """Hint for a name that the hub did not return; a missing `sample:` is the likeliest mistake."""
    if name in samples.SAMPLES:
        return f"did you mean '{SAMPLE_PREFIX}{name}'?"
    if _is_in_a_folder(name):
        return f"if it is a path: there is no file or folder {Path(name).expanduser().absolute()}"
    return f"offline, use a local path or a sample ({', '.join(SAMPLE_PREFIX + s for s in samples.SAMPLES)})"


def content_hash(path: Path) -> str:
    """sha256 of a file's bytes, or of a folder's file names and bytes: the same content has the same hash anywhere.

    The energy bill and the list of contents in the folder are excluded: the bill changes when its run ends.
    """
    if path.is_file():
        return _file_digest(path).hex()
    if not path.is_dir():
        raise NotFoundError(f"there is no file or folder {path.absolute()}", "check the path")
    whole = hashlib.sha256()
    ours = (path / BILL, path / CONTENTS)
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file() and file not in ours}
    for relative, file in sorted(files.items()):
        # A name contains no NUL byte and a digest has 32 bytes, so different folders give different streams.
        whole.update(relative.encode() + b"\0" + _file_digest(file))
    return whole.hexdigest()


def _looks_like_a_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.lower().endswith(_DATA_SUFFIXES) or text.count("/") > 1


def _is_in_a_folder(name: str) -> bool:
    return "/" in name and Path(name).expanduser().parent.is_dir()


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
