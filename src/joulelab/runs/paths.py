"""File names of a run and of a group, JSON files that are written atomically, and explanations of storage errors."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from joulelab.clock import folder_stamp
from joulelab.errors import CorruptedFile, StorageFailed, UsageError
from joulelab.meter.profile import home_folder
from joulelab.meter.trace import read_lines
from joulelab.redaction import printable_json
from joulelab.runs.spec import brief
from joulelab.units import size_text

GROUPS_FOLDER = "groups"
REPORT = "report.html"


# File names are limited to 255 bytes on most systems, including time stamp, suffixes and temporary names.
_MAX_SLUG_BYTES = 120


def slug(name: str) -> str:
    """A name as part of a folder name: letters, marks and digits of any script stay, all else becomes `-`."""
    composed = unicodedata.normalize("NFC", name)
    kept = "".join(c if c in "._-" or unicodedata.category(c)[0] in "LMN" else " " for c in composed)
    shortened = "-".join(kept.split()).encode()[:_MAX_SLUG_BYTES].decode(errors="ignore")
    return shortened.strip("-.") or "run"


def cache_folder() -> Path:
    """`JOULELAB_CACHE`, else `joulelab` in the user's cache directory."""
    chosen = os.environ.get("JOULELAB_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache") / "joulelab"


# Program, recorder and guard each hold pipes, traces and locks; 16 are enough for `measure` without a GPU.
_FEWEST_DESCRIPTORS = 32
# The ring of marks has 2 MiB.
_SMALLEST_FILE_LIMIT_BYTES = 4 * 2**20


def require_resources() -> None:
    """Refuse to begin a run whose first files or pipes this process may not open."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors != resource.RLIM_INFINITY and descriptors < _FEWEST_DESCRIPTORS:
        raise UsageError(
            f"this process may open {descriptors} files; a run needs {_FEWEST_DESCRIPTORS}",
            "raise the limit: ulimit -n 1024",
        )
    file_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if file_bytes != resource.RLIM_INFINITY and file_bytes < _SMALLEST_FILE_LIMIT_BYTES:
        raise UsageError(
            f"files of this process may have {size_text(file_bytes)}; a run needs at least "
            f"{size_text(_SMALLEST_FILE_LIMIT_BYTES)}",
            "raise the limit: ulimit -f unlimited",
        )


def make_folder(parent: Path, name: str) -> Path:
    """Create `<name>-<UTC time>-<4 hex>`, the last being the fraction of the second."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            folder = parent / f"{slug(name)}-{folder_stamp()}"
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        reason = "it is a file, not a directory" if parent.is_file() else error.strerror
        raise UsageError(
            f"cannot create a run in {parent.absolute()}: {reason}",
            "choose another directory with --runs-dir or JOULELAB_RUNS",
        ) from None


def make_chosen_folder(folder: Path) -> Path:
    """Create the run folder that the user named; existing files in it stay."""
    require_no_runs(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot create a run in {folder.absolute()}: {error.strerror}", "choose another directory"
        ) from None
    return folder


