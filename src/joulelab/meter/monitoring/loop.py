"""The monitor's loop: at each deadline read every sensor, write the records, sync, tell whoever watches.

Deadlines lie on a fixed grid from the start, so lateness never adds up to drift; it is recorded, and a deadline that
passed unserved is a gap in the log. Between ticks further apart than a second the energy sensors are read once a second
all the same: the driver's power buffer holds 2.4 s, and a RAPL counter may wrap unseen.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import psutil

from joulelab import clock
from joulelab.meter.monitoring.log_file import LogFile
from joulelab.meter.monitoring.records import BetweenTicks, make_records, rapl_counters
from joulelab.meter.monitoring.slot import Slot
from joulelab.meter.monitoring.tally import Tally
from joulelab.meter.monitoring.tracked import TrackedProcess
from joulelab.meter.monitoring.wraps import WrapWatch
from joulelab.meter.sensors import Device, Line, SensorUnavailable
from joulelab.meter.trace import header

BETWEEN_S = 1.0
# CPU use is a share of the time since it was last asked: the first tick leaves it some.
FIRST_TICK_S = 0.1
# The GPU's counter takes milliseconds to read: ticks closer together leave its cadence to the sensor.
COUNTER_EACH_TICK_FROM_S = 1.0
UNITS = {
    "power_watts": "W",
    "power_mean_watts": "W, mean of all readings since the record before",
    "energy_counter_j": "J since the driver was loaded",
    "memory_used_MB": "MiB",
    "memory_rss_MB": "MiB",
    "temperature_C": "degrees Celsius",
    "rapl": "J, wrapping at the device's wrap_j",
    "cpu_utilization_percent": "% of the machine; in `process` 100 is one busy thread, children included",
    "late_s": "s after the tick's deadline",
}
# Which job it was, for logs that outlive their names.
JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_NAME", "CUDA_VISIBLE_DEVICES")


class Stop(Protocol):
    def wait(self, timeout_s: float) -> str | None:
        """Sleep at most so long; the reason to end, if one came."""


@dataclass(frozen=True)
class Settings:
    interval_s: float
    duration_s: float | None = None
    pid: int | None = None


class Monitor:
    def __init__(self, settings: Settings, slots: Sequence[Slot], log: LogFile, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._slots = list(slots)
        self._log = log
        self._say = say
        self._session = secrets.token_hex(4)
        self._between = BetweenTicks()
        self._wraps = WrapWatch()
        self._between_due_ns: dict[str, int] = {}
        self._tracked = self._track(settings.pid)
        self.tally = Tally(())

    def _track(self, pid: int | None) -> TrackedProcess | None:
        if pid is None:
            return None
        try:
            return TrackedProcess(pid)
        except (psutil.NoSuchProcess, ValueError, OverflowError):
            self._say(f"error: there is no process {pid}; going on without its metrics")
        except psutil.AccessDenied:
            self._say(f"error: process {pid} may not be read by this user; going on without its metrics")
        return None

    def open(self) -> list[SensorUnavailable]:
        """Open the sensors and write the header; what is missing, with reasons."""
        devices: list[Device] = []
        missing: list[SensorUnavailable] = []
        for slot in list(self._slots):
            try:
                devices += slot.open()
            except SensorUnavailable as gone:
                missing.append(gone)
                self._slots.remove(slot)
            except Exception as error:  # a sensor that cannot start must not take the others along
                component = "cpu" if slot.name in ("host", "rapl") else "gpu"
                missing.append(SensorUnavailable(component, f"{slot.name}: {type(error).__name__}: {error}"))
                self._slots.remove(slot)
        self.tally = Tally(devices)
        self._log.append(self._header(devices, missing))
        return missing

    def _header(self, devices: Sequence[Device], missing: Sequence[SensorUnavailable]) -> Line:
        stamp = clock.now()
        return header(
            program="joulelab monitor",
            session=self._session,
            program_pid=self._settings.pid,
            interval_s=self._settings.interval_s,
            wall_minus_mono_s=stamp.wall_s - stamp.mono_ns / clock.NS,
            job={name: os.environ[name] for name in JOB_VARIABLES if name in os.environ},
            driver=next((device.facts["driver"] for device in devices if "driver" in device.facts), None),
            devices=[asdict(device) for device in devices],
            missing=[asdict(gone) for gone in missing],
            units=UNITS,
        )

    def run(self, stop: Stop, watch: Callable[[Tally], None] = lambda tally: None) -> str:
        """Tick until told to stop or the duration is over; the reason."""
        step_ns = round(self._settings.interval_s * clock.NS)
        due_ns = time.monotonic_ns() + round(FIRST_TICK_S * clock.NS)
        duration_s = self._settings.duration_s
        end_ns = None if duration_s is None else due_ns + round(duration_s * clock.NS)
        while True:
            told = self._wait_until(due_ns, stop)
            late_ns = time.monotonic_ns() - due_ns
            last = told is not None or (end_ns is not None and due_ns >= end_ns)
            edge = last or self.tally.ticks == 0 or self._settings.interval_s >= COUNTER_EACH_TICK_FROM_S
            self._tick(0.0 if told else late_ns / clock.NS, edge)
            watch(self.tally)
            if last:
                break
            missed = max(0, time.monotonic_ns() - due_ns) // step_ns
            if missed:
                self._note_missed(missed)
            due_ns += step_ns * (1 + missed)
            if end_ns is not None:
                due_ns = min(due_ns, end_ns)
        reason = told or f"the {duration_s:g} s asked for are over"
        closing = {"ticks": self.tally.ticks, "errors": self.tally.errors}
        stamp = clock.now().fields()
        self._log.append({"kind": "end", **stamp, "session": self._session, "reason": reason, **closing})
        return reason

    def close(self) -> None:
        for slot in self._slots:
            slot.close()

    def _wait_until(self, due_ns: int, stop: Stop) -> str | None:
        """Wait for the deadline or the end, whichever comes first, and keep up with the energy sensors meanwhile."""
        while True:
            now_ns = time.monotonic_ns()
            for slot in self._keen(now_ns, due_ns):
                self._read_between(slot)
            wake_ns = min([due_ns, *(due for due in self._between_due_ns.values() if due > now_ns)])
            told = stop.wait((wake_ns - time.monotonic_ns()) / clock.NS)
            if told is not None or time.monotonic_ns() >= due_ns:
                return told

    def _keen(self, now_ns: int, due_ns: int) -> list[Slot]:
        """Sensors that want a reading now; the tick itself serves those that can wait half a second for it."""
        if self._settings.interval_s <= BETWEEN_S or due_ns - now_ns < BETWEEN_S / 2 * clock.NS:
            return []
        return [slot for slot in self._slots if self._between_due_ns.get(slot.name, now_ns + 1) <= now_ns]

    def _read_between(self, slot: Slot) -> None:
        lines = self._read(slot)
        self._between.take(lines)
        if counters := rapl_counters(lines):
            stamp = clock.now().fields()
            record = {"kind": "rapl", **stamp, "device": "host", "rapl": counters, "session": self._session}
            self._log.append(*self._wraps.to_write(record, due=False))
            self.tally.take_rapl(record)

    def _read(self, slot: Slot, edge: bool = False) -> list[Line]:
        """One reading; the sensor's gaps and warnings go into the log at once, its readings to the caller."""
        lines = slot.read(edge)
        if slot.name != "host" and slot.interval_s < self._settings.interval_s:
            wait_s = max(BETWEEN_S, slot.interval_s)
            self._between_due_ns[slot.name] = time.monotonic_ns() + round(wait_s * clock.NS)
        for line in lines:
            if line["kind"] == "gap":
                self.tally.fail(slot.name, slot.devices if line["device"] == slot.name else (line["device"],))
                self._log.append({**clock.now().fields(), **line, "session": self._session})
            elif line["kind"] == "warning" and (self._tracked is not None or "pid" not in line):
                # who else uses the GPU is news only to whoever watches one process
                self._say(f"warning: {line['device']}: {line['text']}")
                self._log.append({"kind": "warning", **clock.now().fields(), **line, "session": self._session})
        return [line for line in lines if line["kind"] not in ("gap", "warning")]

    def _tick(self, late_s: float, edge: bool) -> None:
        lines = [line for slot in self._slots for line in self._read(slot, edge)]
        self._between.take(lines)
        was_there = self._tracked is not None and not self._tracked.gone
        if self._tracked is not None:
            self._tracked.sample()
        extra = {"session": self._session, "late_s": round(late_s, 4)}
        records = make_records(lines, self._between, self._tracked, extra)
        self._log.append(*(line for record in records for line in self._wraps.to_write(record, due=True)))
        self._between = BetweenTicks()
        self.tally.take(records, time.time())
        if was_there and self._tracked is not None and self._tracked.gone:
            self._note_exit(self._tracked.pid)

    def _note_exit(self, pid: int) -> None:
        self._say(f"process {pid} has exited; the devices are recorded on")
        self._event("process", pid=pid, text="the tracked process has exited")

    def _note_missed(self, missed: int) -> None:
        reason = f"{missed} tick(s) missed: the machine was too busy, or stood still"
        self._event("gap", device="monitor", reason=reason, missed_ticks=missed)

    def _event(self, kind: str, **fields: Any) -> None:
        self._log.append({"kind": kind, **clock.now().fields(), "session": self._session, **fields})
