"""CPU joules by a model, for machines whose sensors are out of reach: CPU time x watts per busy hardware thread.

The measured program's CPU time (children and other ranks of its launch on this host included, recorders not) is
exact; the watts are not. They are the maker's rated power divided by hardware threads, and a thread of the same
processor may draw half or twice that, depending on clocks, neighbours and load. That factor is stated as the figure's
gain error. Idle power of the machine, memory and everything else is left out rather than guessed: there is no constant
in this model.

On request the same model is applied to all of the machine's busy threads: a second device, listed and never counted.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import Device, Line
from joulelab.meter.sensors.gpu_processes import fellow_ranks
from joulelab.meter.sensors.process_tree import ProcessTree

PROGRAM = "estimate:cpu"
MACHINE = "estimate:machine"


@dataclass(frozen=True)
class ProcessorRow:
    """Rated power and hardware threads from the maker's product page."""

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
    ProcessorRow(r"EPYC", 2.5, 1, "middle of the EPYC rows of this table (1.8 to 4.4 W per thread)"),
    ProcessorRow(r"Xeon", 3.4, 1, "middle of the Xeon rows of this table (3.1 to 3.9 W per thread)"),
)
UNKNOWN = ProcessorRow(r"", 3.3, 1, "middle of the whole table (1.8 to 6.6 W per thread)")
KNOWN_MODEL_GAIN_ERROR_REL = 0.5
FAMILY_GAIN_ERROR_REL = 0.7


def processor_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.machine()


def row_for(processor: str) -> ProcessorRow:
    return next((row for row in TABLE if re.search(row.pattern, processor)), UNKNOWN)


class CpuEstimateSensor:
    def __init__(self, config: EnergyConfig, pid: int) -> None:
        self.interval_s = config.sample_interval_s
        self._with_machine = config.estimate_machine
        self._pid = pid
        self._ranks: list[BusyTime] = []
        self._ended_s: Mapping[int, float] = {}

    def exclude(self, ended_s: Mapping[int, float]) -> None:
        """Before `open()`: CPU seconds of recorders that have ended already, by the program that waited for them."""
        self._ended_s = ended_s

    def open(self) -> list[Device]:
        # one recorder serves all ranks of a host, so what they compute is told here or nowhere
        pids = [self._pid, *fellow_ranks(self._pid)]
        self._ranks = [BusyTime(pid, self._ended_s.get(pid, 0.0)) for pid in pids]
        ranks = f", {len(self._ranks)} ranks of one launch" if len(self._ranks) > 1 else ""
        devices = [_describe(PROGRAM, f"the program and its children{ranks}")]
        if self._with_machine:
            devices.append(_describe(MACHINE, "all processes of this machine", counted=False))
        return devices

    def read(self) -> list[Line]:
        lines = [_line(PROGRAM, sum(rank.seconds() for rank in self._ranks))]
        if self._with_machine:
            lines.append(_line(MACHINE, machine_busy_s()))
        return lines

    def close(self) -> None:
        pass


class BusyTime:
    """CPU seconds of a program, its living descendants and those it waited for, recorders excepted; never falling.

    The kernel adds the time of a child that was waited for to its parent's. So a recorder that ends is subtracted from
    then on, by what it had used at the last look.
    """

    def __init__(self, pid: int, ended_recorders_s: float = 0.0) -> None:
        self._tree = ProcessTree(pid, without_recorders=True)
        self._recorders_s: dict[psutil.Process, float] = {}
        self._ended_recorders_s = ended_recorders_s
        self._departed_s = 0.0
        self._highest_s = 0.0
        self._fell = False

    def seconds(self) -> float:
        now_s = self._departed_s + self._sum()
        short_s = self._highest_s - now_s
        if short_s > 0 and self._fell:
            # Fallen twice in a row: a process has ended for which nobody waited, so its time is in no parent's sum.
            # (Once may be one that ended between reading its parent and itself.)
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
    """Of the process and the children that it waited for; None once it is gone."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system + times.children_user + times.children_system)


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
        facts |= {"node_wide": True, "reason": "it holds the program's estimate and everyone else's"}
    return Device(
        device=device,
        component="cpu_estimate",
        name=processor,
        counted=counted,
        refresh_s=0.01,  # CPU time is counted in clock ticks
        gain_error_rel=KNOWN_MODEL_GAIN_ERROR_REL if row.threads > 1 else FAMILY_GAIN_ERROR_REL,
        facts=facts,
    )
