"""Two clocks on every line: monotonic time to compute with, wall time to read and to align machines by.

CLOCK_MONOTONIC is the same clock for all processes of a boot, so the marks of the measured program and the samples of
the recorder share it. It is undefined across boots and machines, so every file header has a `boot_id`.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import psutil

NS = 1_000_000_000


@dataclass(frozen=True)
class Stamp:
    mono_ns: int
    wall_s: float

    def fields(self) -> dict[str, object]:
        """The two time fields that open every line of a trace or event file."""
        return {"timestamp": iso(self.wall_s), "mono_ns": self.mono_ns}


def now() -> Stamp:
    return Stamp(time.monotonic_ns(), time.time())


def iso(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).astimezone().isoformat(timespec="microseconds")


def wall_seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


def folder_stamp() -> str:
    """UTC time, then the fraction of its second as 4 hex digits: names of one second sort by their start, too."""
    now = datetime.now(UTC)
    return f"{now:%Y%m%dT%H%M%SZ}-{now.microsecond * 0x10000 // 1_000_000:04x}"


@cache
def boot_id() -> str:
    """The same for all processes between two boots. On macOS the monotonic clock stops while the machine sleeps, so
    wall time minus monotonic time would change with every sleep; the kernel's own identifier does not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return kernel_setting("kern.bootsessionuuid") or f"boot-{int(psutil.boot_time())}"


def kernel_setting(name: str) -> str | None:
    """A value of `sysctl`, which macOS has in place of /proc; None if there is none."""
    try:
        found = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
