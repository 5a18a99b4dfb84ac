"""A program and everything it started, found without looking at every process of the machine.

psutil finds children by reading all of /proc, about 20 us per process of the machine at every tick: a tenth of a core
on a node with thousands. The kernel also lists each thread's children; walking down that list costs about 30 us per
thread of the program. The tree is walked anew as often as that takes no more than `RESCAN_SHARE` of a core, so that
short-lived children are seen; in between its known members are asked, at about 20 us each.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil

RESCAN_SHARE = 0.001
RECORDER_MODULE = "joulelab.meter.recorder"


class ProcessTree:
    def __init__(self, root_pid: int, without_recorders: bool = False) -> None:
        self._root = psutil.Process(root_pid)
        self._without_recorders = without_recorders
        self.recorders: list[psutil.Process] = []
        """Recorders that were found in the tree and left out of its members."""
        self._members: list[psutil.Process] = [self._root]
        self._rescan_at_s = 0.0

    def members(self) -> list[psutil.Process]:
        """Parents before their children: whoever adds up CPU time then never sees a time twice."""
        begin_s = time.monotonic()
        if begin_s >= self._rescan_at_s:
            self._members = self._found()
            took_s = time.monotonic() - begin_s
            self._rescan_at_s = begin_s + took_s / RESCAN_SHARE
        return self._members

    def _found(self) -> list[psutil.Process]:
        children = children_of(self._root.pid)
        if children is None:
            slowly = self._root.children(recursive=True)
            self.recorders = [process for process in slowly if self._is_left_out(process)]
            return [self._root, *(process for process in slowly if process not in self.recorders)]
        known = {process.pid: process for process in (*self._members, *self.recorders)}
        found, recorders, queue = [self._root], [], children
        while queue:
            processes = [process for pid in queue if (process := known.get(pid) or _process(pid)) is not None]
            fresh = [process for process in processes if not self._is_left_out(process)]
            found += fresh
            recorders += [process for process in processes if process not in fresh]
            queue = [child for process in fresh for child in children_of(process.pid) or ()]
        self.recorders = recorders
        return found

    def _is_left_out(self, process: psutil.Process) -> bool:
        """One that has ended has no command line any more, but is known."""
        return self._without_recorders and (process in self.recorders or is_recorder(process))


def is_recorder(process: psutil.Process) -> bool:
    try:
        return RECORDER_MODULE in process.cmdline()
    except psutil.Error:
        return False


def children_of(pid: int) -> list[int] | None:
    """The children of all threads of a process; None where the kernel does not list them."""
    if not Path(f"/proc/{pid}/task/{pid}/children").exists():
        return None
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that ended meanwhile
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None
