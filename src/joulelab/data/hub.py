"""The Hugging Face hub: whether it can be reached, which commit a name stands for, and the datasets on it.

A branch moves and a tag may, so a name is resolved once per process to the hash of a commit. The hash is part of the
keys and bills of everything made from it, and everything is loaded at that commit: key and bytes agree.
"""

from __future__ import annotations

import importlib
import os
import queue
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from joulelab import lookup
from joulelab.data import sources
from joulelab.data.sources import Source, hub_hint
from joulelab.data.text import text_column
from joulelab.errors import ConfigError, DependencyMissing, NotFoundError
from joulelab.total_timeout import timed_opener

PATIENCE_S = 2.0
_INFO_TIMEOUT_S = 20.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DEFAULT_BRANCH = "main"

RepoKind = Literal["model", "dataset"]
_commits: dict[tuple[RepoKind, str, str], str] = {}
"""(kind, repository, revision) -> commit, as this process resolved it or as an earlier attempt of its run recorded."""


def commit_of(source: Source, kind: RepoKind) -> str:
    """Commit hash of a name on the hub: queried from the hub, or, offline, read from the local cache."""
    revision = source.revision or _DEFAULT_BRANCH
    if _COMMIT.fullmatch(revision):
        return revision
    lookup.require_packages("the hub", "huggingface_hub")
    key = (kind, source.repo, revision)
    if key not in _commits:
        commit = (_ask_for_commit if reachable() else _cached_commit)(source, kind, revision)
        if commit is None:
            raise NotFoundError(
                f"'{source.name}' was not found locally, and {_endpoint()} cannot be reached",
                hub_hint(source.repo),
                source.name,
            )
        _commits[key] = commit
    return _commits[key]


def pin_commit(source: Source, kind: RepoKind, commit: str) -> None:
    """Use this commit for the name from now on: a resumed run continues with the revision that it started with."""
    _commits[kind, source.repo, source.revision or _DEFAULT_BRANCH] = commit


