"""Who else is on the GPU. Joules of a card are all its users' joules, so a stranger there is worth one warning.

NVML lists process ids. Ours are the measured program, what it started, and the other ranks of the same launch. An id
that does not exist here belongs to another PID namespace (another container, or this one as the host sees it): it
cannot be told who that is, and the warning says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

from joulelab.meter.sensors import Line
from joulelab.meter.sensors.process_tree import children_of

# Ranks of one launch share the first two and differ in the third, all set before their first instruction. (Two programs
# typed into one interactive Slurm step share all three, and are strangers.)
LAUNCH_MARKS = (("MASTER_ADDR", "MASTER_PORT", "RANK"), ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"))


class Strangers:
    """Each process that is not the program's is named once per device."""

    def __init__(self, program_pid: int) -> None:
        self._program_pid = program_pid
        self._known: set[tuple[str, int]] = set()

    def warn(self, device: str, pids: Iterable[int]) -> list[Line]:
        lines: list[Line] = []
        for pid in pids:
            if (device, pid) in self._known:
                continue
            self._known.add((device, pid))
            if not is_ours(pid, self._program_pid):
                lines.append({"kind": "warning", "device": device, "pid": pid, "text": self._text(pid)})
        return lines

    def _text(self, pid: int) -> str:
        try:
            who = f"{psutil.Process(pid).name()} (pid {pid})"
        except psutil.Error:
            who = f"pid {pid} of another PID namespace (or this program as its host numbers it)"
        return f"another process uses this GPU, and its joules are in the card's: {who}"


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


def _same_launch(pid: int, program_pid: int) -> bool:
    one, other = _first_environment(pid), _first_environment(program_pid)
    for where, which, rank in LAUNCH_MARKS:
        shared = where in one and all(one.get(name) == other.get(name) for name in (where, which))
        if shared and one.get(rank) != other.get(rank):
            return True
    return False


def _first_environment(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # another user's process shows none, and is not of our launch
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in raw.split(b"\0"))
    return {name: value for name, _, value in pairs}
