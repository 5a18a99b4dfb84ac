"""Archives of runs that others can open, check and recompute: records, traces, environment, settings, checksums.

Only known files of a run are packed, so nothing is included by accident. The same runs give the same bytes: sorted
names, no times, no owners. Secrets are removed before a run is written; texts are searched once more before they are
packed, because files may have been edited or written by an earlier version. `unpack` does not trust an archive: names
stay inside the target folder, checksums are verified, and either all files are extracted or none.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

from joulelab import __version__
from joulelab.errors import NotFoundError, StorageFailed, UsageError
from joulelab.redaction import redact_text
from joulelab.runs.artifacts import BILL, CONTENTS
from joulelab.runs.groups import group_yaml, load_group
from joulelab.runs.paths import GROUPS_FOLDER, GroupPaths, RunPaths, storage_failure
from joulelab.runs.store import current_record, read_record
from joulelab.units import plural, size_text

GROUP_SETTINGS = "group.yaml"
TOP, STORE, MANIFEST, SUMS, README = "joulelab-pack", "runs", "MANIFEST.json", "SHA256SUMS", "README.txt"
FORMAT = 1
_OF_A_RUN = (
    *("run.json", "config.yaml", "environment.json", "experiment_summary.json", "metrics.jsonl", "windows.jsonl"),
    *("report.html", "stages/*.json", "events/*.jsonl", "events/*.ring", "trace/*.jsonl", "trace/*.parquet"),
    *("codecarbon/*.csv", "codecarbon/*.jsonl"),
    *(f"artifacts/*/{name}" for name in (BILL, CONTENTS, "predictions.npz")),
    *(f"artifacts/*/{name}" for name in ("answers.json", "harness.json", "scores.json")),
)
_READINGS = ("trace/",)
"""Sensor readings: too large to search for secrets, and numeric, so they cannot contain one."""
_TEXTS = (".json", ".jsonl", ".yaml", ".csv", ".html")
_README = """This archive was made by `joulelab pack` (joulelab {version}).

Check its integrity:         sha256sum -c SHA256SUMS
Recompute every figure:      install joulelab, then: joulelab unpack --verify ARCHIVE
List the runs in it:         joulelab runs --runs-dir runs      (reports: runs/*/report.html)

Run a group again:           joulelab run runs/groups/GROUP/group.yaml

run.json is the record of a run, trace/ the sensor readings, events/ the marks of its stages, config.yaml its
settings, environment.json the machine and packages; group.yaml the members of a group. {redacted}
"""


@dataclass(frozen=True)
class Entry:
    """One file of the archive: its name, and its content or path."""

    name: str
    content: bytes | None = None
    path: Path | None = None

    @contextmanager
    def open(self) -> Iterator[Any]:
        if self.path is None:
            yield io.BytesIO(self.content or b"")
            return
        with self.path.open("rb") as file:
            yield file

    @property
    def size(self) -> int:
        return len(self.content or b"") if self.path is None else self.path.stat().st_size

    def digest(self) -> str:
        with self.open() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Packed:
    archive: Path
    runs: tuple[str, ...]
    files: int
    size_bytes: int
    redacted: dict[str, int]
    """Files with redacted secrets, and their number in each."""


def pack(
    runs: Sequence[Path], groups: Sequence[Path], archive: Path, artifacts: bool = False, redact: bool = False
) -> Packed:
    """Write the archive; it gets its final name only when it is complete. A secret is refused, or with `redact`
    replaced in the archive."""
    write = _writer(archive)
    _require_distinct_names([*runs, *groups])
    redacted: dict[str, list[int]] = {}
    entries = [entry for folder in runs for entry in _run_entries(folder, artifacts, redacted)]
    entries += [entry for folder in groups for entry in _group_entries(folder, redacted)]
    if redacted and not redact:
        raise _secrets_found(redacted)
    counts = {name: len(lines) for name, lines in redacted.items()}
    entries += _about([folder.name for folder in runs], [folder.name for folder in groups], counts)
    entries.sort(key=lambda entry: entry.name)
    sums = "".join(f"{entry.digest()}  {entry.name}\n" for entry in entries)
    entries.append(Entry(SUMS, sums.encode()))
    temporary = archive.with_name(f".{archive.name}.{os.getpid()}.tmp")
    archive.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            write(file, entries)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(archive)
    finally:
        temporary.unlink(missing_ok=True)
    names = tuple(folder.name for folder in runs)
    return Packed(archive, names, len(entries), archive.stat().st_size, counts)


def _require_distinct_names(folders: Sequence[Path]) -> None:
    known: dict[str, Path] = {}
    for folder in folders:
        if (other := known.setdefault(folder.name, folder)) != folder:
            raise UsageError(
                f"{other} and {folder} have the same name, which is that of their folder in the archive",
                "pack them into two archives",
            )


def _run_entries(folder: Path, artifacts: bool, redacted: dict[str, list[int]]) -> Iterator[Entry]:
    paths = RunPaths(folder)
    written = read_record(paths)
    record = current_record(paths, written)
    if record.status == "running":
        raise UsageError(f"{record.run_id} is still running", "wait for it to end, or stop it, then pack it")
    patterns = (*_OF_A_RUN, "artifacts/**/*") if artifacts else _OF_A_RUN
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file() and not path.is_symlink()}
    for path in sorted(files):
        name = path.relative_to(folder).as_posix()
        if path == paths.record and written.status == "running":  # killed: its record is derived from the trace
            yield _text_entry(f"{STORE}/{folder.name}/{name}", record.model_dump_json(indent=2) + "\n", redacted)
        elif path.suffix in _TEXTS and not name.startswith(_READINGS):
            text = path.read_bytes().decode("utf-8", errors="surrogateescape")  # keeps line endings
            yield _text_entry(f"{STORE}/{folder.name}/{name}", text, redacted)
        else:
            yield Entry(f"{STORE}/{folder.name}/{name}", path=path)


