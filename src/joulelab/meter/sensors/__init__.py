"""The sensor interface. A sensor lists its devices, or why there are none, and turns one reading into trace lines.

A new sensor is a class with the members of `Sensor`, in a file here, and a line in `lookup.SENSORS`. It may also have
`read_edge()`: a reading for the first and last moment of a recording, with everything that is otherwise read in turn;
and `read_quick()`: one that takes microseconds, for telemetry inside the measured program.

Lines a sensor may return in addition to readings: `gap` (fields `device`, `reason`) where one of its devices failed
while others did not, and `warning` (fields `device`, `text`) for what affects the energy of a device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from joulelab.meter.config import EnergyConfig

Line = dict[str, Any]

# A decrease is a wrap unless that needed this many times the power that `max_gap_s` was computed with.
WRAP_MARGIN = 100.0
# A rise that needs this many times the device's limit is a jump: cards overshoot their limit by 30 % for milliseconds.
JUMP_FACTOR = 3.0
# No single device on sale in 2026 draws as much; for devices that do not report their limit.
ANY_DEVICE_W = 3000.0


@dataclass(frozen=True)
class SensorUnavailable(Exception):
    """A sensor has nothing to read: of which component, why, and how to fix that."""

    component: str
    reason: str
    fix: str = ""
    commands: tuple[tuple[str, str], ...] = ()
    """Shell commands that fix it, to be typed as they are, and what each does."""


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


def counter_rise(
    earlier_j: float, later_j: float, elapsed_s: float, wrap_j: float | None, max_gap_s: float | None
) -> float | None:
    """Energy between two readings of a counter; None if the counter was set back between them.

    A decrease is one wrap, because a wrapping counter is read far more often than it can wrap. Within `max_gap_s` it
    can advance by half its range at most. A decrease that would need a far larger rise is not a wrap: the counter was
    set back, for example because the driver was reloaded.
    """
    rise_j = later_j - earlier_j
    if rise_j >= 0:
        return rise_j
    if not wrap_j:
        return None
    # `max_gap_s` was chosen so that the device can count at most wrap_j / 2 in it: the fastest possible rise is
    # wrap_j / 2 / max_gap_s watts.
    most_j = WRAP_MARGIN * elapsed_s * wrap_j / 2 / max_gap_s if max_gap_s else wrap_j
    return rise_j + wrap_j if rise_j + wrap_j <= most_j else None


def largest_rise_w(limit_w: float | None) -> float:
    """A counter that rises faster than this has jumped: the device cannot have drawn it."""
    return JUMP_FACTOR * limit_w if limit_w else ANY_DEVICE_W


class Sensor(Protocol):
    interval_s: float

    def __init__(self, config: EnergyConfig, pid: int) -> None:
        """`pid` is the measured program; nothing is opened yet."""

    def open(self) -> list[Device]:
        """Find the devices, or raise SensorUnavailable; may set `interval_s`, also later."""

    def read(self) -> list[Line]:
        """One reading; an exception here is logged as a gap and retried."""

    def close(self) -> None: ...


# Initializing eight GPUs without persistence mode takes 4 to 8 s.
OPEN_LIMIT_S = 10.0
_Result = TypeVar("_Result")


def within(limit_s: float, call: Callable[[], _Result]) -> _Result:
    """The result of a call into a driver; TimeoutError if it hangs. A call that hangs in the kernel cannot be ended, so
    its thread stays behind until the process exits."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="joulelab-driver-call")
    thread.start()
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]
