"""Artefacts on disk: made once inside a run, found again by key, and only whole ones are found."""

from __future__ import annotations

import shutil
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


def read_bill(folder: Path) -> Bill | None:
    """The bill is written last, so a folder without a readable one is unfinished work."""
    try:
        return Bill.model_validate_json((folder / BILL).read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        return None


def write_bill(folder: Path, bill: Bill) -> None:
    write_json(folder / BILL, bill)


def find_artifact(store: Path, key: str) -> Artifact | None:
    """An artefact with this key made by any run of the store; the newest where there are several."""
    for path in sorted(store.glob(f"*/artifacts/*/{BILL}"), key=lambda path: path.stat().st_mtime, reverse=True):
        # a cheap look before the full parse: stores grow to thousands of bills
        if key in path.read_text(encoding="utf-8"):
            bill = read_bill(path.parent)
            if bill is not None and bill.key == key:
                return Artifact(path.parent, bill, reused=True)
    return None


def find_parts(store: Path, key: str) -> list[Artifact]:
    """Shares of the artefact with this key that tasks of a split have finished; of a share made twice the newest.

    Where it was split in several ways, the one of which the most is there: shares of different splits overlap.
    """
    splits: dict[tuple[int, int], dict[int, Artifact]] = {}
    for path in sorted(store.glob(f"*/artifacts/*/{BILL}"), key=lambda path: path.stat().st_mtime, reverse=True):
        if key not in path.read_text(encoding="utf-8"):
            continue
        bill = read_bill(path.parent)
        if bill is not None and bill.artefact.kind.endswith(PART) and bill.inputs.get("whole") == key:
            share = Share.parse(bill.inputs["share"])
            split = splits.setdefault((share.of, bill.inputs["at_once"]), {})
            split.setdefault(share.number, Artifact(path.parent, bill, reused=True))
    best = max(splits, key=lambda split: len(splits[split]) / split[0], default=None)
    return [] if best is None else [splits[best][number] for number in sorted(splits[best])]


def fresh_folder(folder: Path) -> Path:
    """An empty folder for an artefact; what an interrupted attempt left half-made is removed."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder
