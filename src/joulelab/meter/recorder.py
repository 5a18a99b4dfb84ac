"""The recorder: a child process that reads the sensors at a fixed cadence and appends their readings to the trace.

It is a separate process so that a slow sensor never delays the measured program and a killed program still leaves its
trace. It runs in a separate session, ignores the signals meant for the program, and ends when asked to or, within one
reading, when the program is gone: the pipe on its standard input then reads end of file.

Several programs on one host (ranks of one job) share one trace. Each has a recorder; the one that holds the lock on the
trace records, the others stand by and only drain their program's marks. The kernel drops the lock with its holder, so a
dead recorder cannot keep it, and the next takes over within `STANDBY_S`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import select
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from joulelab import clock
from joulelab.errors import JoulelabError
from joulelab.lookup import SENSORS
from joulelab.meter.config import EnergyConfig
from joulelab.meter.marks import PhaseBook, RingReader
from joulelab.meter.monitor.exposition import PrometheusPage
from joulelab.meter.monitor.tally import DeviceTally, Tally
from joulelab.meter.sampling import Reading, SamplingLoop, SensorReader
from joulelab.meter.sensors import Device, Line
from joulelab.meter.trace import LineFile, header, open_trace, read_lines, where_now

PHASES_EVERY_S = 10.0
# The driver's buffers run about 70 ms late and counters refresh every 100 ms: what a window's end needs is there then.
SETTLE_S = 0.2
STANDBY_S = 0.5
# A sensor whose reading takes longer than this has a gap: its buffer may have overflowed meanwhile.
HUNG_S = 1.0
READY = "ready"
STOP = "stop"
GONE = "the measured program is gone"
ENDED_SUFFIX = ".recorders"
REQUESTS_SUFFIX = ".gpu-requests"
_GPU = "gpu:"


@dataclass(frozen=True)
class Job:
    """The recorder's settings, passed as one JSON argument."""

    trace: str
    events: str
    ring: str
    pid: int
    marks_read: int
    config: dict[str, Any]
    sensors: tuple[str, ...]
    fallback_sensors: tuple[str, ...] = ()
    """Opened only if none of `sensors` measures energy."""
    power_limits: str = ""
    """File with the limits to restore if the program cannot; empty where the recorder has nothing to do with them."""


