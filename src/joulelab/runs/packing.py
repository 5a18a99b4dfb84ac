"""An archive that somebody else can open, check and recompute: records, traces, environment, settings, report, sums.

Only files that a run is known to have go in, so nothing comes along by accident. The same runs give the same bytes:
names in order, no times, no owners.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from joulelab import __version__
from joulelab.errors import UsageError
from joulelab.runs.bills import BILL
from joulelab.runs.pack_secrets import without_secrets
from joulelab.runs.paths import GROUPS_FOLDER, GroupPaths, RunPaths
from joulelab.runs.soundness import CONTENTS
from joulelab.runs.store import read_record, settle

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
"""Numbers of sensors, too large to be searched for secrets and without a place for one."""
_TEXTS = (".json", ".jsonl", ".yaml", ".csv", ".html")
_README = """This archive was made by `joulelab pack` (joulelab {version}).

Check that it is whole:      sha256sum -c SHA256SUMS
Recompute every figure:      pip install joulelab, then: joulelab unpack --verify ARCHIVE
Look at the runs in it:      joulelab runs --runs-dir runs      (reports: runs/*/report.html)

run.json holds the record of a run, trace/ what the sensors said, events/ the marks of its stages, config.yaml its
settings, environment.json the machine and packages. {redacted}
"""


@dataclass(frozen=True)
class Entry:
    """One file of the archive: its name in it, and its bytes or where they are."""

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
    """Files from which secrets were taken out, and how many."""


def pack(runs: Sequence[Path], groups: Sequence[Path], archive: Path, artifacts: bool = False) -> Packed:
    """Write the archive; it has its name only when it is whole."""
    write = _writer(archive)
    redacted: dict[str, int] = {}
    entries = [entry for folder in runs for entry in _run_entries(folder, artifacts, redacted)]
    entries += [entry for folder in groups for entry in _group_entries(folder, redacted)]
    entries += _about([folder.name for folder in runs], [folder.name for folder in groups], redacted)
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
    return Packed(archive, names, len(entries), archive.stat().st_size, redacted)


def _run_entries(folder: Path, artifacts: bool, redacted: dict[str, int]) -> Iterator[Entry]:
    paths = RunPaths(folder)
    written = read_record(paths)
    record = settle(paths, written)
    if record.status == "running":
        raise UsageError(f"{record.run_id} is still running", "wait for it, or end it, then pack it")
    patterns = (*_OF_A_RUN, "artifacts/**/*") if artifacts else _OF_A_RUN
    files = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file() and not path.is_symlink()}
    for path in sorted(files):
        name = path.relative_to(folder).as_posix()
        if path == paths.record and written.status == "running":  # killed; its record is what a reader derives
            yield _text_entry(f"{STORE}/{folder.name}/{name}", record.model_dump_json(indent=2) + "\n", redacted)
        elif path.suffix in _TEXTS and not name.startswith(_READINGS):
            text = path.read_bytes().decode("utf-8", errors="surrogateescape")  # line ends as they are
            yield _text_entry(f"{STORE}/{folder.name}/{name}", text, redacted)
        else:
            yield Entry(f"{STORE}/{folder.name}/{name}", path=path)


def _group_entries(folder: Path, redacted: dict[str, int]) -> Iterator[Entry]:
    paths = GroupPaths(folder)
    for path in (paths.record, paths.report):
        if path.is_file():
            name = f"{STORE}/{GROUPS_FOLDER}/{folder.name}/{path.name}"
            yield _text_entry(name, path.read_text(encoding="utf-8", errors="surrogateescape"), redacted)


def _text_entry(name: str, text: str, redacted: dict[str, int]) -> Entry:
    clean, count = without_secrets(text)
    if count:
        redacted[name] = count
    return Entry(name, clean.encode("utf-8", errors="surrogateescape"))


def _about(runs: list[str], groups: list[str], redacted: dict[str, int]) -> list[Entry]:
    manifest = {
        "format": FORMAT,
        "joulelab": __version__,
        "runs": sorted(runs),
        "groups": sorted(groups),
        "redacted": dict(sorted(redacted.items())),
    }
    said = "What looked like a secret was replaced; MANIFEST.json says where." if redacted else ""
    readme = _README.format(version=__version__, redacted=said)
    return [Entry(MANIFEST, json.dumps(manifest, indent=2).encode() + b"\n"), Entry(README, readme.encode())]


class _Write(Protocol):
    def __call__(self, file: IO[bytes], entries: Sequence[Entry]) -> None: ...


def _writer(archive: Path) -> _Write:
    if archive.name.endswith((".tar.gz", ".tgz")):
        return _write_tar
    if archive.suffix == ".zip":
        return _write_zip
    raise UsageError(f"{archive.name}: unknown kind of archive", "use a name that ends with .tar.gz or .zip")


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
