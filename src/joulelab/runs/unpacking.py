"""Open an archive of `joulelab pack` without trusting it: names stay inside, sums are checked, all or nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

from joulelab.errors import NotFoundError, UsageError
from joulelab.runs.packing import FORMAT, MANIFEST, SUMS, TOP
from joulelab.runs.storage import storage_failure

# A year of eight cards is a few gigabytes; an archive that claims more means to fill the disk.
LARGEST_BYTES = 200 << 30
MOST_FILES = 2_000_000
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError)


def unpack(archive: Path, into: Path) -> Path:
    """Extract into a new folder, which appears only when every file is there and is what its sum says."""
    if not archive.is_file():
        raise NotFoundError(f"no such file: {archive}", "give the archive that `joulelab pack` has written")
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise UsageError(f"{into} is there already", "--out names another folder")
    into.absolute().parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f".{into.name}-", dir=into.absolute().parent))
    try:
        sums = _extract(archive, place)
        _require_whole(archive, place, sums)
        if into.exists():
            into.rmdir()
        place.chmod(0o755)
        place.replace(into)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return into


def _extract(archive: Path, place: Path) -> dict[str, str]:
    """Write every file; name -> sum of what was written."""
    sums: dict[str, str] = {}
    total = 0
    try:
        for name, size, content in _members(archive):
            target = place / _inside(archive, name)
            total += size
            if total > LARGEST_BYTES or len(sums) >= MOST_FILES:
                raise UsageError(f"{archive} claims to hold {total} bytes in {len(sums)} files", "it is not opened")
            inner = target.relative_to(place).as_posix()
            if inner in sums:
                raise UsageError(f"{archive} holds {inner} twice", "it was not made by `joulelab pack`")
            target.parent.mkdir(parents=True, exist_ok=True)
            sums[inner] = _copy(content, target, size)
    except _DAMAGE as error:
        if storage_failure(error) is not None:
            raise
        raise UsageError(
            f"{archive} is corrupted or not an archive ({type(error).__name__}: {error}); expected a .tar.gz or .zip "
            "file that `joulelab pack` wrote",
            "get another copy of it, or name another file",
        ) from None
    return sums


def _copy(content: IO[bytes], target: Path, size: int) -> str:
    digest, left = hashlib.sha256(), size
    with target.open("xb") as file:
        while block := content.read(min(1 << 20, left + 1)):
            left -= len(block)
            if left < 0:
                raise ValueError(f"{target.name} is longer than it says")
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def _members(archive: Path) -> Iterator[tuple[str, int, Any]]:
    """(name, size, content) of every file; anything that is no plain file is refused."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for entry in opened.infolist():
                kind = stat.S_IFMT(entry.external_attr >> 16)
                if entry.is_dir():
                    continue
                if kind not in (0, stat.S_IFREG):
                    raise UsageError(f"{archive} holds {entry.filename}, which is no plain file", "not opened")
                with opened.open(entry) as content:
                    yield entry.filename, entry.file_size, content
        return
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if member.isdir():
                continue
            if not member.isreg():
                raise UsageError(f"{archive} holds {member.name}, which is no plain file", "it is not opened")
            yield member.name, member.size, tar.extractfile(member)


def _inside(archive: Path, name: str) -> PurePosixPath:
    """The name below our top folder; one that leads out of it is refused."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise UsageError(f"{archive} holds the name {name!r}, which leads out of its folder", "it is not opened")
    if len(path.parts) < 2 or path.parts[0] != TOP:
        raise UsageError(
            f"{archive} was not made by `joulelab pack`: it holds {name!r}", "joulelab pack RUN -o x.tar.gz makes one"
        )
    return PurePosixPath(*path.parts[1:])


def _require_whole(archive: Path, place: Path, found: dict[str, str]) -> None:
    if SUMS not in found or MANIFEST not in found:
        raise UsageError(
            f"{archive} was not made by `joulelab pack`: it has no {SUMS} or no {MANIFEST}",
            "joulelab pack RUN -o x.tar.gz makes an archive",
        )
    try:
        lines = (place / SUMS).read_text(encoding="utf-8").splitlines()
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
        version = json.loads((place / MANIFEST).read_text(encoding="utf-8"))["format"]
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{archive}: {SUMS} or {MANIFEST} cannot be read", "get another copy of it") from None
    if version != FORMAT:
        raise UsageError(f"{archive} has format {version}; this version reads {FORMAT}", "install a newer joulelab")
    listed = {name: digest for name, digest in found.items() if name != SUMS}
    wrong = [f"{name} differs" for name in expected if name in listed and listed[name] != expected[name]]
    wrong += [f"{name} is missing" for name in expected if name not in listed]
    wrong += [f"{name} is not in {SUMS}" for name in listed if name not in expected]
    if wrong:
        shown = "; ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise UsageError(f"{archive} is not what was packed, by {SUMS}: {shown}", "get another copy of it")
