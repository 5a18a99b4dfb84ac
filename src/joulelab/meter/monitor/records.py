"""One tick's readings as records: the operators' field names first, ours after them.

A GPU is one record per tick. The driver's 20 ms samples, and readings taken between ticks, are kept as their mean: a
log that is read line by line has no room for fifty lines a second. The host has a separate record where it has RAPL
counters, or where no GPU carries its CPU use.

The tracked process includes its descendants: data loader workers and a launcher's ranks are its work too. CPU use comes
from CPU seconds, where a child that ended between two ticks is counted by the process that reaped it. RSS of several
processes counts pages they share once per process, as `ps` does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from joulelab import clock
from joulelab.meter.sensors import Line
from joulelab.meter.sensors.processes import ProcessTree
from joulelab.units import BYTES_PER_MB


class WrapWatch:
    def __init__(self) -> None:
        self._last: Line = {}
        self._written = True

    def to_write(self, record: Line, due: bool) -> list[Line]:
        """The lines to write for this reading; one that is `due` is written anyway."""
        if "rapl" not in record:
            return [record] if due else []
        before = self._last.get("rapl", {})
        # a decrease is a wrap; with the reading before it in the log, every wrap is one visible decrease
        fell = any(counter_j < before.get(domain, 0.0) for domain, counter_j in record["rapl"].items())
        lines = [self._last] if fell and not self._written else []
        self._written = due or fell
        self._last = record
        return [*lines, record] if self._written else []


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
        # the CPU time of a child that ends without being reaped disappears, so the difference may be negative
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
    """Bytes each process holds on one GPU; empty if the driver does not list them (most containers)."""
    held = {}
    for entry in line.get("gpu_processes") or ():
        if entry.get("gpu_memory_used_MB") is not None:
            held[int(entry["pid"])] = round(entry["gpu_memory_used_MB"] * BYTES_PER_MB)
    return held


OPERATORS_FIELDS = (
    "gpu_index",
    "gpu_name",
    "power_watts",
    "memory_used_MB",
    "gpu_utilization_percent",
    "memory_utilization_percent",
    "temperature_C",
)


@dataclass
class BetweenTicks:
    """The watts read since the last tick, by device."""

    watts: dict[str, list[float]] = field(default_factory=dict)

    def take(self, lines: Sequence[Line]) -> None:
        sampled = {line["device"] for line in lines if line["kind"] == "samples"}
        for line in lines:
            watts = self.watts.setdefault(line["device"], [])
            if line["kind"] == "samples":
                watts += [power_mw / 1000 for power_mw in line["sample_mw"]]
            elif line["kind"] == "gpu" and line["device"] not in sampled and line.get("power_watts") is not None:
                watts.append(line["power_watts"])

    def mean_power(self, device: str) -> dict[str, float]:
        watts = self.watts.get(device, [])
        return {"power_mean_watts": round(sum(watts) / len(watts), 3)} if len(watts) > 1 else {}


def rapl_counters(lines: Sequence[Line]) -> dict[str, float]:
    return {domain: value for line in lines if line["kind"] == "rapl" for domain, value in line["rapl"].items()}


def make_records(
    lines: Sequence[Line],
    between: BetweenTicks,
    tracked: TrackedProcess | None,
    extra: dict[str, Any],
) -> list[Line]:
    """`extra` goes onto each record: whose session it is and how late the tick was."""
    host = next((line for line in lines if line["kind"] == "host"), {})
    stamp = clock.now().fields()
    cpu = {"cpu_utilization_percent": host.get("cpu_utilization_percent")}
    records = []
    for line in lines:
        if line["kind"] != "gpu":
            continue
        ours = {key: value for key, value in line.items() if key not in OPERATORS_FIELDS and key != "kind"}
        process = {} if tracked is None else {"process": tracked.block(gpu_memory_by_process(line))}
        operators = {key: line.get(key) for key in OPERATORS_FIELDS}
        mean = between.mean_power(line["device"])
        records.append({"kind": "gpu", **stamp, **operators, **cpu, **process, **ours, **mean, **extra})
    counters = rapl_counters(lines)
    if counters or not records:
        process = {"process": tracked.block({})} if tracked is not None and not records else {}
        rapl = {"rapl": counters} if counters else {}
        memory = {key: value for key, value in host.items() if key not in ("kind", "device", *cpu)}
        kind = "rapl" if counters else "host"
        records.append({"kind": kind, **stamp, "device": "host", **cpu, **memory, **process, **rapl, **extra})
    return records
