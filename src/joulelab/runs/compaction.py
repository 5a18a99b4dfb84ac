"""Closed traces become Parquet: at the end of a run, and for old runs by `joulelab runs --compact`.

The JSONL stays until its copy is written, synced, read back and found equal. A trace that somebody may still write to
is left alone: its recorder holds the lock beside it and has written no closing line, or another process of the host has
not ended yet, whose recorder would take over.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from joulelab.errors import JoulelabError
from joulelab.meter.parquet import SUFFIX, copy_to_parquet
from joulelab.meter.recorder import ENDED_SUFFIX, REQUESTS_SUFFIX
from joulelab.meter.trace import read_lines
from joulelab.runs.events import drain_ring
from joulelab.runs.lock import is_held
from joulelab.runs.paths import RunPaths
from joulelab.runs.store import run_folders


@dataclass(frozen=True)
class Compaction:
    """What was done about the traces of some runs."""

    traces: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    kept: tuple[str, ...] = ()
    """Why some stay JSONL."""

    def __add__(self, other: Compaction) -> Compaction:
        return Compaction(
            self.traces + other.traces,
            self.bytes_before + other.bytes_before,
            self.bytes_after + other.bytes_after,
            self.kept + other.kept,
        )


def compact_run(paths: RunPaths, dead_before: float = 0) -> Compaction:
    """Turn the closed traces of a run into Parquet; never raises, since the JSONL is as good a trace.

    Attempts below `dead_before` are known to be over: their traces are as long as they will get, closing line or not.
    """
    done = Compaction()
    at_work = paths.unfinished_hosts()
    for host, attempt, path in paths.traces():
        if path.suffix == SUFFIX:
            continue
        over = attempt < dead_before
        if not over and (host, attempt) in at_work:
            done += Compaction(kept=(f"{path}: another process of the run may still record",))
            continue
        try:
            done += _compact(path, over)
        except (JoulelabError, OSError) as error:
            done += Compaction(kept=(f"{path}: {error}",))
    for (_, attempt), files in paths.event_files().items():
        for _, events in files if attempt < dead_before else ():
            with suppress(OSError):  # a reader takes the marks from the ring as well
                drain_ring(events)
    return done


def compact_ended(store: Path) -> Compaction:
    """The traces of all runs of a store on which nobody works any more."""
    done = Compaction()
    for folder in run_folders(store):
        paths = RunPaths(folder)
        if all(path.suffix == SUFFIX for _, _, path in paths.traces()):
            continue
        done += compact_run(paths, 0 if is_held(folder) else math.inf)
    return done


def _compact(path: Path, over: bool) -> Compaction:
    with _alone(path) as alone:
        if not alone:
            return Compaction(kept=(f"{path}: its recorder is at work",))
        if not over and not _is_closed(path):
            return Compaction(kept=(f"{path}: it has no closing line",))
        before = path.stat().st_size
        copy = copy_to_parquet(path, read_lines)
        path.unlink()
        for leftover in (".lock", ".wishes", REQUESTS_SUFFIX, ENDED_SUFFIX):
            path.with_suffix(leftover).unlink(missing_ok=True)
    return Compaction(1, before, copy.stat().st_size)


def _is_closed(path: Path) -> bool:
    last = None
    for last in read_lines(path):  # noqa: B007 (the last one is what is wanted)
        pass
    return last is not None and last.get("kind") == "end"


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Hold the lock that recorders of this trace hold, where there is one."""
    lock = path.with_suffix(".lock")
    if not lock.exists():
        yield True
        return
    descriptor = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)
