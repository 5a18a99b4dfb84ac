"""The Hugging Face hub, where it can be reached: asked once and briefly, as its own clients retry for half a minute."""

from __future__ import annotations

import importlib
import os
import queue
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from joulelab.data.sources import hub_hint
from joulelab.errors import DependencyMissing, NotFoundError

PATIENCE_S = 2.0


def reachable(patience_s: float = PATIENCE_S) -> bool:
    if offline_by_choice():
        return False
    answer: queue.SimpleQueue[bool] = queue.SimpleQueue()
    # In a thread of its own: a name server that does not answer knows no timeout.
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
        raise NotFoundError(f"'{wanted}' is not here, and {_endpoint()} cannot be reached", hub_hint(wanted))


def import_datasets() -> Any:
    """The package `datasets`, which only readers and writers of its format need."""
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise DependencyMissing("the package 'datasets' is not installed", 'pip install "joulelab[train]"') from error


def cached_folder(name: str, file: str) -> Path | None:
    """Where an earlier download of `name` lies, if it brought `file`."""
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
        return True  # it refuses, but it is there
    except OSError:
        return False
    return True
