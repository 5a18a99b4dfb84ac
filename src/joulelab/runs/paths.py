"""Every file name of a run and of a group, in one place."""

from __future__ import annotations

import os
import secrets
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from joulelab.clock import folder_stamp
from joulelab.errors import UsageError

GROUPS_FOLDER = "groups"


# A file name has 255 bytes on most systems; time, suffixes and a temporary name must fit beside ours.
_LONGEST_SLUG_BYTES = 120


def slug(name: str) -> str:
    """A name as part of a folder's: letters, marks and digits of any script stay, everything else becomes `-`."""
    composed = unicodedata.normalize("NFC", name)
    kept = "".join(c if c in "._-" or unicodedata.category(c)[0] in "LMN" else " " for c in composed)
    whole = "-".join(kept.split()).encode()[:_LONGEST_SLUG_BYTES].decode(errors="ignore")
    return whole.strip("-.") or "run"


def cache_folder() -> Path:
    """`JOULELAB_CACHE`, else joulelab's folder among the user's caches."""
    named = os.environ.get("JOULELAB_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "joulelab"


def make_folder(parent: Path, name: str) -> Path:
    """`<name>-<UTC time>-<4 hex>`, made here and nowhere else, so two starts in one second do not collide."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            folder = parent / f"{slug(name)}-{folder_stamp()}-{secrets.token_hex(2)}"
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise UsageError(
            f"no run can be kept under {parent.absolute()}: {error.strerror}",
            "--runs-dir or JOULELAB_RUNS names another folder",
        ) from None


def make_chosen_folder(folder: Path) -> Path:
    """The very folder a user named for a run; what else is in it stays."""
    require_no_runs(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"no run can be kept in {folder.absolute()}: {error.strerror}", "name another folder"
        ) from None
    return folder


def require_no_runs(folder: Path) -> None:
    """A run in a store's root would be mixed up with the others, and no list would find it; whatever else is there
    stays: a log of the job that began it, for example."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, and a run needs a folder", "name another place")
    if (folder / "run.json").exists():
        raise UsageError(f"{folder} holds a run already", f"go on with it: joulelab run --resume {folder}")
    runs = sorted(path for path in folder.glob("*") if path.name == GROUPS_FOLDER or (path / "run.json").exists())
    if runs:
        raise UsageError(
            f"{folder} is a store with runs in it ({_some(runs)}), not the folder of one run",
            f"keep the run in that store with --runs-dir {folder}, or name a folder of its own: {folder / 'mine'}",
        )


def _some(paths: list[Path]) -> str:
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
        """The step that each stage which has begun training goes on from."""
        one_file = self.checkpoints.glob("*/step-*.pt")
        complete_folder = (path.parent for path in self.checkpoints.glob("*/step-*/.metadata"))
        found = sorted(
            (path.parent.name, int(path.stem.removeprefix("step-"))) for path in (*one_file, *complete_folder)
        )
        return dict(found)

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def stages(self) -> Path:
        return self.folder / "stages"

    def power_limits(self, host: str, attempt: int) -> Path:
        return self.folder / f"power_limits.{host}.{attempt}.jsonl"

    def saved_power_limits(self) -> list[tuple[str, Path]]:
        """(host, file) of every power cap that was not taken back."""
        found = sorted(self.folder.glob("power_limits.*.jsonl"))
        return [(path.stem.removeprefix("power_limits.").rpartition(".")[0], path) for path in found]

    def trace(self, host: str, attempt: int) -> Path:
        return self.folder / "trace" / f"{host}.{attempt}.jsonl"

    def events(self, host: str, rank: int, attempt: int) -> Path:
        return self.folder / "events" / f"{host}.{rank}.{attempt}.jsonl"

    def unfinished_hosts(self) -> set[tuple[str, int]]:
        """(host, attempt) where a process has its ring of marks still: it removes it after its recorder has ended."""
        found = (path.stem.rsplit(".", 2) for path in (self.folder / "events").glob("*.ring"))
        return {(host, int(attempt)) for host, _, attempt in found}

    def event_files(self) -> dict[tuple[str, int], list[tuple[int, Path]]]:
        """(host, attempt) -> (rank, file) of every process there, lowest rank first; one look at the folder."""
        found: dict[tuple[str, int], list[tuple[int, Path]]] = {}
        for path in (self.folder / "events").glob("*.jsonl"):
            host, rank, attempt = path.stem.rsplit(".", 2)
            found.setdefault((host, int(attempt)), []).append((int(rank), path))
        return {place: sorted(files) for place, files in found.items()}

    def traces(self) -> list[tuple[str, int, Path]]:
        """(host, attempt, file) of every trace, in order of attempts; as it was recorded where both kinds are there."""
        found: dict[tuple[int, str], Path] = {}
        for kind in ("parquet", "jsonl"):
            for path in (self.folder / "trace").glob(f"*.{kind}"):
                host, _, attempt = path.stem.rpartition(".")
                found[int(attempt), host] = path
        return [(host, attempt, path) for (attempt, host), path in sorted(found.items())]

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
        """Where its members are, whatever store is the usual one here."""
        return self.folder.absolute().parent.parent