class Recorder:
    def __init__(self, job: Job, ready: int) -> None:
        """`ready` is the descriptor on which the program waits until recording has started."""
        self._ready = ready
        self._config = EnergyConfig.model_validate(job.config)
        self._job = job
        self._events = LineFile(Path(job.events))
        self._ring = RingReader(Path(job.ring), job.marks_read)
        self._phases = PhaseBook()
        self._phases_due_ns = time.monotonic_ns() + int(PHASES_EVERY_S * clock.NS)
        self._lock = os.open(Path(job.trace).with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
        self._trace: LineFile | None = None
        self._loop = SamplingLoop(self._take)
        self._lines_lost = 0
        self._requests = GpuRequests(Path(job.trace))
        self._requests_due_ns = 0
        self._page: PrometheusPage | None = None
        self._tally = Tally(())

    def run(self) -> None:
        reason = GONE
        try:
            reason = self._record()
        finally:
            self._restore_power_limits(reason)

    def _record(self) -> str:
        self._serve_if_elected()
        if self._trace is None:
            self._request_gpus()
        os.write(self._ready, f"{READY}\n".encode())
        reason = self._loop.run(self._wait)
        assert reason is not None
        self._drain_marks(write=True)
        self._close(reason)
        return reason

    def _restore_power_limits(self, reason: str) -> None:
        """Program and recorder may both be killed at any moment, so whichever ends first restores them."""
        if not self._job.power_limits:
            return
        from joulelab.meter.power_cap import restore_power_limits

        for text in restore_power_limits(Path(self._job.power_limits)):
            if reason == GONE:
                text = f"{text}; the recorder did this because the program was killed"
                self._events.append({"kind": "warning", **clock.now().fields(), "text": text}, sync=True)

    def _serve_if_elected(self) -> None:
        if self._trace is not None:
            return
        if (elected := try_lock(self._lock)) is None:
            os.close(self._lock)
            self._lock = os.open(local_lock(Path(self._job.trace)), os.O_RDWR | os.O_CREAT, 0o644)
            elected = try_lock(self._lock)
        if elected is False:
            return
        self._trace = open_trace(Path(self._job.trace))
        self._open_page()
        self._open_sensors()
        self._take(self._loop.read_all("read_edge"))

    def _open_page(self) -> None:
        """The command has checked the address; where it is taken by now, recording is more important."""
        if not self._config.prometheus:
            return
        try:
            self._page = PrometheusPage(self._config.prometheus)
            self._tally.run_id = Path(self._job.trace).parent.parent.name
        except JoulelabError as error:
            self._events.append({"kind": "warning", **clock.now().fields(), "text": error.message}, sync=True)

    def _show(self, lines: list[Line]) -> None:
        assert self._page is not None
        for line in lines:
            if line["kind"] in ("header", "devices"):
                for device in line["devices"]:
                    self._tally.devices.setdefault(device["device"], DeviceTally(Device(**device)))
            elif line["kind"] == "gap":
                self._tally.fail(line["device"], [line["device"]])
            else:
                self._tally.take_reading(line)
        self._tally.ticks, self._tally.wall_s = self._tally.ticks + 1, time.time()
        self._page.show(self._tally)

    def _request_gpus(self) -> None:
        """Ask the active recorder to read this rank's GPUs."""
        for name in self._job.sensors:
            requested = getattr(SENSORS.resolve(name)(self._config, self._job.pid), "requested_gpus", None)
            with suppress(Exception):  # a driver that does not answer has no GPUs to request
                if requested is not None and (uuids := requested()):
                    self._requests.add(self._job.pid, uuids)

    def _add_requested_gpus(self) -> None:
        if self._trace is None or time.monotonic_ns() < self._requests_due_ns:
            return
        self._requests_due_ns = time.monotonic_ns() + int(STANDBY_S * clock.NS)
        uuids = self._requests.new()
        if not uuids:
            return
        for reader in self._loop.readers:
            add_gpus = getattr(reader.sensor, "add_gpus", None)
            with suppress(Exception):  # if the driver fails now, so do the readings of its own cards, which are gaps
                if add_gpus is None:
                    continue
                devices, lines = add_gpus(uuids)
                added = {"kind": "devices", **clock.now().fields(), "devices": [asdict(device) for device in devices]}
                self._append([added, *({**clock.now().fields(), **line} for line in lines)])

    def _close(self, reason: str) -> None:
        if self._trace is not None:
            self._append([{"kind": "end", **clock.now().fields(), "reason": reason}])
        self._loop.close()

    def _open_sensors(self) -> None:
        readers, fallback = (
            [self._reader(name) for name in names] for names in (self._job.sensors, self._job.fallback_sensors)
        )
        devices, missing = self._loop.open(readers, fallback)
        stamp = clock.now()
        self._append(
            [
                header(
                    program_pid=self._job.pid,
                    interval_s=self._config.sample_interval_s,
                    wall_minus_mono_s=stamp.wall_s - stamp.mono_ns / clock.NS,
                    devices=[asdict(device) for device in devices],
                    missing=[asdict(unavailable) for unavailable in missing],
                    units={"power_watts": "W", "energy_counter_j": "J", "memory_used_MB": "MiB", "busy_thread_s": "s"},
                )
            ]
        )

    def _reader(self, name: str) -> SensorReader:
        reader = SensorReader(name, partial(SENSORS.resolve(name), self._config, self._job.pid))
        if (exclude := getattr(reader.sensor, "exclude", None)) is not None:
            exclude(ended_recorders_s(Path(self._job.trace)))
        return reader

    def _wait(self, timeout_s: float | None) -> str | None:
        """Sleep to the next deadline and do what is not a reading; the reason to end, if there is one."""
        # One select serves as timer and as watch on the program: the pipe becomes readable when the
        # program asks to stop and reads end of file when it dies, within the same system call that
        # waits for the next deadline.
        readable, _, _ = select.select([sys.stdin], [], [], STANDBY_S if timeout_s is None else timeout_s)
        if readable:
            if not os.read(sys.stdin.fileno(), 64):
                return GONE
            if self._trace is not None:
                # The last samples and the last refresh of a counter arrive after the moment that
                # they describe: about 70 ms and up to 100 ms on an H200.
                time.sleep(SETTLE_S)
            return STOP
        # forked children may hold the pipe open after the program's death; its process must be our parent still
        if os.getppid() != self._job.pid:
            return GONE
        self._serve_if_elected()
        self._add_requested_gpus()
        self._drain_marks()
        return None

    def _take(self, readings: list[Reading]) -> None:
        if os.getppid() != self._job.pid:
            # The processes to be read died with the program. That is no gap: the trace ends with the last reading.
            readings = [reading for reading in readings if not reading.failed]
        if lines := [line for reading in readings for line in trace_lines(reading)]:
            self._append(lines)

    def _append(self, lines: list[Line]) -> None:
        """A full disk loses these lines and not the recorder; the loss is a gap as soon as there is space again."""
        assert self._trace is not None
        if self._page is not None:
            self._show(lines)
        if self._lines_lost:
            gap = {"kind": "gap", **clock.now().fields(), "device": "trace"}
            lines = [{**gap, "reason": f"{self._lines_lost} lines could not be written"}, *lines]
        try:
            # Synced at every reading: a trace is needed most after a crash, and an fsync per second
            # costs less than reading a counter.
            self._trace.append(*lines, sync=True)
        except OSError as error:
            if not self._lines_lost:
                print(f"joulelab recorder: {error}; readings are lost until it is fixed", file=sys.stderr, flush=True)
            self._lines_lost += len(lines)
        else:
            self._lines_lost = 0

    def _drain_marks(self, write: bool = False) -> None:
        self._phases.add_marks(self._ring.drain())
        if not write and time.monotonic_ns() < self._phases_due_ns:
            return
        # Aggregates are written every few seconds and not per mark: a line states how far the ring
        # was read, so that after a kill the next recorder continues there and counts no mark twice.
        self._phases_due_ns = time.monotonic_ns() + int(PHASES_EVERY_S * clock.NS)
        if self._phases.rows or self._ring.lost:
            line = self._phases.to_line(self._ring.read, self._ring.lost)
            try:
                self._events.append({**clock.now().fields(), **line}, sync=True)
            except OSError:
                return  # kept, and written with the next ones
            self._phases = PhaseBook()


class GpuRequests:
    """GPUs that the ranks of one host want recorded, so that the one active recorder reads them all.

    With a GPU bound to each rank (`--gpus-per-task`, a `CUDA_VISIBLE_DEVICES` per rank), the active recorder sees only
    its own rank's card. Each of the others writes the UUIDs of its cards, resolved in its own view, to a file next to
    the trace, and the active one adds them within `STANDBY_S`. One that takes over finds the earlier cards in the
    trace.
    """

    def __init__(self, trace: Path) -> None:
        self._trace = trace
        self._file = trace.with_suffix(REQUESTS_SUFFIX)
        self._seen: set[str] = set()
        self._trace_read = False

    def add(self, pid: int, uuids: list[str]) -> None:
        file = LineFile(self._file)
        file.append({"pid": pid, "uuids": uuids}, sync=True)
        file.close()

    def new(self) -> list[str]:
        """UUIDs that were not returned before."""
        requested = [uuid for line in read_lines(self._file) for uuid in line["uuids"]] if self._file.exists() else []
        # Once: on a machine without GPUs this is asked twice a second, of a trace that grows for days.
        found = requested if self._trace_read else [*self._recorded(), *requested]
        self._trace_read = True
        fresh = [uuid for uuid in dict.fromkeys(found) if uuid not in self._seen]
        self._seen.update(fresh)
        return fresh

    def _recorded(self) -> list[str]:
        """The cards that a previous recorder of this trace has read."""
        if not where_now(self._trace).exists():  # the run directory was deleted
            return []
        devices = [device for line in read_lines(self._trace) for device in line.get("devices", ())]
        return [name.removeprefix(_GPU) for device in devices if (name := device["device"]).startswith(_GPU)]


def trace_lines(reading: Reading) -> list[Line]:
    """The lines of a reading as they are in a trace: stamped, with its lateness and a gap if the sensor hung."""
    lines, interval_s = list(reading.lines), reading.source.sensor.interval_s
    if not reading.failed and reading.took_s > max(HUNG_S, 2 * interval_s):
        reason = f"did not answer for {reading.took_s:.1f} s"
        lines.append({"kind": "gap", "device": reading.source.name, "reason": reason})
    stamped = [{"kind": line["kind"], **reading.stamp.fields(), **line} for line in lines]
    if stamped and not reading.failed and reading.late_s > interval_s:
        stamped[0]["late_s"] = round(reading.late_s, 3)
    return stamped


def try_lock(descriptor: int) -> bool | None:
    """Whether this process has the lock on a file now; None where the file system has no locks, as some Lustre."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def local_lock(trace: Path) -> Path:
    """Where the recorders of a trace are elected if its file system has no locks: all of them are on this machine."""
    name = hashlib.sha256(str(trace.resolve()).encode()).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"joulelab-{name}.lock"


def note_ended(trace: Path, program: int, cpu_s: float) -> None:
    """Record the CPU seconds of a recorder that has ended, before its program reaps it."""
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
    # vendors' libraries print to stdout, which must not be read as our own messages
    ready = os.dup(1)
    os.dup2(2, 1)
    fields = json.loads(sys.argv[1])
    Recorder(Job(**{**fields, "sensors": tuple(fields["sensors"])}), ready).run()


if __name__ == "__main__":
    main()
