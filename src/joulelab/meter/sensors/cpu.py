"""The host's CPU: utilization, contention by other processes, and energy estimated from CPU time.

Contention shows whether times and CPU estimates are comparable. Threads that wait for each other spin, so on contended
cores a program takes not only longer but more CPU time, and the estimate is made of CPU time. The kernel counts how
long each core was busy, stolen time of a virtual machine included; what remains after the CPU time of the program, its
ranks and the recorder was used by others.

The estimate is CPU time x watts per busy hardware thread, for machines without a readable sensor. The CPU time
(children and other ranks of its launch on this host included, recorders not) is exact; the watts are not. They are the
manufacturer's rated power divided by hardware threads, and a thread may draw half or twice that, depending on clocks,
neighbors and load. That factor is the figure's gain error. Idle power of the machine, memory and everything else is
left out rather than guessed: the model has no constant. On request the same model is applied to all busy threads of the
machine: a second device, listed and never counted.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from joulelab import clock
from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import Device, Line
from joulelab.meter.sensors.processes import BusyTime, fellow_ranks, living
from joulelab.units import BYTES_PER_MB


class HostSensor:
    def __init__(self, config: EnergyConfig, pid: int) -> None:
        self.interval_s = config.sample_interval_s

    def open(self) -> list[Device]:
        psutil.cpu_percent(None)  # the first call only sets the start of the next interval
        return []

    def read(self) -> list[Line]:
        memory = psutil.virtual_memory()
        return [
            {
                "kind": "host",
                "device": "host",
                "cpu_utilization_percent": psutil.cpu_percent(None),
                "host_memory_used_MB": round((memory.total - memory.available) / BYTES_PER_MB, 1),
            }
        ]

    def close(self) -> None:
        pass


# The kernel counts in clock ticks of 10 ms: over a second that is 1 % of a core.
SHORTEST_S = 1.0
_WORK = ("user", "system", "nice", "irq", "softirq", "steal")


class CoresSensor:
    def __init__(self, config: EnergyConfig, pid: int) -> None:
        self.interval_s = max(SHORTEST_S, config.sample_interval_s)
        self._pid, self._others = pid, config.process_ids
        self._cores: list[int] = []
        self._ranks: list[BusyTime] = []
        self._last = (0.0, 0.0, 0.0)

    def open(self) -> list[Device]:
        self._cores = allowed_cores(self._pid)
        self._ranks = [BusyTime(pid) for pid in (self._pid, *fellow_ranks(self._pid), *living(self._others))]
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
        # In units of cores: seconds of CPU time per second. Differences of two counters that are
        # read one after the other may be slightly negative on a quiet machine, hence the clamp at 0
        # below.
        others, idle = (busy_s - own_s) / elapsed_s, len(self._cores) - busy_s / elapsed_s
        return [{**line, "others_cores": round(max(0.0, others), 3), "idle_cores": round(max(0.0, idle), 3)}]

    def close(self) -> None:
        pass

    def _now(self) -> tuple[float, float, float]:
        """(moment, busy seconds of the cores that the program may use, those of the program and of this recorder)"""
        by_core = psutil.cpu_times(percpu=True)
        busy_s = sum(_busy_s(by_core[core]) for core in self._cores if core < len(by_core))
        # The recorder's own CPU time is neither the program's nor that of others.
        own_s = sum(rank.seconds() for rank in self._ranks) + time.process_time()
        return time.monotonic(), busy_s, own_s


def allowed_cores(pid: int) -> list[int]:
    """Cores that a program may run on; on a shared node the other cores do not matter to it."""
    try:
        return list(psutil.Process(pid).cpu_affinity())
    except (AttributeError, psutil.Error):  # no CPU affinity on this system
        return list(range(psutil.cpu_count() or 1))


def _busy_s(times: object) -> float:
    return float(sum(getattr(times, name, 0.0) for name in _WORK))


PROGRAM = "estimate:cpu"
MACHINE = "estimate:machine"


@dataclass(frozen=True)
class ProcessorRow:
    """Rated power and hardware threads from the manufacturer's product page."""

    pattern: str
    rated_w: float
    threads: int
    source: str


