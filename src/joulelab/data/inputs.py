"""What did this input cost? One rule for every model and dataset that a user names, in every pipeline.

1. The bill in the folder (or in the artifact folder that holds the file), with the energy that its run's record states.
2. The bill that an origin note next to the file leads to (`dump.txt.origin.json`).
3. The bill of an artifact in the store with the same content: a copy without its bill.
4. Otherwise the energy is `missing`: it was produced elsewhere.

A folder whose files changed since its bill was written is another model: its bill does not count, and its energy
is `missing` for that reason.
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from joulelab.data import hub, sources
from joulelab.data.sources import Source
from joulelab.runs.artifacts import (
    BILL,
    CARD,
    CONTENTS,
    Bill,
    crc32,
    external,
    find_artifact,
    find_damage,
    listed_contents,
    read_bill,
    with_use,
)
from joulelab.runs.context import RunContext
from joulelab.runs.record import StageRole
from joulelab.runs.store import store_root, with_recorded_energy


def input_bill(
    run: RunContext, name: str, source: str, kind: str, role: StageRole | None, server: str | None = None
) -> Bill:
    """The bill of the model or data set `source`, recorded in the run's lineage under `name`.

    `role` is what the run uses it as, whatever it was made as: see `with_use`. `server` has a model of this name, which
    need not be on this machine.
    """
    if server is not None and not sources.is_on_this_machine(source):
        return run.record_input(name, with_use(external(source, kind, f"{server.rstrip('/')}#{source}"), role))
    place = sources.parse(source)
    bill = None
    if place.path is not None and place.kind != "sample":  # samples are pinned wheels, not made by a run
        bill = find_bill(place.path, (run.store, store_root(None)), run.warn)
    if bill is None and place.path is None:
        commit = hub.commit_of(place, _repo_kind(kind))
        bill = external(source, kind, f"{place.name.partition('@')[0]}@{commit}", commit=commit)
    elif bill is None and place.path is not None:
        identity = f"{source}@{sources.content_hash(place.path)[:16]}"
        changed = None if place.kind == "sample" else _changed_artifact(place.path.absolute())
        bill = external(source, kind, identity) if changed is None else external(source, kind, identity, reason=changed)
    assert bill is not None
    return run.record_input(name, with_use(bill, role))


def keep_recorded_commits(run: RunContext) -> None:
    """Use the commits that earlier attempts of this run recorded, in case a branch on the hub has moved since."""
    for bill in run.earlier_inputs():
        commit = bill.inputs.get("commit")
        if commit is not None:
            hub.pin_commit(Source("hub", bill.artifact.name, None), _repo_kind(bill.artifact.kind), commit)


def _repo_kind(kind: str) -> hub.RepoKind:
    """The kind of repository on the hub, by the kind of an input."""
    return "model" if kind in ("model", "fine-tuned-teacher") else "dataset"


def find_bill(path: Path, stores: Sequence[Path], warn: Callable[[str], None] = lambda text: None) -> Bill | None:
    """The bill of a file or folder that joulelab made, with recorded energy; None for anything else."""
    path = path.absolute()
    found = _bill_in_folder(path, warn) or _bill_by_note(path, stores) or _bill_by_content(path, stores)
    if found is None:
        return None
    folder, bill = found
    return with_recorded_energy(bill, folder.parent.parent.parent, *stores)


def origin_note(path: Path) -> Path:
    """The file that names the artifact of which `path` is a copy."""
    return path.with_name(path.name + ".origin.json")


_Found = tuple[Path, Bill]
"""The folder that holds a bill, and the bill."""


def _bill_in_folder(path: Path, warn: Callable[[str], None]) -> _Found | None:
    """The bill of the innermost artifact folder that `path` is, or is a listed part of."""
    found = _listed_in_folder(path, warn)
    damage = find_damage(found[0]) if found else None
    if found is None or damage is None:
        return found
    folder = found[0]
    warn(f"{folder} has an energy bill, but its files changed since it was written ({damage}): its energy is unknown")
    return None


def _changed_artifact(path: Path) -> str | None:
    """Why the energy of a folder that a run made is unknown although it has a bill; None for anything else."""
    found = _listed_in_folder(path, lambda text: None)
    if found is None or (damage := find_damage(found[0])) is None:
        return None
    return f"its files changed since {found[1].artifact.made_by} made it ({damage}); its energy is unknown"


def _listed_in_folder(path: Path, warn: Callable[[str], None]) -> _Found | None:
    """The same, whether or not its files changed."""
    for folder in (path, *path.parents) if path.is_dir() else path.parents:
        if (folder / BILL).is_file():
            break
        if (folder / "run.json").exists():
            return None
    else:
        return None
    bill = read_bill(folder)
    if bill is None:
        warn(f"{folder / BILL} is not a valid energy bill: the energy of {path} is unknown")
    return None if bill is None or not _is_part(path, folder) else (folder, bill)


def _is_part(path: Path, folder: Path) -> bool:
    """Whether the bill covers `path`, not a model that a user saved inside an artifact folder."""
    part, names = path.relative_to(folder).as_posix(), listed_contents(folder).get("bytes", {})
    return path == folder or part in names or any(name.startswith(f"{part}/") for name in names)


def _bill_by_note(path: Path, stores: Sequence[Path]) -> _Found | None:
    try:
        note = json.loads(origin_note(path).read_text(encoding="utf-8"))
        if note["sha256"] != sources.content_hash(path):
            return None
        folder, key = Path(note["folder"]), note["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    bill = read_bill(folder)
    if bill is not None and bill.key == key:
        return folder, bill
    moved = (find_artifact(store, key) for store in stores)  # the store was moved since the note was written
    return next(((artifact.folder, artifact.bill) for artifact in moved if artifact), None)


def _bill_by_content(path: Path, stores: Sequence[Path]) -> _Found | None:
    """The bill of the newest artifact with the same content; a source of an artifact is not a copy of it."""
    files = _files(path)
    size = max((file.stat().st_size for file in files.values()), default=0)
    for folder in _listing(stores, size) if size else ():
        bill = read_bill(folder)
        if bill is not None and _holds(folder, files, by_name=path.is_dir()):
            content = sources.content_hash(path)[:16]
            is_source = any(ancestor.key.endswith(f"@{content}") for ancestor in bill.ancestry)
            return None if is_source else (folder, bill)
    return None


def _files(path: Path) -> dict[str, Path]:
    if path.is_file():
        return {path.name: path}
    ours = (path / BILL, path / CONTENTS, path / CARD)
    return {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file() and file not in ours}


def _listing(stores: Sequence[Path], size: int) -> Iterator[Path]:
    """Artifacts with a file of this size, the newest first; a list without the number is not parsed."""
    lists: dict[Path, float] = {}
    for store in dict.fromkeys(store.absolute() for store in stores):
        for path in store.glob(f"*/artifacts/*/{CONTENTS}"):
            with suppress(OSError):
                # A text search instead of parsing: a store has thousands of lists, and a file of
                # the same size is rare.
                if str(size).encode() in path.read_bytes():
                    lists[path] = path.stat().st_mtime
    return (path.parent for path in sorted(lists, key=lambda path: lists[path], reverse=True))


def _holds(folder: Path, files: dict[str, Path], by_name: bool) -> bool:
    """Whether these are the artifact's files, or one part of it that is more than half of its bytes."""
    try:
        listed = listed_contents(folder)
    except ValueError:
        return False
    sizes: dict[str, int] = listed.get("bytes", {})
    sums: dict[str, int] = listed.get("crc32", {})

    def same(file: Path, name: str) -> bool:
        if file.stat().st_size != sizes[name]:
            return False
        if name in sums:
            return crc32(file) == sums[name]
        return (folder / name).is_file() and filecmp.cmp(file, folder / name, shallow=False)

    # More than half of the bytes: a shared tokenizer file must not make every model with it a copy
    # of the first one.
    half = sum(sizes.values()) / 2
    if not by_name:  # a single file may have another name by now
        (file,) = files.values()
        return any(sizes[name] > half and same(file, name) for name in sizes)
    prefixes = {"", *(f"{parent}/" for name in sizes for parent in map(str, Path(name).parents) if parent != ".")}
    for prefix in prefixes:
        part = {name.removeprefix(prefix): name for name in sizes if name.startswith(prefix)}
        if part.keys() == files.keys() and sum(sizes[name] for name in part.values()) > half:
            return all(same(files[inner], name) for inner, name in part.items())
    return False