def _group_entries(folder: Path, redacted: dict[str, list[int]]) -> Iterator[Entry]:
    paths = GroupPaths(folder)
    for path in (paths.record, paths.report):
        if path.is_file():
            name = f"{STORE}/{GROUPS_FOLDER}/{folder.name}/{path.name}"
            yield _text_entry(name, path.read_text(encoding="utf-8", errors="surrogateescape"), redacted)
    if paths.record.is_file():
        name = f"{STORE}/{GROUPS_FOLDER}/{folder.name}/{GROUP_SETTINGS}"
        yield _text_entry(name, group_yaml(load_group(folder)), redacted)


def _text_entry(name: str, text: str, redacted: dict[str, list[int]]) -> Entry:
    """The file without its secrets; their lines are added to `redacted`, each line as often as it has secrets."""
    clean, count = redact_text(text)
    if count:
        lines = [number for number, line in enumerate(text.split("\n"), 1) for _ in range(redact_text(line)[1])]
        redacted[name] = (lines or [1])[:count] + [(lines or [1])[-1]] * (count - len(lines or [1]))
    return Entry(name, clean.encode("utf-8", errors="surrogateescape"))


def _about(runs: list[str], groups: list[str], redacted: dict[str, int]) -> list[Entry]:
    manifest = {
        "format": FORMAT,
        "joulelab": __version__,
        "runs": sorted(runs),
        "groups": sorted(groups),
        "redacted": dict(sorted(redacted.items())),
    }
    note = "Text that looked like a secret was replaced; MANIFEST.json lists the files." if redacted else ""
    readme = _README.format(version=__version__, redacted=note)
    return [Entry(MANIFEST, json.dumps(manifest, indent=2).encode() + b"\n"), Entry(README, readme.encode())]


def _secrets_found(redacted: dict[str, list[int]]) -> UsageError:
    places = [f"{name.removeprefix(f'{STORE}/')}, line {line}" for name, lines in redacted.items() for line in lines]
    shown = "; ".join(dict.fromkeys(places[:5])) + (f"; and {len(places) - 5} more" if len(places) > 5 else "")
    return UsageError(
        f"{plural(len(places), 'text')} in these runs {'looks' if len(places) == 1 else 'look'} like a secret: {shown}",
        "remove it from the file, or pass --redact to replace it in the archive; nothing was written",
    )


class _Write(Protocol):
    def __call__(self, file: IO[bytes], entries: Sequence[Entry]) -> None: ...


def require_archive_name(archive: Path) -> None:
    if archive.is_dir():
        raise UsageError(f"{archive} is a folder", f"name a file: {archive / 'runs.tar.gz'}")
    _writer(archive)


def _writer(archive: Path) -> _Write:
    if archive.name.endswith((".tar.gz", ".tgz")):
        return _write_tar
    if archive.suffix == ".zip":
        return _write_zip
    raise UsageError(f"{archive.name}: unknown archive format", "use a name that ends with .tar.gz or .zip")


