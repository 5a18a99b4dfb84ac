"""Documents of text by what a user wrote: a file, a folder, a sample or a dataset on the hub; and slices of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from joulelab import lookup
from joulelab.data import samples, sources
from joulelab.data.splits import Split
from joulelab.data.text_files import files_by_split, read_files
from joulelab.errors import ConfigError

MOST_OF_A_HUB_SET = 100_000
"""Documents taken from the hub where the user named no slice: C4 as a whole would be 305 GB."""


class DocumentSource(Protocol):
    def splits(self) -> tuple[str, ...]: ...

    def read(self, split: str) -> Iterator[str]:
        """All of a split, in order."""

    def count(self, split: str) -> int: ...


class LocalText:
    def __init__(self, path: Path) -> None:
        self._files = files_by_split(path)

    def splits(self) -> tuple[str, ...]:
        return tuple(self._files)

    def read(self, split: str) -> Iterator[str]:
        return read_files(self._files[split])

    def count(self, split: str) -> int:
        return sum(1 for _ in self.read(split))


@dataclass(frozen=True)
class Documents:
    name: str
    source: DocumentSource
    identity: str
    """Changes when the documents do, as far as can be told without reading them."""
    size_bytes: int | None
    """None where it is not known before reading."""

    def read(self, split: Split) -> Iterator[str]:
        """The documents of a split or slice; `train[:100]` is the first 100."""
        if split.name not in self.source.splits():
            raise lookup.unknown(f"split of {self.name}", split.name, self.source.splits())
        first, beyond = self._bounds(split)
        return islice(self.source.read(split.name), first, beyond)

    def is_cut_short(self, split: Split) -> bool:
        return self.size_bytes is None and not split.stop

    def _bounds(self, split: Split) -> tuple[int, int | None]:
        if all(edge.isdecimal() or not edge for edge in (split.start, split.stop)):
            first = int(split.start or 0)
            if self.is_cut_short(split):
                return first, first + MOST_OF_A_HUB_SET
            return first, int(split.stop) if split.stop else None
        rows = split.rows(self.source.count(split.name))
        return int(rows[0]), int(rows[-1]) + 1


def open_documents(name: str) -> Documents:
    found = sources.parse(name)
    if found.kind == "sample" and samples.find(found.name).kind != "labelled-text":
        raise ConfigError(f"{name} is a model, not text", "use sample:reviews")
    if found.path is None:
        from joulelab.data.hub_text import HubText

        return Documents(name, HubText(found.name), identity=name, size_bytes=None)
    if any((found.path / mark).exists() for mark in ("dataset_dict.json", "dataset_info.json")):
        from joulelab.data.hub_text import SavedText

        return Documents(name, SavedText(found.path), _identity(found.path), _size_bytes(found.path))
    return Documents(name, LocalText(found.path), _identity(found.path), _size_bytes(found.path))


def _identity(path: Path) -> str:
    stamps = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in _files(path)]
    return json.dumps(stamps)


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
