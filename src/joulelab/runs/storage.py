"""JSON files that are written atomically, and explanations of storage errors: full, over quota, read-only, broken."""

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

_FAILURES = {
    errno.ENOSPC: ("no space left", "free some space"),
    errno.EDQUOT: ("disk quota exceeded", "free some space or request a larger quota"),
    errno.EROFS: ("read-only file system", "make it writable"),
    errno.EIO: ("input/output error", "check the system log for disk errors"),
}
# Libraries that write files in native code report the system error as text only.
_MESSAGES = {"No space left on device": errno.ENOSPC, "Disk quota exceeded": errno.EDQUOT, "os error 28": errno.ENOSPC}
# torch's writer omits the system error; with less free space than this, a full disk is the only likely cause.
_TORCH_WRITER = ("PytorchStreamWriter failed", "inline_container")
_NEARLY_FULL_BYTES = 16 * 2**20


def storage_failure(error: BaseException, folder: Path | None = None) -> StorageFailed | None:
    """The storage problem that caused this error; None for any other error."""
    chain = list(_chain(error))
    code = next((code for cause in chain if (code := _error_code(cause, folder)) is not None), None)
    if code is None:
        return None
    filename = next((cause.filename for cause in chain if isinstance(cause, OSError) and cause.filename), None)
    problem, fix = _FAILURES[code]
    written = f", while writing {filename}" if filename and folder else ""
    return StorageFailed(
        f"{problem}{_location(folder or (Path(str(filename)) if filename else None))}{written}",
        f"{fix} and resume, or choose another directory with --runs-dir or JOULELAB_RUNS",
    )


def _location(path: Path | None) -> str:
    if path is None:
        return " on the disk that was written to"
    free = _free_bytes(path.absolute())
    return f" on the disk of {path.absolute()}" + (f" ({size_text(free)} free)" if free is not None else "")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _error_code(error: BaseException, folder: Path | None) -> int | None:
    if isinstance(error, OSError) and error.errno in _FAILURES:
        return error.errno
    text = str(error)
    known = next((code for message, code in _MESSAGES.items() if message in text), None)
    if known is None and folder is not None and any(message in text for message in _TORCH_WRITER):
        free = _free_bytes(folder)
        return errno.ENOSPC if free is not None and free < _NEARLY_FULL_BYTES else None
    return known


def _free_bytes(folder: Path) -> int | None:
    """On the disk of the nearest existing parent."""
    for path in (folder, *folder.parents):
        try:
            return shutil.disk_usage(path).free
        except OSError:
            continue
    return None


def write_json(path: Path, value: BaseModel | dict[str, Any]) -> None:
    """Write to a temporary file, fsync, rename: readers see the old or the new version, never a partial file."""
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
    except OSError:  # a partial file would occupy the full disk further
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise JoulelabError(
            f"{path} is not valid JSON: {error}", "restore it from a backup, or remove the folder"
        ) from None
    if not isinstance(value, dict):
        raise JoulelabError(
            f"{path}: expected a JSON object, found {brief(value)}", "restore it from a backup, or remove the folder"
        )
    return value
