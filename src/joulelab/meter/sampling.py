"""The sampling loop: open sensors, read them at their deadlines, and hand the readings to a sink.

It has three sinks: the recorder (trace of a run), the monitor (log for operators) and telemetry (table of a training
loop, whose steps are the deadlines). A sink decides what is written and when to end; how a sensor is scheduled, read
and retried is decided here.

Deadlines are on a fixed grid, so lateness never accumulates to drift. Without `Ticks` each sensor has a grid of its own
interval. With them all sensors are read together at every tick. Sensors of energy that ask for shorter intervals are
then also read in between, about once a second: the driver's power buffer holds 2.4 s, and a RAPL counter may wrap
unseen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from joulelab import clock
from joulelab.meter.sensors import OPEN_LIMIT_S, Device, Line, Sensor, SensorUnavailable, within
from joulelab.units import duration_text

BETWEEN_TICKS_S = 1.0
# CPU use is a share of the time since the call before, so the first tick comes this much after the sensors are open.
FIRST_TICK_S = 0.1
# A GPU's counter takes milliseconds to read: at shorter ticks the sensor decides when to read it.
COUNTER_EACH_TICK_FROM_S = 1.0
# After a driver is reloaded, old handles fail forever; after this many failures the sensor is opened again.
REOPEN_AFTER = 3
_CPU_SENSORS = ("host", "cores", "rapl", "cpu-estimate")

Call = Literal["read", "read_edge", "read_quick"]
"""Which of a sensor's readings; one that a sensor does not have is its `read`."""


@dataclass(frozen=True)
class Reading:
    """The lines of one call to a sensor; a single `gap` line if it failed."""

    source: SensorReader
    lines: list[Line]
    stamp: clock.Stamp
    """Right after the call."""
    late_s: float
    """From the deadline to the call."""
    took_s: float
    failed: bool = False


class SensorReader:
    """A sensor with its deadline. A failing sensor yields gaps and is read again; it never ends the loop.

    With `reopen` it is also closed and opened again after `REOPEN_AFTER` failures in a row. `report` gets a sentence
    when it starts to fail and when it recovers.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Sensor],
        reopen: bool = False,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.name = name
        self.sensor = make()
        self.devices: tuple[str, ...] = ()
        self.due_ns = 0
        self._make = make
        self._reopen = reopen
        self._report = report
        self._is_open = False
        self._failures_in_a_row = 0
        self._failing_since_s = 0.0

    def open(self) -> list[Device]:
        devices = self.sensor.open()
        self._is_open = True
        self.due_ns = time.monotonic_ns()
        self.devices = tuple(device.device for device in devices)
        return devices

    def read(self, call: Call = "read") -> Reading:
        begin_ns = time.monotonic_ns()
        late_s = (begin_ns - self.due_ns) / clock.NS
        failed = False
        try:
            if self._reopen and (not self._is_open or self._failed_often()):
                self._open_again()
            lines = list(getattr(self.sensor, call, self.sensor.read)())
        except Exception as error:  # drivers raise anything; the next deadline tries again
            failed = True
            reason = f"{type(error).__name__}: {error}"
            self._note_failure(reason)
            lines = [{"kind": "gap", "device": self.name, "reason": reason}]
        else:
            self._note_success()
        stamp = clock.now()
        return Reading(self, lines, stamp, late_s, (stamp.mono_ns - begin_ns) / clock.NS, failed)

    def _failed_often(self) -> bool:
        return self._failures_in_a_row > 0 and self._failures_in_a_row % REOPEN_AFTER == 0

    def _note_failure(self, reason: str) -> None:
        if not self._failures_in_a_row:
            self._failing_since_s = time.monotonic()
            self._report(f"error: {self.name} cannot be read ({reason}); trying again at each tick")
        self._failures_in_a_row += 1

    def _note_success(self) -> None:
        if self._failures_in_a_row:
            self._report(f"{self.name} answers again after {duration_text(time.monotonic() - self._failing_since_s)}")
            self._failures_in_a_row = 0

    def _open_again(self) -> None:
        """The old sensor is closed first: a process has a driver's library only once."""
        self.close()
        self.sensor = self._make()
        self.open()

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            self.sensor.close()
        except Exception as error:
            self._report(f"{self.name} did not close cleanly: {error}")


def open_sensors(
    readers: Sequence[SensorReader], fallback: Sequence[SensorReader] = ()
) -> tuple[list[SensorReader], list[Device], list[SensorUnavailable]]:
    """Open what can be opened: the readers that work, their devices, and why the others do not.

    `fallback` readers are opened only if no other one has a device that counts.
    """
    opened: list[SensorReader] = []
    devices: list[Device] = []
    missing: list[SensorUnavailable] = []
    for reader in readers:
        try:
            devices += within(OPEN_LIMIT_S, reader.open)
        except TimeoutError:
            component = "cpu" if reader.name in _CPU_SENSORS else "gpu"
            reason = f"{reader.name}: its driver did not answer within {OPEN_LIMIT_S:g} s"
            missing.append(
                SensorUnavailable(component, reason, "check the driver: nvidia-smi and dmesg show its state")
            )
        except SensorUnavailable as unavailable:
            missing.append(unavailable)
        except Exception as error:  # the other sensors may still start
            usual = "cpu" if reader.name in _CPU_SENSORS else "gpu"
            component = getattr(reader.sensor, "component", usual)
            missing.append(SensorUnavailable(component, f"{reader.name}: {type(error).__name__}: {error}"))
        else:
            opened.append(reader)
    if fallback and not any(device.counted for device in devices):
        found = open_sensors(fallback)
        return [*opened, *found[0]], [*devices, *found[1]], [*missing, *found[2]]
    return opened, devices, missing


