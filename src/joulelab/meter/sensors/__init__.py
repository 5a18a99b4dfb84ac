"""The sensor interface. A sensor lists its devices, or why there are none, and turns one reading into trace lines.

A new sensor is a class with the members of `Sensor`, in a file here, and a line in `lookup.SENSORS`. It may also have
`read_edge()`: a reading for the first and last moment of a recording, with everything that is otherwise read in turn;
and `read_quick()`: one that takes microseconds, for telemetry inside the measured program.

Lines a sensor may return in addition to readings: `gap` (fields `device`, `reason`) where one of its devices failed
while others did not, and `warning` (fields `device`, `text`) for what affects the energy of a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from joulelab.meter.config import EnergyConfig

Line = dict[str, Any]


@dataclass(frozen=True)
class SensorUnavailable(Exception):
    """A sensor has nothing to read: of which component, why, and how to fix that."""

    component: str
    reason: str
    fix: str = ""


@dataclass(frozen=True)
class Device:
    """One measured device, as it is in the header of the trace.

    `counted`: whether its energy is part of the component's total. A CPU's core domain is inside the package domain,
    and adding both would count it twice. Among the `facts`, `reason` is a sentence that is printed with the energy,
    `shared` means that it includes the energy of other users, `node_wide` that it is the whole node's, and `max_gap_s`
    is the longest time between two readings over which a wrapping counter can be unwrapped.
    """

    device: str
    component: str
    name: str
    counted: bool = True
    wrap_j: float | None = None
    refresh_s: float | None = None
    gain_error_rel: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class Sensor(Protocol):
    interval_s: float

    def __init__(self, config: EnergyConfig, pid: int) -> None:
        """`pid` is the measured program; nothing is opened yet."""

    def open(self) -> list[Device]:
        """Find the devices, or raise SensorUnavailable; may set `interval_s`, also later."""

    def read(self) -> list[Line]:
        """One reading; an exception here is logged as a gap and retried."""

    def close(self) -> None: ...
