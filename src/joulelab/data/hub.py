"""The Hugging Face hub: whether it can be reached, and the datasets on it or saved from it."""

from __future__ import annotations

import importlib
import os
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from joulelab.data import sources
from joulelab.data.sources import hub_hint
from joulelab.data.text import text_column
from joulelab.errors import ConfigError, DependencyMissing, NotFoundError

PATIENCE_S = 2.0


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
        raise NotFoundError(f"'{wanted}' was not found locally, and {_endpoint()} cannot be reached", hub_hint(wanted))


def import_datasets() -> Any:
    """The package `datasets`, which only readers and writers of its format need."""
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise DependencyMissing("the package 'datasets' is not installed", 'pip install "joulelab[train]"') from error


def cached_folder(name: str, file: str) -> Path | None:
    """The folder of an earlier download of `name`, if it contains `file`."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    found = try_to_load_from_cache(name, file)
    return Path(found).parent if isinstance(found, str) else None


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _answers(address: str, patience_s: float) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=patience_s).close()
    except urllib.error.HTTPError:
        return True  # an error status is an answer too
    except OSError:
        return False
    return True


_USUAL_CONFIG = {"allenai/c4": "en"}


class HubText:
    """Documents of `org/name` or `org/name:config`, streamed: C4 has 365 million, and a run reads a few."""

    def __init__(self, name: str, whole: bool = False) -> None:
        """`whole` downloads the dataset, for readers that need all of it."""
        self.name, _, config = name.partition(":")
        self.config = config or _USUAL_CONFIG.get(self.name)
        # Offline, only a complete download in the cache can be read.
        offline = offline_by_choice()
        self._streaming = not whole and not offline
        if not offline:
            require_reachable(self.name)
        self._datasets = import_datasets()

    def splits(self) -> tuple[str, ...]:
        with _explained(self.name):
            return tuple(self._datasets.get_dataset_split_names(self.name, self.config))

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
        with _explained(self.name):
            known = self._load(split).info.splits
        if not known or not known[split].num_examples:
            raise ConfigError(f"the size of {self.name} is unknown", "slice by row numbers: train[:1000]")
        return int(known[split].num_examples)

    def _load(self, split: str) -> Any:
        return self._datasets.load_dataset(self.name, self.config, split=split, streaming=self._streaming)


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
        hint = f"write {name}:CONFIG" if "config name is missing" in text.lower() else sources.hub_hint(name)
        raise NotFoundError(f"the hub did not return the dataset '{name}': {text[:300]}", hint) from error