TABLE = (
    ProcessorRow(r"EPYC 7402\b", 180, 48, "AMD product page EPYC 7402"),
    ProcessorRow(r"EPYC 7713\b", 225, 128, "AMD product page EPYC 7713"),
    ProcessorRow(r"EPYC 7763", 280, 128, "AMD product page EPYC 7763"),
    ProcessorRow(r"EPYC 7742", 225, 128, "AMD product page EPYC 7742"),
    ProcessorRow(r"EPYC 7543", 225, 64, "AMD product page EPYC 7543"),
    ProcessorRow(r"EPYC 9654", 360, 192, "AMD product page EPYC 9654"),
    ProcessorRow(r"EPYC 9554", 360, 128, "AMD product page EPYC 9554"),
    ProcessorRow(r"EPYC 9354", 280, 64, "AMD product page EPYC 9354"),
    ProcessorRow(r"EPYC 9534", 280, 128, "AMD product page EPYC 9534"),
    ProcessorRow(r"EPYC 9755", 500, 256, "AMD product page EPYC 9755"),
    ProcessorRow(r"PRO 5995WX", 280, 128, "AMD product page Ryzen Threadripper PRO 5995WX"),
    ProcessorRow(r"Ryzen 9 5950X", 105, 32, "AMD product page Ryzen 9 5950X"),
    ProcessorRow(r"Ryzen 9 7950X", 170, 32, "AMD product page Ryzen 9 7950X"),
    ProcessorRow(r"Ryzen 7 5800X", 105, 16, "AMD product page Ryzen 7 5800X"),
    ProcessorRow(r"Platinum 8480", 350, 112, "Intel ARK Xeon Platinum 8480+"),
    ProcessorRow(r"Platinum 8380", 270, 80, "Intel ARK Xeon Platinum 8380"),
    ProcessorRow(r"Platinum 8358\b", 250, 64, "Intel ARK Xeon Platinum 8358"),
    ProcessorRow(r"Platinum 8468\b", 350, 96, "Intel ARK Xeon Platinum 8468"),
    ProcessorRow(r"Platinum 8558\b", 330, 96, "Intel ARK Xeon Platinum 8558"),
    ProcessorRow(r"Gold 6230\b", 125, 40, "Intel ARK Xeon Gold 6230"),
    ProcessorRow(r"Gold 6338\b", 205, 64, "Intel ARK Xeon Gold 6338"),
    ProcessorRow(r"Gold 6248\b", 150, 40, "Intel ARK Xeon Gold 6248"),
    ProcessorRow(r"Gold 6148\b", 150, 40, "Intel ARK Xeon Gold 6148"),
    ProcessorRow(r"i9-13900K\b", 125, 32, "Intel ARK Core i9-13900K (base power)"),
    ProcessorRow(r"i7-12700\b", 65, 20, "Intel ARK Core i7-12700 (base power)"),
    ProcessorRow(r"i7-1185G7", 28, 8, "Intel ARK Core i7-1185G7"),
    ProcessorRow(r"i5-8250U", 15, 8, "Intel ARK Core i5-8250U"),
    # Families, where a hypervisor hides the model: the middle of the rows above, on a logarithmic scale.
    ProcessorRow(r"EPYC", 2.5, 1, "middle of the EPYC processors that joulelab lists (1.8 to 4.4 W per thread)"),
    ProcessorRow(r"Xeon", 3.4, 1, "middle of the Xeon processors that joulelab lists (3.1 to 3.9 W per thread)"),
)
UNKNOWN = ProcessorRow(r"", 3.3, 1, "middle of the processors that joulelab lists (1.8 to 6.6 W per thread)")
KNOWN_MODEL_GAIN_ERROR_REL = 0.5
FAMILY_GAIN_ERROR_REL = 0.7


def processor_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        # macOS: platform.processor() is only `arm`
        return clock.kernel_setting("machdep.cpu.brand_string") or platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.machine()


def row_for(processor: str) -> ProcessorRow:
    return next((row for row in TABLE if re.search(row.pattern, processor)), UNKNOWN)


