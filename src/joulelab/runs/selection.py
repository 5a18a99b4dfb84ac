"""Runs as people name them on a command line: ids, parts of ids, folders, `last`, and groups for all their members."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from joulelab.errors import UsageError
from joulelab.runs.groups import load_group
from joulelab.runs.paths import GroupPaths
from joulelab.runs.store import find_folder, load_record


def run_folders_of(store: Path, names: Sequence[str]) -> list[Path]:
    """Every run that was named, alone or by its group, once, in the order of the names."""
    found: dict[Path, None] = {}
    for name in names:
        folder = find_folder(store, name)
        if not (folder / "group.json").exists():
            found[folder] = None
            continue
        members = [GroupPaths(folder).store / member.run_id for member in load_group(folder).members if member.run_id]
        started = [member for member in members if (member / "run.json").exists()]
        if not started:
            raise UsageError(f"no run of the group {folder.name} is in the store", "name a run")
        found |= dict.fromkeys(started)
    return list(found)


def group_folders_of(store: Path, names: Sequence[str]) -> list[Path]:
    folders = (find_folder(store, name) for name in names)
    return [folder for folder in dict.fromkeys(folders) if (folder / "group.json").exists()]


def with_ancestors(folders: Sequence[Path]) -> list[Path]:
    """The runs and those of the same store that made what they used, and so on."""
    found = dict.fromkeys(folders)
    waiting = list(folders)
    while waiting:
        folder = waiting.pop()
        for ancestor in load_record(folder).inherited:
            maker = folder.parent / ancestor.made_by
            if maker not in found and (maker / "run.json").exists():
                found[maker] = None
                waiting.append(maker)
    return list(found)
