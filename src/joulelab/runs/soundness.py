"""Artefacts are looked at before they are taken again: a bill says that one was made, not that it is still whole.

A disk loses files, and people tidy up. Beside its bill every artefact has a list of its files: their sizes, and a CRC32
of the smallest ones up to `SUMMED_BYTES` together, so that a flipped byte is seen where looking costs little. The
larger ones are told by their sizes alone: reading a cache of hidden states takes longer than some trainings. Files
that came later are nobody's harm, and a link counts as what it leads to.

One that does not agree with its list, or that its own reader cannot open, is set aside by renaming its bill, so that
nobody finds it any more. Its joules stay on the record of the run that made it: they were spent.
"""

from __future__ import annotations

import errno
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from joulelab.errors import DependencyMissing, EndedBySignal, JoulelabError
from joulelab.runs.bills import BILL
from joulelab.runs.json_file import read_json, write_json

CONTENTS = "contents.json"
SET_ASIDE = "bill.damaged.json"
"""What the bill of a damaged artefact is called from then on."""
SUMMED_BYTES = 128 * 2**20
"""A twentieth of a second on one core, and the models of the demo are within it."""
Opens = Callable[[Path], object]
"""Reads an artefact's folder, and fails where the content has come to harm that the list does not show."""
_BLOCK_BYTES = 1 << 20
_NO_DAMAGE = (EndedBySignal, DependencyMissing, MemoryError)
"""What may befall a reader of sound files."""
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What this machine has none left of; the files may be sound, and hours of work lie in them."""


def list_contents(folder: Path) -> None:
    """Of what was just made. The bill comes later and changes when the run ends: it is not on the list."""
    _refuse_to_replace(folder / CONTENTS)
    files = [path for path in folder.rglob("*") if path.is_file() and path not in (folder / BILL, folder / CONTENTS)]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(files)}
    sums, left = {}, SUMMED_BYTES
    for name in sorted(sizes, key=lambda name: sizes[name]):
        left -= sizes[name]
        if left < 0:
            break
        sums[name] = crc32(folder / name)
    write_json(folder / CONTENTS, {"bytes": sizes, "crc32": sums})


def harm(folder: Path, opens: Opens | None = None) -> str | None:
    """What is wrong with the artefact in words, or nothing. One of an older version without a list is not compared."""
    try:
        listed = listed_contents(folder)
        sums = listed.get("crc32", {})
        for name, written in listed.get("bytes", {}).items():
            path = folder / name
            if not path.exists():
                return f"{name} is missing"
            if path.stat().st_size != written:
                return f"{name} has {path.stat().st_size:,} bytes, and {written:,} were written"
            if name in sums and crc32(path) != sums[name]:
                return f"{name} does not hold the bytes that were written"
        if opens is not None:
            opens(folder)
    except _NO_DAMAGE:
        raise
    except Exception as error:  # readers of torch, numpy and zlib have each their own for bytes that make no sense
        if isinstance(error, OSError) and error.errno in _SHORT_OF:
            raise
        return words_for(error)
    return None


def set_aside(folder: Path) -> None:
    with suppress(OSError):  # another run was quicker, or may not write here; whoever looks sees the harm again
        (folder / BILL).replace(folder / SET_ASIDE)


def words_for(error: Exception) -> str:
    """A key that a file lacks is told by Python as the bare key, and some errors tell nothing but their name."""
    if isinstance(error, KeyError) and error.args:
        return f"it does not say {error.args[0]}"
    return str(error) or type(error).__name__


def listed_contents(folder: Path) -> dict[str, Any]:
    """`bytes` and `crc32` by file name; empty for an artifact of an old version, which has no list."""
    return _read(folder / CONTENTS)


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return crc


def _refuse_to_replace(path: Path) -> None:
    """A list that came along with a copy of another artefact is ours; a file of the maker's would be lost."""
    try:
        is_ours = "bytes" in _read(path) or not path.exists()
    except (JoulelabError, ValueError):
        is_ours = False
    if not is_ours:
        raise JoulelabError(f"{path} has the name of the list of the artefact's files", "give it another name")
