"""How busy others kept the cores meanwhile. No joules: it tells whether times and CPU estimates can be compared.

Threads that wait for each other keep working at it, so on crowded cores a program takes not only longer but more CPU
time, and CPU time is what the estimate is made of. The kernel tells how long each core was busy, stolen time of a
virtual machine included; what is left after the program's own CPU time, its ranks' and ours was somebody else's.
"""

from __future__ import annotations

import time

import psutil

from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import Device, Line
from joulelab.meter.sensors.cpu_estimate import BusyTime
from joulelab.meter.sensors.gpu_processes import fellow_ranks

# The kernel counts in clock ticks of 10 ms: over a second that is 1 % of a core.
SHORTEST_S = 1.0
_WORK = ("user", "system", "nice", "irq", "softirq", "steal")


class CoresSensor:
    def __init__(self, config: EnergyConfig, pid: int) -> None:
        self.interval_s = max(SHORTEST_S, config.sample_interval_s)
        self._pid = pid
        self._cores: list[int] = []
        self._ranks: list[BusyTime] = []
        self._last = (0.0, 0.0, 0.0)

    def open(self) -> list[Device]:
        self._cores = allowed_cores(self._pid)
        self._ranks = [BusyTime(self._pid), *(BusyTime(pid) for pid in fellow_ranks(self._pid))]
        self._last = self._now()
        return []

    def read(self) -> list[Line]:
        last, now = self._last, self._now()
        elapsed_s, busy_s, own_s = (new - old for new, old in zip(now, last, strict=True))
        if elapsed_s < SHORTEST_S / 2:
            return []  # the first reading and the last: too short for clock ticks
        self._last = now
        if busy_s <= 0 < own_s:
            return []  # a kernel that counts no core's time, as in some sandboxes
        line: Line = {"kind": "cores", "device": "host", "cores": len(self._cores)}
        others, idle = (busy_s - own_s) / elapsed_s, len(self._cores) - busy_s / elapsed_s
        return [{**line, "others_cores": round(max(0.0, others), 3), "idle_cores": round(max(0.0, idle), 3)}]

    def close(self) -> None:
        pass

    def _now(self) -> tuple[float, float, float]:
        """(moment, busy seconds of the cores that the program may use, those of the program and of this recorder)"""
        by_core = psutil.cpu_times(percpu=True)
        busy_s = sum(_busy_s(by_core[core]) for core in self._cores if core < len(by_core))
        own_s = sum(rank.seconds() for rank in self._ranks) + time.process_time()
        return time.monotonic(), busy_s, own_s


def allowed_cores(pid: int) -> list[int]:
    """Those a program may run on: on a shared node others' cores are no matter of ours."""
    try:
        return list(psutil.Process(pid).cpu_affinity())
    except (AttributeError, psutil.Error):  # a system without such a rule
        return list(range(psutil.cpu_count() or 1))


def _busy_s(times: object) -> float:
    return float(sum(getattr(times, name, 0.0) for name in _WORK))