def require_no_runs(folder: Path) -> None:
    """Refuse a folder that contains a run or a store: a run in a store's root would not be listed. Other files, for
    example the log of the job that starts the run, are accepted."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a run needs a directory", "choose another path")
    if (folder / "run.json").exists():
        raise UsageError(f"{folder} already contains a run", f"resume it: joulelab run --resume {folder}")
    runs = sorted(path for path in folder.glob("*") if path.name == GROUPS_FOLDER or (path / "run.json").exists())
    if runs:
        raise UsageError(
            f"{folder} is a store with runs ({_first_names(runs)}), not a run directory",
            f"write the run into that store with --runs-dir {folder}, or choose a subfolder: {folder / 'mine'}",
        )


def _first_names(paths: list[Path]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(path.name for path in paths[:3]) + more


@dataclass(frozen=True)
class RunPaths:
    folder: Path

    @property
    def run_id(self) -> str:
        return self.folder.name

    @property
    def record(self) -> Path:
        return self.folder / "run.json"

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def environment(self) -> Path:
        return self.folder / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.folder / "experiment_summary.json"

    @property
    def artifacts(self) -> Path:
        return self.folder / "artifacts"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def checkpointed_steps(self) -> dict[str, int]:
        """Stage -> the step that it resumes from."""
        files = self.checkpoints.glob("*/step-*.pt")
        complete_folders = (path.parent for path in self.checkpoints.glob("*/step-*[0-9]/.metadata"))
        paths = (*files, *complete_folders)  # step-000000012.1a2b3c4d.pt: the step and a checksum
        steps = ((path.parent.name, path.name.split(".")[0].removeprefix("step-")) for path in paths)
        return dict(sorted((stage, int(step)) for stage, step in steps))

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def stages(self) -> Path:
        return self.folder / "stages"

    def power_limits(self, host: str, attempt: int) -> Path:
        return self.folder / f"power_limits.{host}.{attempt}.jsonl"

    def saved_power_limits(self) -> list[tuple[str, Path]]:
        """(host, file) of every power cap that was not restored."""
        files = sorted(self.folder.glob("power_limits.*.jsonl"))
        return [(path.stem.removeprefix("power_limits.").rpartition(".")[0], path) for path in files]

    def trace(self, host: str, attempt: int) -> Path:
        return self.folder / "trace" / f"{host}.{attempt}.jsonl"

    def events(self, host: str, rank: int, attempt: int) -> Path:
        return self.folder / "events" / f"{host}.{rank}.{attempt}.jsonl"

    def unfinished_hosts(self) -> set[tuple[str, int]]:
        """(host, attempt) of processes that still have a mark ring, which is removed after the recorder has ended."""
        names = (path.stem.rsplit(".", 2) for path in (self.folder / "events").glob("*.ring"))
        return {(host, int(attempt)) for host, _, attempt in names}

    def event_files(self) -> dict[tuple[str, int], list[tuple[int, Path]]]:
        """(host, attempt) -> (rank, file) of every process, lowest rank first."""
        by_host: dict[tuple[str, int], list[tuple[int, Path]]] = {}
        for path in (self.folder / "events").glob("*.jsonl"):
            host, rank, attempt = path.stem.rsplit(".", 2)
            by_host.setdefault((host, int(attempt)), []).append((int(rank), path))
        return {host: sorted(files) for host, files in by_host.items()}

    def attempts_before(self, trace: Path, same_host: bool = False) -> list[tuple[Path, Path]]:
        """(event file, trace) of every process of the attempts before the one with this trace, the newest first."""
        traces = {(host, attempt): file for host, attempt, file in self.traces()}
        own, number = next((key for key, file in traces.items() if file == trace), ("", 0))
        files = sorted(self.event_files().items(), key=lambda one: -one[0][1])
        return [
            (file, traces[host, attempt])
            for (host, attempt), of_host in files
            if attempt < number and (host, attempt) in traces and (host == own or not same_host)
            for _, file in of_host
        ]

    def traces(self) -> list[tuple[str, int, Path]]:
        """(host, attempt, file) of every trace, in order of attempts; the JSONL file where both formats exist."""
        files: dict[tuple[int, str], Path] = {}
        for suffix in ("parquet", "jsonl"):
            for path in (self.folder / "trace").glob(f"*.{suffix}"):
                host, _, attempt = path.stem.rpartition(".")
                files[int(attempt), host] = path
        return [(host, attempt, path) for (attempt, host), path in sorted(files.items())]

    def next_attempt(self) -> int:
        return 1 + max((attempt for _, attempt, _ in self.traces()), default=0)


@dataclass(frozen=True)
class GroupPaths:
    folder: Path

    @property
    def group_id(self) -> str:
        return self.folder.name

    @property
    def record(self) -> Path:
        return self.folder / "group.json"

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def store(self) -> Path:
        """The store of its members, whichever store is the default."""
        return self.folder.absolute().parent.parent


_FAILURES = {
    errno.ENOSPC: ("no space left", "free some space"),
    errno.EDQUOT: ("disk quota exceeded", "free some space or request a larger quota"),
    errno.EROFS: ("read-only file system", "make it writable"),
    errno.EIO: ("input/output error", "check the system log for disk errors"),
    errno.ENODEV: (
        "the file system cannot map files into memory (mmap)",
        "use a file system that can, or a local disk",
    ),
    errno.EFBIG: ("a file reached the size limit of this process (`ulimit -f`)", "raise the limit"),
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


_METRIC_TYPES = {
    "step": int,
    "attempt": int,
    "mono_ns": int,
    "stage": str,
    "budget_fraction": int | float,
    "held_out_loss": int | float,
}


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl whose fields have their types; a line that was edited or corrupted is left out."""
    for line in read_lines(path) if path.exists() else ():
        if all(isinstance(line[name], kind) for name, kind in _METRIC_TYPES.items() if line.get(name) is not None):
            yield line


def write_json(path: Path, value: BaseModel | dict[str, Any]) -> None:
    """Write to a temporary file, fsync, rename: readers see the old or the new version, never a partial file."""
    text = (
        value.model_dump_json(indent=2)
        if isinstance(value, BaseModel)
        else json.dumps(value, indent=2, ensure_ascii=False)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: rename is atomic only within a file system. With the pid, because two
    # processes may write the same record at the same time; the later rename wins with a complete
    # file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            # Without it the rename may reach the disk before the data, and a power failure leaves
            # an empty file under the final name.
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # a partial file would occupy the full disk further
        temporary.unlink(missing_ok=True)
        raise


_KINDS: dict[type, str] = {dict: "an object", list: "a list", str: "a text", int: "an integer"}


def read_json(path: Path, **kinds: type) -> dict[str, Any]:
    """The object in a file; `kinds` are the types of fields that it must have, where no model checks them."""
    hint = "restore it from a backup, or remove the folder"
    try:
        value = json.loads(printable_json(path.read_text(encoding="utf-8")))
    except RecursionError:
        raise CorruptedFile(f"{path} is nested too deep", hint) from None
    except ValueError as error:
        raise CorruptedFile(f"{path} is not valid JSON: {error}", hint) from None
    except PermissionError as error:
        raise CorruptedFile(f"{path} cannot be read: {error.strerror}", "check its permissions") from None
    except IsADirectoryError as error:
        raise CorruptedFile(f"{path} cannot be read: {error.strerror}", hint) from None
    if not isinstance(value, dict):
        raise CorruptedFile(f"{path}: expected a JSON object, found {brief(value)}", hint)
    for name, kind in kinds.items():
        if not isinstance(value.get(name), kind):
            raise CorruptedFile(f"{path}: `{name}` is {brief(value.get(name))}, expected {_KINDS[kind]}", hint)
    return value
