"""What a step made, under the name the user gave it, with a note that leads back to the artefact and its bill.

The note stands beside the file (`dump.txt.origin.json`). A later step that is given the file finds the bill through it,
so a student's lineage has the joules of its data even where every step was a command of its own. Content that was
changed since, or whose run is gone, is a thing from elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from joulelab.data import sources
from joulelab.data.token_store import is_store
from joulelab.errors import ConfigError
from joulelab.runs.artifacts import Artifact, read_bill
from joulelab.runs.bills import BILL, Bill, external
from joulelab.runs.context import RunContext
from joulelab.runs.json_file import write_json
from joulelab.runs.soundness import CONTENTS


def deliver(artifact: Artifact, made: Path, target: Path) -> None:
    """A copy: the user may move or change it, and the artefact stays what its bill is for."""
    _refuse_to_replace(made, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    if made.is_dir():
        shutil.copytree(made, fresh, ignore=shutil.ignore_patterns(BILL, CONTENTS))
    else:
        shutil.copyfile(made, fresh)
    if target.is_dir():
        shutil.rmtree(target)
    fresh.replace(target)
    note = {"key": artifact.key, "folder": str(artifact.folder.absolute()), "sha256": sources.content_hash(target)}
    write_json(_note_of(target), note)


def bill_of(run: RunContext, name: str, path: Path, kind: str, written: str | None = None) -> Bill:
    """Of something the user named: the bill of the artefact it is a copy of, or of a thing from elsewhere."""
    written = written or str(path)
    sha256 = sources.content_hash(path)
    bill = _original(path, sha256)
    return run.uses(name, bill if bill is not None else external(written, kind, f"{written}@{sha256[:16]}"))


def delivered_bill(path: Path) -> Bill | None:
    """Of a copy that a step delivered and nobody has changed since; nothing for any other file or folder."""
    return _original(path, sources.content_hash(path)) if _note_of(path).is_file() and path.exists() else None


def _original(path: Path, sha256: str) -> Bill | None:
    try:
        note = json.loads(_note_of(path).read_text(encoding="utf-8"))
        bill = read_bill(Path(note["folder"]))
        return bill if bill is not None and note["sha256"] == sha256 and bill.key == note["key"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _note_of(path: Path) -> Path:
    return path.with_name(path.name + ".origin.json")


def _refuse_to_replace(made: Path, target: Path) -> None:
    """--force is for what we wrote, not for a folder of the user's that happens to have the name."""
    ours = is_store(target) or (target / "config.json").is_file()
    if target.exists() and target.is_dir() and not (made.is_dir() and ours):
        raise ConfigError(f"{target} is a folder with something else in it", "name another")
