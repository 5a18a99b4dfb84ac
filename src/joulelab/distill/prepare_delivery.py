"""What a step made, under the name the user gave it, with a note that leads back to the artifact and its bill.

The note is next to the file (`dump.txt.origin.json`). A later step that is given the file finds the bill through it
(`data.inputs`), so a student's lineage has the energy of its data even where every step was a command of its own.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from joulelab.data import sources
from joulelab.data.inputs import origin_note
from joulelab.data.token_store import is_store
from joulelab.errors import ConfigError
from joulelab.runs.artifacts import BILL, CONTENTS, Artifact
from joulelab.runs.storage import write_json


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
    write_json(origin_note(target), note)


def _refuse_to_replace(made: Path, target: Path) -> None:
    """--force is for what we wrote, not for a folder of the user's that happens to have the name."""
    ours = is_store(target) or (target / "config.json").is_file()
    if target.exists() and target.is_dir() and not (made.is_dir() and ours):
        raise ConfigError(f"{target} is a folder with something else in it", "name another")