class CpuEstimateSensor:
    def __init__(self, config: EnergyConfig, pid: int) -> None:
        self.interval_s = config.sample_interval_s
        self._with_machine = config.estimate_machine or config.total_energy_policy == "machine"
        self._pid, self._others = pid, config.process_ids
        self._ranks: list[BusyTime] = []
        self._absent: list[int] = []
        self._ended_s: Mapping[int, float] = {}

    def exclude(self, ended_s: Mapping[int, float]) -> None:
        """Before `open()`: CPU seconds of recorders that have ended already, by the program that waited for them."""
        self._ended_s = ended_s

    def open(self) -> list[Device]:
        # one recorder serves all ranks of a host, so it has to count the CPU time of all of them
        pids, others = [self._pid, *fellow_ranks(self._pid)], living(self._others)
        self._absent = [pid for pid in self._others if pid not in others]
        self._ranks = [BusyTime(pid, self._ended_s.get(pid, 0.0)) for pid in (*pids, *others)]
        ranks = f", {len(pids)} ranks of one launch" if len(pids) > 1 else ""
        named = f", and pid {', '.join(map(str, others))}" if others else ""
        devices = [_describe(PROGRAM, f"the program and its children{ranks}{named}")]
        if self._with_machine:
            devices.append(_describe(MACHINE, "all processes of this machine", counted=False))
        return devices

    def read(self) -> list[Line]:
        lines = [_line(PROGRAM, sum(rank.seconds() for rank in self._ranks))]
        if self._with_machine:
            lines.append(_line(MACHINE, machine_busy_s()))
        for pid in self._absent:
            text = f"there is no pid {pid}, so its CPU time, which was requested, is not in the estimate"
            lines.append({"kind": "warning", "device": PROGRAM, "text": text})
        self._absent = []
        return lines

    def close(self) -> None:
        pass


def machine_busy_s() -> float:
    """Thread-seconds in which this machine's CPUs worked since boot. Stolen time was another machine's work."""
    times = psutil.cpu_times()
    return float(times.user + times.system + sum(getattr(times, name, 0.0) for name in ("nice", "irq", "softirq")))


def _line(device: str, busy_s: float) -> Line:
    return {"kind": "estimate", "device": device, "busy_thread_s": round(busy_s, 4)}


def _describe(device: str, whose: str, counted: bool = True) -> Device:
    processor = processor_name()
    row = row_for(processor)
    facts: dict[str, object] = {
        "w_per_thread": row.rated_w / row.threads,
        "power_limit_w": row.rated_w / row.threads * (os.cpu_count() or 1),
        "source": row.source,
        "model": f"CPU time of {whose} x rated watts per hardware thread",
    }
    if not counted:
        facts |= {"node_wide": True, "reason": "it includes the program's estimate", **machine_constants()}
    return Device(
        device=device,
        component="cpu_estimate",
        name=processor,
        counted=counted,
        refresh_s=0.01,  # CPU time is counted in clock ticks
        gain_error_rel=KNOWN_MODEL_GAIN_ERROR_REL if row.threads > 1 else FAMILY_GAIN_ERROR_REL,
        facts=facts,
    )


# The whole machine: energy that does not depend on what the CPUs do, as constant power. On a virtual machine it is the
# share of the host that belongs to its CPUs and memory.

# Idle power of a server at the plug (board, fans, power supply, idle CPUs) divided by its hardware threads: the mean of
# SPECpower_ssj2008 servers that Cloud Carbon Footprint uses for AWS (MIN_WATTS_AVG). PCs with few threads may draw 2 W
# per thread, which the error covers.
BASE_W_PER_THREAD, BASE_ERROR_REL = 0.74, 2.0
# Mean of two manufacturers' figures for DDR4, used by Cloud Carbon Footprint (MEMORY_COEFFICIENT); CodeCarbon used
# 0.375 W. Idle modules draw about half.
MEMORY_W_PER_GB, MEMORY_ERROR_REL = 0.392, 0.5


def machine_constants() -> dict[str, object]:
    """Power of memory and of everything but the CPUs' work, with relative errors and sources."""
    threads, memory_gb = os.cpu_count() or 1, psutil.virtual_memory().total / 1e9
    return {
        "base_w": BASE_W_PER_THREAD * threads,
        "base_error_rel": BASE_ERROR_REL,
        "base_source": f"{BASE_W_PER_THREAD} W of idle power per hardware thread, Cloud Carbon Footprint",
        "memory_w": MEMORY_W_PER_GB * memory_gb,
        "memory_error_rel": MEMORY_ERROR_REL,
        "memory_source": f"{MEMORY_W_PER_GB} W per GB of memory, Cloud Carbon Footprint",
    }


# How many CPU cores this process may use.


def usable_cores() -> int:
    """CPU cores available to this process (respects affinity, for example under Slurm)."""
    return len(allowed_cores(os.getpid()))
