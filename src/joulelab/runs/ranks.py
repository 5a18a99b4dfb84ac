"""Several processes that are one run: torchrun starts them all with the same command line, the first one holds the run.

The first rank makes the folder, measures, and writes the record. The others follow: they learn from a small file in the
store which folder and attempt it is, and do the same work with marks of their own and nothing else written.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from joulelab.errors import JoulelabError
from joulelab.runs.json_file import read_json, write_json
from joulelab.runs.paths import RunPaths

WAIT_S = 600.0
# The others end with the first rank, their recorders a moment later.
CLOSING_S = 15.0
JOINING_S = 120.0
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
    return Place(int(os.environ["RANK"]), world, _job_name(os.environ, os.getppid()))


def _job_name(environ: Mapping[str, str], launcher_pid: int) -> str:
    """The same for all ranks of a run and for nobody else, an earlier start of the same job included."""
    parts = [environ["TORCHELASTIC_RUN_ID"], environ.get("MASTER_PORT", "")]
    if int(environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        parts.append(str(launcher_pid))  # the parent of all ranks of a node, and no other job's
    else:
        parts.append(environ.get("MASTER_ADDR", ""))
        slurm = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
        parts += [environ[name] for name in slurm if name in environ]
    return "-".join([*parts, environ.get("TORCHELASTIC_RESTART_COUNT", "0")])


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
            raise JoulelabError(
                f"rank 0 has begun no run within {WAIT_S:.0f} s",
                f"its own message says why; on several nodes all of them must see {store.absolute()}",
            )
        sleep(0.1)
    told = read_json(file)
    return RunPaths(store / told["folder"]), int(told["attempt"])


def wait_until_joined(place: Place, paths: RunPaths, attempt: int, sleep: Callable[[float], None] = time.sleep) -> None:
    """Until every rank has come along: an idle baseline is none while the others still import their framework."""
    give_up = time.monotonic() + JOINING_S
    while place.world > 1 and time.monotonic() < give_up:
        if len(_events_of(paths, attempt)) >= place.world:
            return
        sleep(0.1)


def _events_of(paths: RunPaths, attempt: int) -> list[Path]:
    return [path for (_, number), ranks in paths.event_files().items() if number == attempt for _, path in ranks]


def wait_for_others(place: Place, paths: RunPaths, attempt: int, sleep: Callable[[float], None] = time.sleep) -> None:
    """Until the recorder of every rank has closed its files; what is still open then is read as far as it goes."""
    give_up = time.monotonic() + CLOSING_S
    while place.world > 1 and time.monotonic() < give_up:
        events = _events_of(paths, attempt)
        # a ring is removed after its recorder has ended
        if len(events) >= place.world and not any(path.with_suffix(".ring").exists() for path in events):
            return
        sleep(0.1)


def scratch(paths: RunPaths, place: Place) -> Path:
    """Where a following rank may write what the first one keeps; empty, and gone after the run."""
    folder = paths.folder / f".rank-{place.rank}"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _file(store: Path, place: Place) -> Path:
    folder = store / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{place.job}.json"
