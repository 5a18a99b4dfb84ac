"""Artefacts on disk: made once inside a run, found again by key, and only whole ones are found."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from joulelab.runs.bills import BILL, Bill
from joulelab.runs.json_file import write_json
from joulelab.runs.shares import PART, Share


@dataclass(frozen=True)
class Artifact:
    folder: Path
    bill: Bill
    reused: bool
    """True where another run made it."""

    @property
    def key(self) -> str:
        return self.bill.key


def read_bill(folder: Path, naming: str = "") -> Bill | None:
    """The bill is written last, so a folder without a readable one is unfinished work.

    One without the word `naming` in it is not looked into: stores grow to thousands of bills.
    """
    try:
        written = (folder / BILL).read_bytes()
        return Bill.model_validate_json(written) if naming.encode() in written else None
    except (OSError, ValidationError):
        return None


def write_bill(folder: Path, bill: Bill) -> None:
    write_json(folder / BILL, bill)


def find_artifacts(store: Path, key: str) -> Iterator[Artifact]:
    """The artefacts with this key made by any run of the store, the newest first."""
    return (found for found in _naming(store, key) if found.key == key)


def find_artifact(store: Path, key: str) -> Artifact | None:
    return next(find_artifacts(store, key), None)


def find_parts(store: Path, key: str, takes: Callable[[Artifact], bool]) -> list[Artifact]:
    """Shares of the artefact with this key that tasks of a split have finished; of a share made twice the newest.

    Where it was split in several ways, the one of which the most is there: shares of different splits overlap.
    """
    splits: dict[tuple[int, int], dict[int, Artifact]] = {}
    for part in _naming(store, key):
        inputs = part.bill.inputs
        if part.bill.artefact.kind.endswith(PART) and inputs.get("whole") == key:
            share = Share.parse(inputs["share"])
            split = splits.setdefault((share.of, inputs["at_once"]), {})
            if share.number not in split and takes(part):
                split[share.number] = part
    best = max(splits, key=lambda split: len(splits[split]) / split[0], default=None)
    return [] if best is None else [splits[best][number] for number in sorted(splits[best])]


def _naming(store: Path, key: str) -> Iterator[Artifact]:
    """Artefacts whose bill has this key somewhere, the newest first; other runs may set some aside meanwhile."""
    written = {}
    for path in store.glob(f"*/artifacts/*/{BILL}"):
        with suppress(OSError):
            written[path] = path.stat().st_mtime
    for path in sorted(written, key=lambda path: written[path], reverse=True):
        bill = read_bill(path.parent, naming=key)
        if bill is not None:
            yield Artifact(path.parent, bill, reused=True)


def fresh_folder(folder: Path) -> Path:
    """An empty folder for an artefact; what an interrupted attempt left half-made is removed."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder
