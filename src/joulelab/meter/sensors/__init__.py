"""One file per sensor. A sensor says which devices it sees, or why none, and turns one reading into trace lines.

A new sensor is a class with the members of `Sensor`, in a file here, and a line in `lookup.SENSORS`. It may also have
`read_edge()`: a reading for the first and last moment of a recording, with everything that is otherwise read in turn;
and `read_quick()`: one that takes microseconds, for telemetry inside the measured program.

Lines a sensor may return, beside those with readings: `gap` (fields `device`, `reason`) where one of its devices failed
while others did not, and `warning` (fields `device`, `text`) for what the reader of the joules must know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from joulelab.meter.config import EnergyConfig

Line = dict[str, Any]


@dataclass(frozen=True)
class SensorUnavailable(Exception):
    """There is nothing to read: for whom, why, and what would change that."""

    component: str
    reason: str
    fix: str = ""


@dataclass(frozen=True)
class Device:
    """One metered thing, as it stands in the trace's header.

    `counted` tells whether its joules belong into its component's total: a CPU's core domain lies inside the package,
    and adding both would count it twice. Among the `facts`, `reason` is a sentence for whoever reads the joules,
    `shared` says that others' joules are in them, `node_wide` that they are the whole node's, and `max_gap_s` is the
    longest time between two readings over which a wrapping counter can still be followed.
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
