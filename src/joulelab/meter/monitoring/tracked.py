"""The tracked process with all its descendants: a data loader's workers and a launcher's ranks are its work too.

CPU use comes from CPU seconds, in which a child that ended between two ticks is still counted by whoever reaped it. RSS
of a family counts pages they share once for each member, as `ps` would.
"""

from __future__ import annotations

import time
from typing import Any

import psutil

from joulelab.meter.sensors.process_tree import ProcessTree
from joulelab.units import BYTES_PER_MB

Block = dict[str, Any]


class TrackedProcess:
    """Raises psutil.NoSuchProcess where there is none with this number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)
        self._tree = ProcessTree(pid)
        self.gone = False
        self._last = (time.monotonic(), *self._cpu_seconds(self._descendants()))
        self._children: list[int] = []
        self._numbers: Block = {}

    def sample(self) -> None:
        """Once per tick; several records of the tick then carry the same numbers."""
        self._numbers = {}
        if self.gone:
            return
        try:
            if self._alive():
                self._numbers = self._read()
            else:
                self.gone = True
        except psutil.NoSuchProcess:
            self.gone = True
        except psutil.AccessDenied:
            pass

    def block(self, held: dict[int, int]) -> Block:
        """The `process` block of a record; `held` are the bytes each process has on that record's GPU."""
        numbers = self._numbers
        empty = {"cpu_utilization_percent": None, "memory_rss_MB": None, "gpu_memory_used_MB": None}
        if not numbers:
            return {"pid": self.pid, **empty}
        known = any(pid in held for pid in (self.pid, *self._children))
        of_children = sum(held.get(pid, 0) for pid in self._children)
        gpu_mb = round((held.get(self.pid, 0) + of_children) / BYTES_PER_MB, 1) if known else None
        children_mb = round(of_children / BYTES_PER_MB, 1) if known else None
        children = {**numbers["children"], "gpu_memory_used_MB": children_mb}
        return {"pid": self.pid, **empty, **numbers, "gpu_memory_used_MB": gpu_mb, "children": children}

    def _alive(self) -> bool:
        return bool(self._process.is_running()) and self._process.status() != psutil.STATUS_ZOMBIE

    def _descendants(self) -> list[psutil.Process]:
        return [member for member in self._tree.members() if member.pid != self.pid and member.is_running()]

    def _read(self) -> Block:
        children = self._descendants()
        self._children = [child.pid for child in children]
        now = time.monotonic()
        own_s, family_s = self._cpu_seconds(children)
        before, own_before_s, family_before_s = self._last
        span_s = max(now - before, 1e-6)
        self._last = (now, own_s, family_s)
        children_rss = sum(_rss(child) for child in children)
        # a child that ends unreaped takes its seconds along: the family's use is never below 0
        family_percent = max(0.0, 100 * (family_s - family_before_s) / span_s)
        own_percent = 100 * (own_s - own_before_s) / span_s
        return {
            "cpu_utilization_percent": round(family_percent, 1),
            "memory_rss_MB": round((self._process.memory_info().rss + children_rss) / BYTES_PER_MB, 1),
            "children": {
                "count": len(children),
                "cpu_utilization_percent": round(max(0.0, family_percent - own_percent), 1),
                "memory_rss_MB": round(children_rss / BYTES_PER_MB, 1),
            },
        }

    def _cpu_seconds(self, children: list[psutil.Process]) -> tuple[float, float]:
        times = self._process.cpu_times()
        own_s = float(times.user + times.system)
        family_s = own_s + times.children_user + times.children_system
        for child in children:
            try:
                one = child.cpu_times()
            except psutil.Error:
                continue
            family_s += one.user + one.system + one.children_user + one.children_system
        return own_s, float(family_s)


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def gpu_memory_by_process(line: dict[str, Any]) -> dict[int, int]:
    """Bytes each process holds on one GPU, from its reading; empty where the driver does not tell (most containers)."""
    held = {}
    for entry in line.get("gpu_processes") or ():
        if entry.get("gpu_memory_used_MB") is not None:
            held[int(entry["pid"])] = round(entry["gpu_memory_used_MB"] * BYTES_PER_MB)
    return held
