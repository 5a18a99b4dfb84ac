"""Several processes that are one run: torchrun starts them all with the same command line, the first one holds the run.

The first rank makes the folder, measures, and writes the record. The others follow: they learn from a small file in the
store which folder and attempt it is, and do the same work with marks of their own and nothing else written.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from joulelab.errors import JoulelabError
from joulelab.runs.json_file import read_json, write_json
from joulelab.runs.paths import RunPaths

WAIT_S = 600.0
_FOLDER = ".ranks"


@dataclass(frozen=True)
class Place:
    """This process among those that are one run."""

    rank: int = 0
    world: int = 1
    job: str = ""

    @property
    def follows(self) -> bool:
        return self.rank > 0


def my_place() -> Place:
    """As torchrun says in the environment; alone where nobody says anything."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return Place()
    # the launcher is the parent of all ranks of a node, and no other job's
    job = f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ.get('MASTER_PORT', '')}-{os.getppid()}"
    return Place(int(os.environ["RANK"]), world, job)


def announce(place: Place, paths: RunPaths, attempt: int) -> None:
    """The first rank says which run it is, once its meter runs."""
    if place.world > 1:
        write_json(_file(paths.folder.parent, place), {"folder": paths.folder.name, "attempt": attempt})


def withdraw(place: Place, paths: RunPaths) -> None:
    if place.world > 1:
        _file(paths.folder.parent, place).unlink(missing_ok=True)


def follow(place: Place, store: Path, sleep: Callable[[float], None] = time.sleep) -> tuple[RunPaths, int]:
    """The run and attempt that the first rank has begun; waits for it."""
    file = _file(store, place)
    give_up = time.monotonic() + WAIT_S
    while not file.exists():
        if time.monotonic() > give_up:
            raise JoulelabError(f"rank 0 has begun no run within {WAIT_S:.0f} s", "its own message says why")
        sleep(0.1)
    told = read_json(file)
    return RunPaths(store / told["folder"]), int(told["attempt"])


def scratch(paths: RunPaths, place: Place) -> Path:
    """Where a following rank may write what the first one keeps; empty, and gone after the run."""
    folder = paths.folder / f".rank-{place.rank}"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _file(store: Path, place: Place) -> Path:
    folder = store / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{place.job}.json"