@dataclass(frozen=True)
class Ticks:
    """The common grid of all sensors, and who takes what is read there."""

    interval_s: float
    take: Callable[[list[Reading], float], None]
    """Gets the readings of all sensors, and how many seconds the tick was late."""
    missed: Callable[[int], None]
    """Gets the number of ticks that passed without a reading."""


class SamplingLoop:
    def __init__(self, take: Callable[[list[Reading]], None], ticks: Ticks | None = None) -> None:
        """`take` gets the readings of sensors at their own deadlines: all of them, or with ticks those in between."""
        self.readers: list[SensorReader] = []
        self._take = take
        self._ticks = ticks
        self._tick_ns = 0

    def open(
        self, readers: Sequence[SensorReader], fallback: Sequence[SensorReader] = ()
    ) -> tuple[list[Device], list[SensorUnavailable]]:
        """Open these sensors and read them from now on; their devices, and why some cannot be opened."""
        opened, devices, missing = open_sensors(readers, fallback)
        # on one grid, so that sensors of the same interval share a wake-up and a durable write
        begin_ns = time.monotonic_ns()
        for reader in opened:
            reader.due_ns = begin_ns
        self.readers += opened
        return devices, missing

    def read_all(self, call: Call = "read") -> list[Reading]:
        """Read every sensor now, whether it is due or not."""
        return [self._read(reader, call) for reader in self.readers]

    def run(self, wait: Callable[[float | None], str | None], duration_s: float | None = None) -> str | None:
        """Read until `wait` returns a reason to end, which is returned, or until the duration is over (None).

        `wait` gets the seconds to the next deadline, None while there are no sensors. The last reading comes after it.
        """
        self._tick_ns = time.monotonic_ns() + round(FIRST_TICK_S * clock.NS)
        end_ns = None if duration_s is None else self._tick_ns + round(duration_s * clock.NS)
        if self._ticks is None:
            return self._run_on_own_grids(wait)
        for reader in self.readers:
            reader.due_ns = self._tick_ns
        return self._run_ticks(self._ticks, wait, end_ns)

    def close(self) -> None:
        for reader in self.readers:
            reader.close()

    def _run_on_own_grids(self, wait: Callable[[float | None], str | None]) -> str:
        while (reason := wait(self._timeout_s())) is None:
            if due := [self._read(reader) for reader in self.readers if reader.due_ns <= time.monotonic_ns()]:
                self._take(due)
        self._take(self.read_all("read_edge"))
        return reason

    def _run_ticks(self, ticks: Ticks, wait: Callable[[float | None], str | None], end_ns: int | None) -> str | None:
        step_ns = round(ticks.interval_s * clock.NS)
        edge = True  # the first tick and the last have the counters, and others that are far enough apart
        while (reason := wait(self._timeout_s())) is None:
            now_ns = time.monotonic_ns()
            if now_ns < self._tick_ns:
                if due := [self._read(reader) for reader in self.readers if reader.due_ns <= now_ns]:
                    self._take(due)
                continue
            last = end_ns is not None and self._tick_ns >= end_ns
            # lateness is taken before reading: it is the delay of the machine, not of the sensors
            ticks.take(self.read_all("read_edge" if edge or last else "read"), (now_ns - self._tick_ns) / clock.NS)
            if last:
                return None
            if missed := max(0, time.monotonic_ns() - self._tick_ns) // step_ns:
                ticks.missed(missed)
            self._tick_ns += step_ns * (1 + missed)
            if end_ns is not None:
                self._tick_ns = min(self._tick_ns, end_ns)
            edge = ticks.interval_s >= COUNTER_EACH_TICK_FROM_S
            for reader in self.readers:
                self._schedule(reader)
        ticks.take(self.read_all("read_edge"), 0.0)
        return reason

    def _timeout_s(self) -> float | None:
        due_ns = [reader.due_ns for reader in self.readers]
        if self._ticks is not None:
            due_ns.append(self._tick_ns)
        return max(0.0, (min(due_ns) - time.monotonic_ns()) / clock.NS) if due_ns else None

    def _read(self, reader: SensorReader, call: Call = "read") -> Reading:
        reading = reader.read(call)
        self._schedule(reader)
        return reading

    def _schedule(self, reader: SensorReader) -> None:
        now_ns = time.monotonic_ns()
        interval_s = reader.sensor.interval_s
        if self._ticks is None:
            # whole steps from the previous deadline, not from now: a late reading does not shift the grid
            step_ns = int(interval_s * clock.NS)
            # Deadlines that have passed are skipped, not caught up: two readings in a row would
            # cost time and give the same value.
            reader.due_ns += step_ns * (1 + max(0, now_ns - reader.due_ns) // step_ns)
            return
        reader.due_ns = self._tick_ns
        if reader.devices and interval_s < self._ticks.interval_s:
            between_ns = now_ns + round(max(BETWEEN_TICKS_S, interval_s) * clock.NS)
            # a reading shortly before the tick would add nothing to it
            if self._tick_ns - between_ns >= BETWEEN_TICKS_S / 2 * clock.NS:
                reader.due_ns = between_ns
