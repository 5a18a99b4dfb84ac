"""CPU joules by a model, for machines whose sensors are out of reach: CPU time x watts per busy hardware thread.

The measured program's CPU time (children included, this recorder not) is exact; the watts are not. They are the
maker's rated power divided by hardware threads, and a thread of the same processor may draw half or twice that,
depending on clocks, neighbours and load. That factor is stated as the figure's gain error. Idle power of the machine,
memory and everything else is left out rather than guessed.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import Device, Line


@dataclass(frozen=True)
class ProcessorRow:
    """Rated power and hardware threads from the maker's product page."""

    pattern: str
    rated_w: float
    threads: int
    source: str


TABLE = (
    ProcessorRow(r"EPYC 7763", 280, 128, "AMD product page EPYC 7763"),
    ProcessorRow(r"EPYC 7742", 225, 128, "AMD product page EPYC 7742"),
    ProcessorRow(r"EPYC 7543", 225, 64, "AMD product page EPYC 7543"),
    ProcessorRow(r"EPYC 9654", 360, 192, "AMD product page EPYC 9654"),
    ProcessorRow(r"EPYC 9554", 360, 128, "AMD product page EPYC 9554"),
    ProcessorRow(r"EPYC 9354", 280, 64, "AMD product page EPYC 9354"),
    ProcessorRow(r"Ryzen 9 7950X", 170, 32, "AMD product page Ryzen 9 7950X"),
    ProcessorRow(r"Ryzen 7 5800X", 105, 16, "AMD product page Ryzen 7 5800X"),
    ProcessorRow(r"Platinum 8480", 350, 112, "Intel ARK Xeon Platinum 8480+"),
    ProcessorRow(r"Platinum 8380", 270, 80, "Intel ARK Xeon Platinum 8380"),
    ProcessorRow(r"Gold 6248\b", 150, 40, "Intel ARK Xeon Gold 6248"),
    ProcessorRow(r"Gold 6148\b", 150, 40, "Intel ARK Xeon Gold 6148"),
    ProcessorRow(r"i9-13900K\b", 125, 32, "Intel ARK Core i9-13900K (base power)"),
    ProcessorRow(r"i7-12700\b", 65, 20, "Intel ARK Core i7-12700 (base power)"),
    ProcessorRow(r"i7-1185G7", 28, 8, "Intel ARK Core i7-1185G7"),
    ProcessorRow(r"i5-8250U", 15, 8, "Intel ARK Core i5-8250U"),
    # Families, where a hypervisor hides the model: the middle of the rows above, on a logarithmic scale.
    ProcessorRow(r"EPYC", 2.5, 1, "middle of the EPYC rows of this table (1.8 to 4.4 W per thread)"),
    ProcessorRow(r"Xeon", 3.4, 1, "middle of the Xeon rows of this table (3.1 to 3.8 W per thread)"),
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
        self._program = psutil.Process(pid)
        self._own_pid = psutil.Process().pid
        self._highest_s = 0.0

    def open(self) -> list[Device]:
        processor = processor_name()
        row = row_for(processor)
        return [
            Device(
                device="estimate:cpu",
                component="cpu_estimate",
                name=processor,
                refresh_s=0.01,  # CPU time is counted in clock ticks
                gain_error_rel=KNOWN_MODEL_GAIN_ERROR_REL if row.threads > 1 else FAMILY_GAIN_ERROR_REL,
                facts={
                    "w_per_thread": row.rated_w / row.threads,
                    "source": row.source,
                    "model": "CPU time of the program and its children x rated watts per hardware thread",
                },
            )
        ]

    def read(self) -> list[Line]:
        # A child that ends uncounted by its parent takes its time along; the sum must not run backwards for that.
        self._highest_s = max(self._highest_s, self._cpu_seconds())
        return [{"kind": "estimate", "device": "estimate:cpu", "busy_thread_s": round(self._highest_s, 4)}]

    def _cpu_seconds(self) -> float:
        times = self._program.cpu_times()
        seconds = times.user + times.system + times.children_user + times.children_system
        for child in self._program.children(recursive=True):
            if child.pid == self._own_pid:
                continue
            try:
                own = child.cpu_times()
            except psutil.Error:
                continue
            seconds += own.user + own.system + own.children_user + own.children_system
        return float(seconds)

    def close(self) -> None:
        pass
