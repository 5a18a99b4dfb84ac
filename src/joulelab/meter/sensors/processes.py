"""Processes of the measured program: its descendants, the other ranks of its launch, and other users of its GPUs.

psutil finds children by reading all of /proc, about 20 us per process of the machine at every reading: a tenth of a
core on a node with thousands. The kernel also lists each thread's children; walking down that list costs about 30 us
per thread of the program. The tree is walked as often as that takes no more than `RESCAN_SHARE` of a core, so that
short-lived children are seen, and whenever the program's own children change; in between its known members are read,
at about 20 us each.

A card's joules are those of all its users, so another process there deserves a warning. NVML lists process ids. A
process id that does not exist here belongs to another PID namespace (another container, or this one as the host sees
it): its owner is unknown, and the warning states that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from joulelab.meter.sensors import Line

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
        self._children: list[int] | None = None

    def members(self) -> list[psutil.Process]:
        """Parents before their children, so that a sum of CPU time never counts a time twice."""
        # The root's own children are read every time: a program that starts right after a slow scan would otherwise
        # be counted only seconds later, all of its CPU time at once.
        children = children_of(self._root.pid)
        if time.monotonic() >= self._rescan_at_s or children != self._children:
            self._children = children
            begin_s = time.thread_time()
            self._members = self._found(children)
            # The interval follows from the CPU time of a scan, so that the share of a core is bounded on machines
            # with any number of processes. Its wall time is longer on a busy machine, and costs nothing.
            self._rescan_at_s = time.monotonic() + (time.thread_time() - begin_s) / RESCAN_SHARE
        return self._members

    def _found(self, children: list[int] | None) -> list[psutil.Process]:
        if children is None:
            try:
                slowly = self._root.children(recursive=True)
            except psutil.NoSuchProcess:
                return self._members  # the program has ended; what it started may go on
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
        """A recorder that has ended has no command line any more, but is known."""
        return self._without_recorders and (process in self.recorders or is_recorder(process))


@cache
def _tree_without_recorders(pid: int) -> ProcessTree:
    """One per program: the sensors of a recorder share its walks, which take most of their time."""
    return ProcessTree(pid, without_recorders=True)


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


# Ranks of one launch share the first two and differ in the third, all set before their first instruction. (Two programs
# started in one interactive Slurm step share all three and are unrelated.)
LAUNCH_MARKS = (("MASTER_ADDR", "MASTER_PORT", "RANK"), ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"))


class OtherProcesses:
    """Warns once per device and process that is not the program's."""

    def __init__(self, program_pid: int, also_ours: Iterable[int] = ()) -> None:
        self._programs = (program_pid, *also_ours)
        self._known: set[tuple[str, int]] = set()

    def warn(self, device: str, pids: Iterable[int]) -> list[Line]:
        lines: list[Line] = []
        for pid in pids:
            if (device, pid) in self._known:
                continue
            self._known.add((device, pid))
            if not any(is_ours(pid, program) for program in self._programs):
                lines.append({"kind": "warning", "device": device, "pid": pid, "text": self._text(pid)})
        return lines

    def _text(self, pid: int) -> str:
        try:
            who = f"{psutil.Process(pid).name()} (pid {pid})"
        except psutil.Error:
            who = f"pid {pid} of another PID namespace (or this program, by its pid on the host)"
        return f"another process uses this GPU, and its energy is included in the card's: {who}"


def is_ours(pid: int, program_pid: int) -> bool:
    if pid in (program_pid, os.getpid()):
        return True
    try:
        ancestors = {parent.pid for parent in psutil.Process(pid).parents()}
    except psutil.Error:
        return False
    return program_pid in ancestors or _same_launch(pid, program_pid)


def fellow_ranks(program_pid: int) -> list[int]:
    """The other ranks of the program's launch on this host: children of the same launcher."""
    try:
        launcher_pid = psutil.Process(program_pid).ppid()
        siblings = children_of(launcher_pid)
        if siblings is None:
            siblings = [child.pid for child in psutil.Process(launcher_pid).children()]
    except psutil.Error:
        return []
    return [pid for pid in siblings if pid != program_pid and _same_launch(pid, program_pid)]


def living(pids: Iterable[int]) -> list[int]:
    """Those of the pids that exist."""
    return [pid for pid in pids if psutil.pid_exists(pid)]


def _same_launch(pid: int, program_pid: int) -> bool:
    one, other = _first_environment(pid), _first_environment(program_pid)
    for where, which, rank in LAUNCH_MARKS:
        shared = where in one and all(one.get(name) == other.get(name) for name in (where, which))
        if shared and one.get(rank) != other.get(rank):
            return True
    return False


def _first_environment(pid: int) -> dict[str, str]:
    try:
        # The environment at exec, which a program cannot change afterwards: it shows how the
        # process was launched.
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # another user's process shows none, and is not of our launch
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in raw.split(b"\0"))
    return {name: value for name, _, value in pairs}


class BusyTime:
    """CPU seconds of a program, its living descendants and those it waited for, recorders excepted; never falling.

    The kernel adds the time of a child that was waited for to its parent's. So a recorder that ended is subtracted from
    then on, by what it had used at the last reading.
    """

    def __init__(self, pid: int, ended_recorders_s: float = 0.0) -> None:
        self._tree = _tree_without_recorders(pid)
        self._recorders_s: dict[psutil.Process, float] = {}
        self._ended_recorders_s = ended_recorders_s
        self._departed_s = 0.0
        self._highest_s = 0.0
        self._fell = False

    def seconds(self) -> float:
        # The sum can decrease: a process disappears when it ends, and its time is added to its parent's only when the
        # parent reaps it. An energy estimate must not decrease, so the highest sum is kept.
        now_s = self._departed_s + self._sum()
        short_s = self._highest_s - now_s
        if short_s > 0 and self._fell:
            # Fell twice in a row: a process ended without being reaped, so its time is in no parent's sum. (A single
            # fall may be a process that ended between reading its parent and itself.)
            self._departed_s += short_s
        self._fell = short_s > 0 and not self._fell
        self._highest_s = max(self._highest_s, now_s)
        return self._highest_s

    def _sum(self) -> float:
        members = self._tree.members()
        for recorder in {*self._tree.recorders, *self._recorders_s}:
            seconds = cpu_seconds(recorder)
            if seconds is None:
                self._ended_recorders_s += self._recorders_s.pop(recorder, 0.0)
            else:
                self._recorders_s[recorder] = seconds
        return sum(cpu_seconds(process) or 0.0 for process in members) - self._ended_recorders_s


def cpu_seconds(process: psutil.Process) -> float | None:
    """CPU time of the process and of the children that it waited for; None once it has exited."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system + times.children_user + times.children_system)
