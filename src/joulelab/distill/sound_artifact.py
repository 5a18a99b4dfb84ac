"""Artefacts that are looked at before they are taken again: a bill says that one was made, not that it is still whole.

A disk loses files, and people tidy up. Each artefact has a list of its files with their sizes; one that does not agree
with it, or that its own reader cannot open, is set aside by renaming its bill, so that nobody finds it any more, and is
made anew. Its joules stay on the record of the run that made it: they were spent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from joulelab.data.damage import words_for
from joulelab.errors import JoulelabError
from joulelab.runs.artifacts import Artifact, read_bill
from joulelab.runs.bills import BILL, Bill
from joulelab.runs.context import RunContext
from joulelab.runs.json_file import read_json, write_json

CONTENTS = "contents.json"
SET_ASIDE = "bill.damaged.json"
"""What the bill of a damaged artefact is called from then on."""
Opens = Callable[[Path], object]


def sound_artifact(
    run: RunContext,
    name: str,
    *,
    kind: str,
    inputs: Mapping[str, Any],
    parents: Sequence[Bill],
    make: Callable[[Path], None],
    reuse: bool = True,
    opens: Opens | None = None,
) -> Artifact:
    """`run.artifact`, of which only whole ones are taken; `opens` fails where the content has come to harm."""

    def make_and_list(folder: Path) -> None:
        make(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
        write_json(folder / CONTENTS, {"bytes": sizes})

    forget_damaged(run, name, run.key_of(kind, inputs, [parent.key for parent in parents]), opens, others=reuse)
    return run.artifact(name, kind=kind, inputs=inputs, parents=parents, make=make_and_list, reuse=reuse)


def forget_damaged(run: RunContext, name: str, key: str, opens: Opens | None = None, others: bool = True) -> None:
    """Of this run's artefacts with this key, and where asked of all others', set aside those that are not whole."""
    while (found := _found(run, name, key, others)) is not None:
        folder, made_by = found
        harm = _harm(folder, opens)
        if harm is None:
            return
        run.warn(f"{name}, made by {made_by}, is damaged and is made again: {harm}")
        _set_aside(folder)


def _found(run: RunContext, name: str, key: str, others: bool) -> tuple[Path, str] | None:
    own = read_bill(run.paths.artifacts / name)
    if own is not None and own.key == key:
        return run.paths.artifacts / name, own.artefact.made_by
    other = run.found(key) if others else None
    return None if other is None else (other.folder, other.bill.artefact.made_by)


def _harm(folder: Path, opens: Opens | None) -> str | None:
    try:
        listed = read_json(folder / CONTENTS)["bytes"] if (folder / CONTENTS).exists() else {}
        for name, written in listed.items():
            path = folder / name
            if not path.exists():
                return f"{name} is missing"
            if path.stat().st_size != written:
                return f"{name} has {path.stat().st_size:,} bytes, and {written:,} were written"
        if opens is not None:
            opens(folder)
    except (JoulelabError, OSError, ValueError, KeyError, TypeError) as error:
        return words_for(error)
    return None


def _set_aside(folder: Path) -> None:
    try:
        with suppress(FileNotFoundError):  # another rank was quicker
            (folder / BILL).replace(folder / SET_ASIDE)
    except OSError as error:
        raise JoulelabError(
            f"{folder} is damaged and cannot be set aside: {error}", "set reuse_artifacts=false to make it again"
        ) from error
