"""A sensor in the monitor's hands: read, and on an error told, retried, and opened anew; it never ends the monitor."""

from __future__ import annotations

import time
from collections.abc import Callable

from joulelab import clock
from joulelab.meter.sensors import Device, Line, Sensor
from joulelab.units import duration_text

# A driver that was reloaded answers old handles with errors for ever; after this many the sensor is opened anew.
REOPEN_AFTER = 3


class Slot:
    def __init__(self, name: str, make: Callable[[], Sensor], say: Callable[[str], None]) -> None:
        self.name = name
        self._make = make
        self._say = say
        self._sensor = make()
        self._is_open = False
        self.devices: tuple[str, ...] = ()
        self.errors = 0
        self._errors_in_a_row = 0
        self._failing_since = 0.0

    @property
    def interval_s(self) -> float:
        return self._sensor.interval_s

    def open(self) -> list[Device]:
        devices = self._sensor.open()
        self._is_open = True
        self.devices = tuple(device.device for device in devices)
        return devices

    def read(self, edge: bool = False) -> list[Line]:
        """One reading, or one line of kind `gap` that says why there is none. An `edge` has the slow counters too."""
        try:
            if not self._is_open or (self._errors_in_a_row and self._errors_in_a_row % REOPEN_AFTER == 0):
                self._reopen()
            lines: list[Line] = getattr(self._sensor, "read_edge" if edge else "read", self._sensor.read)()
        except Exception as error:  # whatever a driver throws: the next tick tries again
            return [self._gap(f"{type(error).__name__}: {error}")]
        if self._errors_in_a_row:
            took = duration_text(time.monotonic() - self._failing_since)
            self._say(f"{self.name} answers again after {took}")
            self._errors_in_a_row = 0
        return lines

    def _gap(self, reason: str) -> Line:
        self.errors += 1
        if not self._errors_in_a_row:
            self._failing_since = time.monotonic()
            self._say(f"error: {self.name} cannot be read ({reason}); trying again at each tick")
        self._errors_in_a_row += 1
        return {"kind": "gap", **clock.now().fields(), "device": self.name, "reason": reason}

    def _reopen(self) -> None:
        """The old one is closed first: a driver's library is one for the whole process."""
        self.close()
        self._sensor = self._make()
        self.open()

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._sensor.close()
        except Exception as error:
            self._say(f"{self.name} did not close cleanly: {error}")
