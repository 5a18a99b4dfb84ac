"""A disk that is full, over its quota, read-only or broken: told as what it is, with the folder and the way out."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from joulelab.errors import JoulelabError, StorageFailed
from joulelab.runs.spec import brief
from joulelab.units import size_text

_TROUBLES = {
    errno.ENOSPC: ("not enough space is left", "free some room"),
    errno.EDQUOT: ("the disk quota is used up", "free some room or ask for more"),
    errno.EROFS: ("the file system may only be read", "make it writable"),
    errno.EIO: ("the disk answered with an input/output error", "see the system's log for the disk"),
}
# How libraries that write by themselves word the system's answer: text is all they hand on.
_WORDS = {"No space left on device": errno.ENOSPC, "Disk quota exceeded": errno.EDQUOT, "os error 28": errno.ENOSPC}
# torch's own writer does not even say that; on a disk with less room than this it can mean nothing else.
_TORCH_WRITER = ("PytorchStreamWriter failed", "inline_container")
_NEARLY_FULL_BYTES = 16 * 2**20


def storage_failure(error: BaseException, folder: Path | None = None) -> StorageFailed | None:
    """What the disk did, if that is what this error comes from; None for any other error."""
    code = next((found for one in _chain(error) if (found := _trouble(one, folder)) is not None), None)
    if code is None:
        return None
    named = next((one.filename for one in _chain(error) if isinstance(one, OSError) and one.filename), None)
    what, way_out = _TROUBLES[code]
    met = f", met at {named}" if named and folder else ""
    return StorageFailed(
        f"{what}{_where(folder or (Path(str(named)) if named else None))}{met}",
        f"{way_out} and go on with it, or name another place: --runs-dir or JOULELAB_RUNS",
    )


def _where(place: Path | None) -> str:
    if place is None:
        return ", on a disk that was written to"
    room = _free_bytes(place.absolute())
    return f" where {place.absolute()} is" + (f" ({size_text(room)} free)" if room is not None else "")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _trouble(error: BaseException, folder: Path | None) -> int | None:
    if isinstance(error, OSError) and error.errno in _TROUBLES:
        return error.errno
    text = str(error)
    known = next((code for words, code in _WORDS.items() if words in text), None)
    if known is None and folder is not None and any(words in text for words in _TORCH_WRITER):
        room = _free_bytes(folder)
        return errno.ENOSPC if room is not None and room < _NEARLY_FULL_BYTES else None
    return known


def _free_bytes(folder: Path) -> int | None:
    """Of the nearest folder above that is there."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


# JSON files that are either the old version or the new one, never half of either.


def write_json(path: Path, value: BaseModel | dict[str, Any]) -> None:
    """To a temporary name, synced, renamed: a reader or a crash never meets a partial file."""
    text = (
        value.model_dump_json(indent=2)
        if isinstance(value, BaseModel)
        else json.dumps(value, indent=2, ensure_ascii=False)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # a full disk: half a file would only take more of it
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise JoulelabError(
            f"{path} is not valid JSON: {error}", "restore it from a copy, or remove the folder"
        ) from None
    if not isinstance(value, dict):
        raise JoulelabError(
            f"{path}: expected a JSON object, found {brief(value)}", "restore it from a copy, or remove the folder"
        )
    return value
