"""The monitor: a sink of the sampling loop that writes one record per device and tick, durable, for operators.

A tick that passed without a reading is a gap in the log. What is read between two ticks goes into their mean power, and
into the log only where a counter wrapped. The log is appended to, synced at each tick, and not abandoned while the disk
is full. SIGINT, SIGTERM and SIGHUP end the monitor at once, because it waits for signals and deadlines together.

Whether `--gpu` can be served is decided before anything is recorded, with the exit codes that operators' scripts know.
An index counts the cards the job was given (`CUDA_VISIBLE_DEVICES`, Slurm's variables); a UUID is unambiguous.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from joulelab import clock
from joulelab.errors import DependencyMissing, SensorMissing, UsageError
from joulelab.meter.monitor.records import BetweenTicks, TrackedProcess, WrapWatch, make_records, rapl_counters
from joulelab.meter.monitor.tally import Tally
from joulelab.meter.sampling import Reading, SamplingLoop, SensorReader, Ticks
from joulelab.meter.sensors import Device, Line, SensorUnavailable
from joulelab.meter.sensors.gpu_selection import Selection, select_gpus
from joulelab.meter.sensors.nvml import permitted_cards
from joulelab.meter.trace import LineFile, header
from joulelab.redaction import redact


class StopSignals:
    """While entered, a signal sets `signum` and wakes `wait`. A repeated signal changes nothing: closing is short."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}
        self._reader, self._writer = -1, -1

    def __enter__(self) -> StopSignals:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer)
        wanted = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # started with `nohup`
            wanted.append(signal.SIGHUP)
        self._before = {signum: signal.signal(signum, self._receive) for signum in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        os.close(self._reader)
        os.close(self._writer)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum

    def wait(self, timeout_s: float) -> str | None:
        """Sleep; the name of the signal that arrived, if any."""
        if self.signum is None:
            select.select([self._reader], [], [], max(0.0, timeout_s))
        return None if self.signum is None else signal.Signals(self.signum).name


class LogFile:
    def __init__(self, path: Path, report: Callable[[str], None]) -> None:
        self.path = path
        self._report = report
        self.lost = 0
        """Lines that could not be written since the last one that could."""
        self._failing = False
        try:
            self._lines = LineFile(path)
        except OSError as error:
            raise UsageError(
                f"cannot write the log {path}: {error.strerror or error}", "name a writable file with --log_path"
            ) from None

    def append(self, *lines: dict[str, Any]) -> None:
        try:
            self._lines.append(*lines, sync=True)
        except OSError as error:
            if not self._failing:
                self._report(f"error: {self.path}: {error.strerror or error}; trying again at each tick")
            self._failing = True
            self.lost += len(lines)
            return
        if self._failing:
            self._report(f"{self.path} can be written again; {self.lost} lines were lost")
            self._failing, self.lost = False, 0

    def close(self) -> None:
        self._lines.close()


class PlainLog:
    """Writes only the samples of the GPUs, or of the CPU on a machine without one: each line has the same fields."""

    def __init__(self, log: LogFile) -> None:
        self._log = log
        self.has_gpu = True

    def append(self, *lines: dict[str, Any]) -> None:
        field = "power_watts" if self.has_gpu else "cpu_utilization_percent"
        self._log.append(*(line for line in lines if field in line))


class BadGpu(UsageError):
    """There are GPUs, but not the requested one: exit code 4."""

    exit_code = 4


def choose(wanted: str) -> Selection:
    """The cards that `auto`, or names separated by commas, select on this machine."""
    nvml = _answering_nvml()
    try:
        listed = list(permitted_cards(nvml))
    except nvml.NVMLError as error:
        raise SensorMissing(
            f"the GPUs of this node cannot be listed ({error})", "check the driver with `nvidia-smi`"
        ) from None
    finally:
        nvml.nvmlShutdown()
    given = select_gpus(listed, "auto", os.environ)
    requested = select_gpus(listed, wanted, os.environ)
    if requested.cards and not requested.unknown:
        return requested
    if not listed or (not given.cards and not given.unknown):
        reason = "NVML shows none" if not listed else f"this job was given none ({given.source})"
        raise SensorMissing(f"no GPU can be read: {reason}", "request one from the scheduler, or omit --gpu")
    names = ", ".join(requested.unknown or given.unknown) or wanted
    there = ", ".join(f"{position} ({card.uuid})" for position, card in enumerate(given.cards)) or "none"
    raise BadGpu(f"there is no GPU '{names}' here; {given.source}: {there}", "`auto` takes all GPUs of this job")


def _answering_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        raise DependencyMissing("the package nvidia-ml-py is missing", "pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise SensorMissing(
            f"no GPU can be read: NVML does not answer ({error})",
            "install the NVIDIA driver if this machine has a GPU (`nvidia-smi` must work first), or omit --gpu",
        ) from None
    return pynvml


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
# Written to the header, so that the job can be identified later.
JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_NAME", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Settings:
    interval_s: float
    duration_s: float | None = None
    pid: int | None = None
    plain: bool = False
    """Only sample lines, one for each device and tick, as programs that plot logs of earlier monitors expect."""


class Monitor:
    def __init__(
        self, settings: Settings, readers: Sequence[SensorReader], log: LogFile, report: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._readers = readers
        self._log: LogFile | PlainLog = PlainLog(log) if settings.plain else log
        self._report = report
        self._session = secrets.token_hex(4)
        self._between = BetweenTicks()
        self._wraps = WrapWatch()
        self._tracked = self._track(settings.pid)
        self._watch: Callable[[Tally], None] = lambda tally: None
        self._loop = SamplingLoop(self._take_between, Ticks(settings.interval_s, self._take_tick, self._note_missed))
        self.tally = Tally(())

    def _track(self, pid: int | None) -> TrackedProcess | None:
        if pid is None:
            return None
        try:
            return TrackedProcess(pid)
        except (psutil.NoSuchProcess, ValueError, OverflowError):
            self._report(f"error: there is no process {pid}; recording without its metrics")
        except psutil.AccessDenied:
            self._report(f"error: process {pid} may not be read by this user; recording without its metrics")
        return None

    def open(self) -> list[SensorUnavailable]:
        """Open the sensors and write the header; what is missing, with reasons."""
        devices, missing = self._loop.open(self._readers)
        self.tally = Tally(devices)
        if isinstance(self._log, PlainLog):
            self._log.has_gpu = any(device.component == "gpu" for device in devices)
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
            job={name: redact(name, os.environ[name]) for name in JOB_VARIABLES if name in os.environ},
            driver=next((device.facts["driver"] for device in devices if "driver" in device.facts), None),
            devices=[asdict(device) for device in devices],
            missing=[asdict(unavailable) for unavailable in missing],
            units=UNITS,
        )

    def run(self, wait: Callable[[float], str | None], watch: Callable[[Tally], None] = lambda tally: None) -> str:
        """Record until `wait` returns a reason to end or the duration is over; the reason."""
        self._watch = watch
        duration_s = self._settings.duration_s
        signal_name = self._loop.run(lambda timeout_s: wait(timeout_s or 0.0), duration_s)
        reason = signal_name or f"the requested {duration_s:g} s have passed"
        closing = {"ticks": self.tally.ticks, "errors": self.tally.errors}
        stamp = clock.now().fields()
        self._log.append({"kind": "end", **stamp, "session": self._session, "reason": reason, **closing})
        return reason

    def close(self) -> None:
        self._loop.close()

    def _take_between(self, readings: list[Reading]) -> None:
        for reading in readings:
            lines = self._log_problems(reading)
            self._between.take(lines)
            if counters := rapl_counters(lines):
                stamp = clock.now().fields()
                record = {"kind": "rapl", **stamp, "device": "host", "rapl": counters, "session": self._session}
                self._log.append(*self._wraps.to_write(record, due=False))
                self.tally.take_line(record)

    def _take_tick(self, readings: list[Reading], late_s: float) -> None:
        lines = [line for reading in readings for line in self._log_problems(reading)]
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
        self._watch(self.tally)

    def _log_problems(self, reading: Reading) -> list[Line]:
        """Write the gaps and warnings of a reading into the log at once; its other lines are returned."""
        source = reading.source
        for line in reading.lines:
            if line["kind"] == "gap":
                self.tally.fail(source.name, source.devices if line["device"] == source.name else (line["device"],))
                self._log.append({**reading.stamp.fields(), **line, "session": self._session})
            elif line["kind"] == "warning" and (self._tracked is not None or "pid" not in line):
                # other users of the GPU matter only if one process is tracked
                self._report(f"warning: {line['device']}: {line['text']}")
                self._log.append({"kind": "warning", **reading.stamp.fields(), **line, "session": self._session})
        return [line for line in reading.lines if line["kind"] not in ("gap", "warning")]

    def _note_exit(self, pid: int) -> None:
        self._report(f"process {pid} exited; still recording devices")
        self._event("process", pid=pid, text="the tracked process has exited")

    def _note_missed(self, missed: int) -> None:
        reason = f"{missed} tick(s) missed: the machine was too busy, or suspended"
        self._event("gap", device="monitor", reason=reason, missed_ticks=missed)

    def _event(self, kind: str, **fields: Any) -> None:
        self._log.append({"kind": kind, **clock.now().fields(), "session": self._session, **fields})