def _write_tar(file: IO[bytes], entries: Sequence[Entry]) -> None:
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for entry in entries:
            facts = tarfile.TarInfo(f"{TOP}/{entry.name}")
            facts.size, facts.mode, facts.mtime = entry.size, 0o644, 0
            with entry.open() as content:
                tar.addfile(facts, content)


def _write_zip(file: IO[bytes], entries: Sequence[Entry]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for entry in entries:
            facts = zipfile.ZipInfo(f"{TOP}/{entry.name}", (1980, 1, 1, 0, 0, 0))
            facts.compress_type, facts.create_system, facts.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
            facts.file_size = entry.size
            with entry.open() as content, archive.open(facts, "w") as target:
                while block := content.read(1 << 20):
                    target.write(block)


# A year of traces of eight GPUs is a few gigabytes; an archive that claims more would fill the disk.
LARGEST_BYTES = 200 << 30
MOST_FILES = 2_000_000
_DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError)


def unpack(archive: Path, into: Path) -> Path:
    """Extract into a new folder, which appears only when every file is complete and matches its checksum."""
    if not archive.is_file():
        what = f"{archive} is a folder" if archive.is_dir() else f"no such file: {archive}"
        raise NotFoundError(what, "pass an archive written by `joulelab pack`")
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise UsageError(f"{into} already exists", "choose another folder with --out")
    into.absolute().parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{into.name}-", dir=into.absolute().parent))
    try:
        sums = _extract(archive, temporary)
        _check_sums(archive, temporary, sums)
        if into.exists():
            into.rmdir()
        temporary.chmod(0o755)
        temporary.replace(into)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return into


def _extract(archive: Path, folder: Path) -> dict[str, str]:
    """Write every file; returns name -> SHA-256 of what was written."""
    sums: dict[str, str] = {}
    total, free = 0, shutil.disk_usage(folder).free
    try:
        for name, size, content in _members(archive):
            target = folder / _inner_path(archive, name)
            total += size
            if total > LARGEST_BYTES or len(sums) >= MOST_FILES:
                raise UsageError(
                    f"{archive} claims to contain {total} bytes in {len(sums)} files", "it was not unpacked"
                )
            if total > free:  # before the disk is full, which would stop others who write to it
                raise StorageFailed(
                    f"{archive} contains at least {size_text(total)}; the disk of {folder.parent} has "
                    f"{size_text(free)} free",
                    "free some space, or choose another folder with --out",
                )
            inner = target.relative_to(folder).as_posix()
            if inner in sums:
                raise UsageError(f"{archive} contains {inner} twice", "it was not made by `joulelab pack`")
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
                raise ValueError(f"{target.name} is longer than its header states")
            digest.update(block)
            file.write(block)
    return digest.hexdigest()


def _members(archive: Path) -> Iterator[tuple[str, int, Any]]:
    """(name, size, content) of every file; links and special files are refused."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for entry in opened.infolist():
                kind = stat.S_IFMT(entry.external_attr >> 16)
                if entry.is_dir():
                    continue
                if kind not in (0, stat.S_IFREG):
                    raise UsageError(
                        f"{archive} contains {entry.filename}, which is not a regular file", "it was not unpacked"
                    )
                with opened.open(entry) as content:
                    yield entry.filename, entry.file_size, content
        return
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            if member.isdir():
                continue
            if not member.isreg():
                raise UsageError(
                    f"{archive} contains {member.name}, which is not a regular file", "it was not unpacked"
                )
            yield member.name, member.size, tar.extractfile(member)


def _inner_path(archive: Path, name: str) -> PurePosixPath:
    """The path below the top folder; one that leads out of it is refused."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise UsageError(
            f"{archive} contains the path {name!r}, which points outside its folder", "it was not unpacked"
        )
    if len(path.parts) < 2 or path.parts[0] != TOP:
        raise UsageError(
            f"{archive} was not made by `joulelab pack`: it contains {name!r}",
            "joulelab pack RUN -o x.tar.gz makes one",
        )
    return PurePosixPath(*path.parts[1:])


def _check_sums(archive: Path, folder: Path, found: dict[str, str]) -> None:
    if found and (SUMS not in found or MANIFEST not in found):  # after a damaged header tarfile sees no more files
        raise UsageError(f"{archive} is corrupted: it has no {SUMS} or no {MANIFEST}", "get another copy of it")
    if not found:
        raise UsageError(
            f"{archive} was not made by `joulelab pack`: it is empty",
            "joulelab pack RUN -o x.tar.gz makes an archive",
        )
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
        version = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["format"]
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
        raise UsageError(f"{archive} does not match its {SUMS}: {shown}", "get another copy of it")