def _ask_for_commit(source: Source, kind: RepoKind, revision: str) -> str | None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RevisionNotFoundError

    api = HfApi()
    try:
        commit = api.repo_info(source.repo, repo_type=kind, revision=revision, timeout=_INFO_TIMEOUT_S).sha
    except RevisionNotFoundError as error:
        found = api.list_repo_refs(source.repo, repo_type=kind)
        known = [ref.name for ref in (*found.branches, *found.tags)]
        raise lookup.unknown(f"revision of {source.repo}", revision, known) from error
    except GatedRepoError as error:
        raise NotFoundError(
            f"access to '{source.repo}' is restricted", "accept its terms on its page, then run `hf auth login`"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        cached = _cached_commit(source, kind, revision)
        if cached is not None:  # a cached copy may be used while the hub is down
            return cached
        text = " ".join(str(error).split())[:300]
        raise NotFoundError(
            f"the hub did not return the {kind} '{source.name}': {text}", hub_hint(source.repo), source.name
        ) from error
    if commit is not None:  # downloads by commit leave no note of the branch, and offline the name would be unknown
        note = _note_of_commit(source, kind, revision)
        with suppress(OSError):  # a cache that cannot be written is read all the same
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(commit, encoding="utf-8")
    return commit


def _cached_commit(source: Source, kind: RepoKind, revision: str) -> str | None:
    """The commit of the last download of this branch or tag."""
    note = _note_of_commit(source, kind, revision)
    return note.read_text(encoding="utf-8").strip() if note.is_file() else None


def _note_of_commit(source: Source, kind: RepoKind, revision: str) -> Path:
    """Where the cache of the hub's own clients notes the commit of a branch or tag."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / "--".join([f"{kind}s", *source.repo.split("/")]) / "refs" / revision


def reachable(patience_s: float = PATIENCE_S) -> bool:
    if offline_by_choice():
        return False
    answer: queue.SimpleQueue[bool] = queue.SimpleQueue()
    # In a thread, because a DNS lookup has no timeout; one request, because the hub's clients retry for 30 s.
    threading.Thread(target=lambda: answer.put(_answers(_endpoint(), patience_s)), daemon=True).start()
    try:
        return answer.get(timeout=patience_s)
    except queue.Empty:
        return False


def offline_by_choice() -> bool:
    switches = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in switches)


def require_reachable(wanted: str) -> None:
    if not reachable():
        raise NotFoundError(
            f"'{wanted}' was not found locally, and {_endpoint()} cannot be reached", hub_hint(wanted), wanted
        )


def import_datasets() -> Any:
    """The package `datasets`, which only readers and writers of its format need."""
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise DependencyMissing("the package 'datasets' is not installed", 'pip install "joulelab[train]"') from error


def cached_folder(name: str, file: str) -> Path | None:
    """The folder of an earlier download of the model `name`, if it contains `file`."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    source = sources.parse(name)
    found = try_to_load_from_cache(source.repo, file, revision=source.revision)
    return Path(found).parent if isinstance(found, str) else None


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _answers(address: str, patience_s: float) -> bool:
    try:
        timed_opener().open(urllib.request.Request(address, method="HEAD"), timeout=patience_s).close()
    except urllib.error.HTTPError:
        return True  # an error status is an answer too
    except OSError:
        return False
    return True


_USUAL_CONFIG = {"allenai/c4": "en"}


def load_dataset(name: str, config: str | None = None, **options: Any) -> Any:
    """The dataset `org/name[:config][@revision]` at its commit; `config` takes precedence over that in the name."""
    source, datasets = sources.parse(name), import_datasets()
    chosen = config or source.config or _USUAL_CONFIG.get(source.repo)
    with _explained(name):
        commit = commit_of(source, "dataset")
        found = datasets.load_dataset(source.repo, chosen, revision=commit, **options)
    _refuse_other_commit(found, name, commit)
    return found


def _refuse_other_commit(found: Any, name: str, commit: str) -> None:
    """Without the hub, `datasets` takes the newest copy in its cache, whatever its revision."""
    parts = list(found.values()) if isinstance(found, dict) else [found]
    files = [Path(file["filename"]) for part in parts for file in getattr(part, "cache_files", ())]
    for file in files:
        cached = next((folder for folder in file.parts if _COMMIT.fullmatch(folder)), commit)
        if cached != commit:
            raise NotFoundError(
                f"the cache has '{name}' at commit {cached[:12]}, not at {commit[:12]}",
                f"name that revision, {name.partition('@')[0]}@{cached}, or download it again with the hub reachable",
            )


class HubText:
    """Documents of `org/name[:config][@revision]`, streamed: C4 has 365 million, and a run reads a few."""

    def __init__(self, name: str, config: str | None = None, whole: bool = False) -> None:
        """`whole` downloads the dataset, for readers that need all of it."""
        self.name, self._chosen = name, config
        # Offline, only a complete download in the cache can be read.
        offline = offline_by_choice()
        self._streaming = not whole and not offline
        if not offline:
            require_reachable(name)
        self._datasets = import_datasets()

    @property
    def identity(self) -> str:
        """Changes when the dataset changes."""
        return f"{self.name}@{commit_of(sources.parse(self.name), 'dataset')}"

    def splits(self) -> tuple[str, ...]:
        source = sources.parse(self.name)
        config = self._chosen or source.config or _USUAL_CONFIG.get(source.repo)
        with _explained(self.name):
            commit = commit_of(source, "dataset")
            return tuple(self._datasets.get_dataset_split_names(source.repo, config, revision=commit))

    def read(self, split: str) -> Iterator[str]:
        column = ""
        for row in self.rows(split):
            column = column or text_column(row, self.name)
            yield str(row[column] or "")

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Rows with all columns."""
        with _explained(self.name):
            yield from self._load(split)

    def count(self, split: str) -> int:
        known = self._load(split).info.splits
        if not known or not known[split].num_examples:
            raise ConfigError(f"the size of {self.name} is unknown", "slice by row numbers: train[:1000]")
        return int(known[split].num_examples)

    def _load(self, split: str) -> Any:
        return load_dataset(self.name, self._chosen, split=split, streaming=self._streaming)


class SavedText:
    """Documents in a folder written by `datasets` with save_to_disk."""

    def __init__(self, folder: Path, column: str | int | None = None) -> None:
        loaded = import_datasets().load_from_disk(str(folder))
        self.name, self._column = str(folder), column
        self._parts: dict[str, Any] = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}

    def splits(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def read(self, split: str) -> Iterator[str]:
        part = self._parts[split]
        column = text_column(part.column_names, self.name, self._column)
        yield from (str(row[column] or "") for row in part.select_columns([column]))

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        yield from self._parts[split]

    def count(self, split: str) -> int:
        return len(self._parts[split])


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Without network, dataset or configuration, the hub's clients raise OSError or ValueError."""
    try:
        yield
    except (OSError, ValueError) as error:
        text = " ".join((str(error) or type(error).__name__).split())
        hint = f"write {name}:CONFIG" if "config name is missing" in text.lower() else hub_hint(name)
        raise NotFoundError(f"the hub did not return the dataset '{name}': {text[:300]}", hint, name) from error
