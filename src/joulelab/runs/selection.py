"""Runs as people name them on a command line: ids, parts of ids, folders, `last`, patterns, and groups for all their
members."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from joulelab.errors import NotFoundError, UsageError
from joulelab.runs.groups import load_group
from joulelab.runs.paths import GroupPaths
from joulelab.runs.store import find_folder, load_record, run_folders, stores_of


def is_pattern(name: str) -> bool:
    """Shell wildcards, unless a run's folder is really called that."""
    named = any((Path(name) / record).exists() for record in ("run.json", "group.json"))
    return not named and any(mark in name for mark in "*?[")


def folders_named(store: Path, name: str) -> list[Path]:
    """The run or group of that name, or all runs that fit a pattern: 'demo-kd-*'."""
    if not is_pattern(name):
        return [find_folder(store, name)]
    found = [folder for folder in run_folders(store) if fnmatch.fnmatch(folder.name, name)]
    if not found:
        raise NotFoundError(f"no run fits '{name}' under {store.absolute()}", "`joulelab runs` lists them")
    return found


def run_folders_of(store: Path, names: Sequence[str]) -> list[Path]:
    """Every run that was named, alone or by its group, once, in the order of the names."""
    found: dict[Path, None] = {}
    for folder in (folder for name in names for folder in folders_named(store, name)):
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
    folders = (folder for name in names for folder in folders_named(store, name))
    return [folder for folder in dict.fromkeys(folders) if (folder / "group.json").exists()]


def with_ancestors(folders: Sequence[Path]) -> list[Path]:
    """The runs and those of the same store that made what they used, and so on."""
    found = dict.fromkeys(folders)
    waiting = list(folders)
    while waiting:
        folder = waiting.pop()
        record = load_record(folder)
        for ancestor, store in product(record.inherited, stores_of(folder, record.store)):
            maker = store / ancestor.made_by
            if maker not in found and (maker / "run.json").exists():
                found[maker] = None
                waiting.append(maker)
    return list(found)
