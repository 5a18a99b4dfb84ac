"""The recorder: a child process that reads the sensors at a fixed cadence and appends what they say to the trace.

It stands apart so that a slow sensor never delays the measured program and a killed program still leaves its trace. It
lives in a session of its own, ignores the signals meant for the program, and ends when told to or, within one tick,
when the program is gone: the pipe on its standard input then reads end of file.

Several programs on one host (ranks of one job) share one trace. Each has a recorder; the one that holds the lock on the
trace records, the others stand by and only drain their program's marks. What they were given and it was not, it takes
in (rank_wishes.py). The kernel drops the lock with its holder, so a dead one cannot keep it, and the next takes over
within `STANDBY_S`.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from joulelab import clock
from joulelab.lookup import SENSORS
from joulelab.meter.config import EnergyConfig
from joulelab.meter.marks import RingReader
from joulelab.meter.phases import PhaseBook
from joulelab.meter.rank_wishes import RankWishes
from joulelab.meter.sensors import Line, Sensor, SensorUnavailable
from joulelab.meter.trace import LineFile, header, open_trace, read_lines

PHASES_EVERY_S = 10.0
# The driver's buffers run about 70 ms late and counters refresh every 100 ms: what a window's end needs is there then.
SETTLE_S = 0.2
STANDBY_S = 0.5
# A sensor whose reading takes longer than this has a gap: its buffers may have run over meanwhile.
HUNG_S = 1.0
READY = "ready"
STOP = "stop"
GONE = "the measured program is gone"
ENDED_SUFFIX = ".recorders"


@dataclass(frozen=True)
class Job:
    """All the recorder is told; it travels as one JSON argument."""

    trace: str
    events: str
    ring: str
    pid: int
    marks_read: int
    config: dict[str, Any]
    sensors: tuple[str, ...]
    power_limits: str = ""
    """File with the limits to restore if the program cannot; empty where the recorder has nothing to do with them."""


class _Scheduled:
    """A sensor and its next deadline. Deadlines advance by whole intervals, so lateness never adds up to drift."""

    def __init__(self, name: str, sensor: Sensor) -> None:
        self.name = name
        self.sensor = sensor
        self.due_ns = time.monotonic_ns()
        self.failing = False

    def advance(self) -> None:
        step_ns = int(self.sensor.interval_s * clock.NS)
        behind = time.monotonic_ns() - self.due_ns
        self.due_ns += step_ns * (1 + max(0, behind) // step_ns)


class Recorder:
    def __init__(self, job: Job, ready: int) -> None:
        """`ready` is the descriptor on which the program waits for the word that recording has begun."""
        self._ready = ready
        self._config = EnergyConfig.model_validate(job.config)
        self._job = job
        self._events = LineFile(Path(job.events))
        self._ring = RingReader(Path(job.ring), job.marks_read)
        self._phases = PhaseBook()
        self._phases_due_ns = time.monotonic_ns() + int(PHASES_EVERY_S * clock.NS)
        self._lock = os.open(Path(job.trace).with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        self._trace: LineFile | None = None
        self._sensors: list[_Scheduled] = []
        self._lines_lost = 0
        self._wishes = RankWishes(Path(job.trace))
        self._wishes_due_ns = 0

    def run(self) -> None:
        reason = GONE
        try:
            reason = self._record()
        finally:
            self._restore_power_limits(reason)

    def _record(self) -> str:
        self._serve_if_elected()
        if self._trace is None:
            self._leave_wishes()
        os.write(self._ready, f"{READY}\n".encode())
        while (reason := self._wait()) is None:
            self._serve_if_elected()
            self._take_in_wishes()
            self._read_due()
            self._drain_marks()
        if reason == STOP and self._trace is not None:
            time.sleep(SETTLE_S)
        self._read_due(everything=True)
        self._drain_marks(write=True)
        self._close(reason)
        return reason

    def _restore_power_limits(self, reason: str) -> None:
        """Program and recorder may both be ended at any moment, so whichever ends first does it."""
        if not self._job.power_limits:
            return
        from joulelab.meter.power_cap import restore_power_limits

        for text in restore_power_limits(Path(self._job.power_limits)):
            if reason == GONE:
                said = f"{text}; the recorder did that, because the program was killed"
                self._events.append({"kind": "warning", **clock.now().fields(), "text": said}, sync=True)

    def _serve_if_elected(self) -> None:
        if self._trace is not None:
            return
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        self._trace = open_trace(Path(self._job.trace))
        self._open_sensors()
        self._read_due(everything=True)

    def _leave_wishes(self) -> None:
        """Tell whoever records which devices this rank was given."""
        for name in self._job.sensors:
            wishes = getattr(SENSORS.resolve(name)(self._config, self._job.pid), "wishes", None)
            with suppress(Exception):  # a sensor that cannot say has none to tell
                if wishes is not None and (uuids := wishes()):
                    self._wishes.leave(self._job.pid, uuids)

    def _take_in_wishes(self) -> None:
        if self._trace is None or time.monotonic_ns() < self._wishes_due_ns:
            return
        self._wishes_due_ns = time.monotonic_ns() + int(STANDBY_S * clock.NS)
        uuids = self._wishes.new()
        if not uuids:
            return
        for scheduled in self._sensors:
            adopt = getattr(scheduled.sensor, "adopt", None)
            with suppress(Exception):  # a driver that fails now is a gap of its own cards, told by their readings
                if adopt is None:
                    continue
                devices, lines = adopt(uuids)
                added = {"kind": "devices", **clock.now().fields(), "devices": [asdict(device) for device in devices]}
                self._append([added, *({**clock.now().fields(), **line} for line in lines)])

    def _close(self, reason: str) -> None:
        if self._trace is not None:
            self._append([{"kind": "end", **clock.now().fields(), "reason": reason}])
        for scheduled in self._sensors:
            scheduled.sensor.close()

    def _open_sensors(self) -> None:
        devices: list[dict[str, Any]] = []
        missing: list[dict[str, str]] = []
        for name in self._job.sensors:
            sensor: Sensor = SENSORS.resolve(name)(self._config, self._job.pid)
            if (exclude := getattr(sensor, "exclude", None)) is not None:
                exclude(ended_recorders_s(Path(self._job.trace)))
            try:
                devices += [asdict(device) for device in sensor.open()]
            except SensorUnavailable as gone:
                missing.append(asdict(gone))
                continue
            except Exception as error:  # a sensor that cannot start must not take the others along
                missing.append({"component": name, "reason": f"{type(error).__name__}: {error}", "fix": ""})
                continue
            self._sensors.append(_Scheduled(name, sensor))
        stamp = clock.now()
        self._append(
            [
                header(
                    program_pid=self._job.pid,
                    interval_s=self._config.sample_interval_s,
                    wall_minus_mono_s=stamp.wall_s - stamp.mono_ns / clock.NS,
                    devices=devices,
                    missing=missing,
                    units={"power_watts": "W", "energy_counter_j": "J", "memory_used_MB": "MiB", "busy_thread_s": "s"},
                )
            ]
        )

    def _wait(self) -> str | None:
        """Sleep to the next deadline; the reason to end, if one came."""
        timeout_s = STANDBY_S
        if self._sensors:
            due_ns = min(scheduled.due_ns for scheduled in self._sensors)
            timeout_s = max(0.0, (due_ns - time.monotonic_ns()) / clock.NS)
        readable, _, _ = select.select([sys.stdin], [], [], timeout_s)
        if readable:
            return STOP if os.read(sys.stdin.fileno(), 64) else GONE
        # forked children may hold the pipe open after the program's death; its process must be our parent still
        return None if os.getppid() == self._job.pid else GONE

    def _read_due(self, everything: bool = False) -> None:
        lines: list[Line] = []
        for scheduled in self._sensors:
            if everything or scheduled.due_ns <= time.monotonic_ns():
                lines += self._read(scheduled, edge=everything)
                scheduled.advance()
        if lines:
            self._append(lines)

    def _read(self, scheduled: _Scheduled, edge: bool = False) -> list[Line]:
        """One reading; the first and the last are edges of the trace, for which a sensor may want to read more."""
        late_s = (time.monotonic_ns() - scheduled.due_ns) / clock.NS
        read = getattr(scheduled.sensor, "read_edge", scheduled.sensor.read) if edge else scheduled.sensor.read
        begin_ns = time.monotonic_ns()
        try:
            lines: list[Line] = list(read())
        except Exception as error:  # logged as a gap and retried at the next deadline
            scheduled.failing = True
            gap = {"kind": "gap", **clock.now().fields(), "device": scheduled.name}
            return [{**gap, "reason": f"{type(error).__name__}: {error}"}]
        took_s = (time.monotonic_ns() - begin_ns) / clock.NS
        if took_s > max(HUNG_S, 2 * scheduled.sensor.interval_s):
            lines.append({"kind": "gap", "device": scheduled.name, "reason": f"did not answer for {took_s:.1f} s"})
        stamp = clock.now().fields()
        kind_first = [{"kind": line["kind"], **stamp, **line} for line in lines]
        if kind_first and late_s > scheduled.sensor.interval_s:
            kind_first[0]["late_s"] = round(late_s, 3)
        return kind_first

    def _append(self, lines: list[Line]) -> None:
        """A full disk loses these lines and not the recorder; what was lost is said as soon as there is room again."""
        assert self._trace is not None
        if self._lines_lost:
            gap = {"kind": "gap", **clock.now().fields(), "device": "trace"}
            lines = [{**gap, "reason": f"{self._lines_lost} lines could not be written"}, *lines]
        try:
            self._trace.append(*lines, sync=True)
        except OSError as error:
            if not self._lines_lost:
                print(f"joulelab recorder: {error}; readings are lost until it is mended", file=sys.stderr, flush=True)
            self._lines_lost += len(lines)
        else:
            self._lines_lost = 0

    def _drain_marks(self, write: bool = False) -> None:
        self._phases.add_marks(self._ring.drain())
        if not write and time.monotonic_ns() < self._phases_due_ns:
            return
        self._phases_due_ns = time.monotonic_ns() + int(PHASES_EVERY_S * clock.NS)
        if self._phases.rows or self._ring.lost:
            line = self._phases.to_line(self._ring.read, self._ring.lost)
            try:
                self._events.append({**clock.now().fields(), **line}, sync=True)
            except OSError:
                return  # kept, and written with the next ones
            self._phases = PhaseBook()


def note_ended(trace: Path, program: int, cpu_s: float) -> None:
    """CPU seconds of a recorder of this trace that has ended, before its program waits for it."""
    file = LineFile(trace.with_suffix(ENDED_SUFFIX))
    file.append({"program": program, "cpu_s": round(cpu_s, 4)}, sync=True)
    file.close()


def ended_recorders_s(trace: Path) -> dict[int, float]:
    """CPU seconds of recorders that were killed and replaced, by program."""
    found: dict[int, float] = {}
    path = trace.with_suffix(ENDED_SUFFIX)
    for line in read_lines(path) if path.exists() else ():
        found[line["program"]] = found.get(line["program"], 0.0) + line["cpu_s"]
    return found


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    # makers' libraries print where they like; what they say must not be taken for our own word
    ready = os.dup(1)
    os.dup2(2, 1)
    fields = json.loads(sys.argv[1])
    Recorder(Job(**{**fields, "sensors": tuple(fields["sensors"])}), ready).run()


if __name__ == "__main__":
    main()
