"""What every reader of a foreign log hands on: rows as they stood in the file, and the log made of them.

Column names are the operators' field names; a value that the file does not have is NaN, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joulelab.errors import JoulelabError, UsageError

Array = NDArray[np.float64]
COLUMNS = (
    "power_watts",
    "energy_counter_j",
    "gpu_utilization_percent",
    "memory_used_MB",
    "memory_utilization_percent",
    "temperature_C",
    "cpu_utilization_percent",
)


class UnknownFormat(UsageError):
    """A file that is none of the logs we can read."""


class UnusableLog(JoulelabError):
    """A log of a known kind that lacks what was asked of it."""

    exit_code = 2


@dataclass(frozen=True)
class Source:
    """The thing that was metered, as far as the file names it."""

    device: str
    name: str = ""
    component: str = "gpu"
    counted: bool = True
    wrap_j: float | None = None
    index: int | None = None


@dataclass(frozen=True)
class Row:
    source: Source
    values: Mapping[str, float]
    stamp: str | float | None = None
    """Time as the file has it: text, or a number of seconds since 1970."""
    seconds: float | None = None
    """Time on a clock known to be sound (monotonic time placed by the header), where the file has one."""


@dataclass(frozen=True)
class LogGap:
    """A stretch for which the recording program itself said that it has nothing."""

    device: str
    stamp: str
    reason: str


@dataclass(frozen=True)
class DeviceLog:
    """One device's readings; times ascend strictly, in seconds since 1970 or, without stamps, since the start."""

    source: Source
    times_s: Array
    columns: Mapping[str, Array]

    def series(self, column: str) -> tuple[Array, Array]:
        """The times and values at which this column was read."""
        values = self.columns.get(column)
        if values is None:
            return np.array([]), np.array([])
        known = ~np.isnan(values)
        return self.times_s[known], values[known]

    def power(self) -> tuple[Array, Array]:
        """Power as read, or else the slope of the counter, at the middle of each step."""
        times, watts = self.series("power_watts")
        if len(times):
            return times, watts
        times, joules = self.series("energy_counter_j")
        if len(times) < 2:
            return np.array([]), np.array([])
        slope = np.diff(joules) / np.diff(times)
        rising = slope >= 0
        return ((times[1:] + times[:-1]) / 2)[rising], slope[rising]


@dataclass(frozen=True)
class PowerLog:
    format: str
    clock: str
    """Where the times come from, in words, assumptions included."""
    has_wall: bool
    devices: tuple[DeviceLog, ...]
    notes: tuple[str, ...] = ()
    """What a reader of the figures must know: clock steps, duplicates, lines that could not be read."""
    gaps: tuple[LogGap, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def first_s(self) -> float:
        return min((float(device.times_s[0]) for device in self.devices if len(device.times_s)), default=0.0)
