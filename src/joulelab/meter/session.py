"""The meter as the measured program uses it: start the recorder, write marks, read the energy so far, stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from joulelab import clock
from joulelab.errors import JoulelabError
from joulelab.lookup import SENSORS
from joulelab.meter.config import EnergyConfig
from joulelab.meter.figures import EnergyFigure
from joulelab.meter.integrate import COMPONENTS, component_energy, machine_energy
from joulelab.meter.marks import Phase, create_ring, remove_ring
from joulelab.meter.monitor.tally import LiveEnergy
from joulelab.meter.recorder import READY, STOP, Job, note_ended
from joulelab.meter.sensors import amd, apple, node_meters, within
from joulelab.meter.sensors.processes import RECORDER_MODULE, cpu_seconds
from joulelab.meter.series import load_trace
from joulelab.meter.trace import LineFile, header, read_lines

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
RESTARTS = 20
# Sensors that are opened only under a condition; every other sensor of the table is opened in every recording. Those of
# other makers need their library: on a machine with other GPUs their absence is not worth a message.
CONDITIONS: dict[str, Callable[[EnergyConfig], bool]] = {
    "nvml": lambda config: config.gpus != "none",
    "amd": lambda config: config.gpus != "none" and amd.present(),
    "apple": lambda config: config.gpus != "none" and apple.present(),
    "hwmon": lambda config: node_meters.hwmon_present(),
    "cray": lambda config: node_meters.cray_present(),
    "ipmi": lambda config: node_meters.ipmi_present(),
    "redfish": lambda config: node_meters.redfish_present(),
    "cpu-estimate": lambda config: config.estimate_cpu is True or config.total_energy_policy == "machine",
    "replay": lambda config: False,
}


def sensors_for(config: EnergyConfig) -> tuple[str, ...]:
    """The sensors to open, in the order of `lookup.SENSORS`."""
    if config.replay_trace:
        return ("host", "replay")
    return tuple(name for name in SENSORS if name not in CONDITIONS or CONDITIONS[name](config))


def fallback_sensors_for(config: EnergyConfig) -> tuple[str, ...]:
    """The sensors to open if none of the others measures energy."""
    automatic = config.estimate_cpu == "auto" and not config.replay_trace
    return ("cpu-estimate",) if automatic and "cpu-estimate" not in sensors_for(config) else ()


_meters: weakref.WeakSet[Meter] = weakref.WeakSet()


def _detach_all() -> None:
    for meter in list(_meters):
        if meter.is_open:
            meter.detach()


os.register_at_fork(after_in_child=_detach_all)


class Meter:
    """One program of one attempt on one host, measured from `start()` to `stop()`."""

    def __init__(self, trace: Path, events: Path, config: EnergyConfig, power_limits: Path | None = None) -> None:
        """`power_limits` is where `power_cap` saves what the recorder restores if this program is killed."""
        self._config = config
        self._power_limits = power_limits
        self._trace_path = trace
        self._ring_path = events.with_suffix(".ring")
        self._events = LineFile(events)
        self._ring = create_ring(self._ring_path)
        self._phases: dict[str, Phase] = {}
        self._stage_numbers: dict[str, int] = {}
        self._recorder: subprocess.Popen[bytes] | None = None
        self._stopping = False
        self._replacing = threading.Lock()
        """Held while a killed recorder is replaced, so that `stop()` ends the new one."""
        self.started_ns = 0
        _meters.add(self)

    def detach(self) -> None:
        """In a forked child: leave marks and recorder to the parent. The child's CPU time is still measured."""
        self._ring.detach()
        self._events.detach()
        recorder, self._recorder = self._recorder, None
        self._stopping = True
        for pipe in (recorder.stdin, recorder.stdout) if recorder is not None else ():
            # The end of file of stdin tells the recorder that the program has died; a copy that a
            # child keeps open would hide it.
            if pipe is not None:
                pipe.close()

    def start(self) -> None:
        self._trace_path.parent.mkdir(parents=True, exist_ok=True)
        self._events.append(header(), sync=True)
        self._recorder = self._spawn()
        assert self._recorder.stdout is not None
        # Blocks until the first reading is in the trace: energy of the first stage would otherwise
        # begin with an unknown counter.
        try:
            ready = within(START_TIMEOUT_S, self._recorder.stdout.readline)
        except TimeoutError:
            self._recorder.kill()
            raise JoulelabError(
                f"the recorder did not start within {START_TIMEOUT_S:g} s", "`joulelab doctor` shows which sensor hangs"
            ) from None
        if ready.strip() != READY.encode():
            raise JoulelabError(
                f"the recorder did not start (exit code {self._recorder.wait(START_TIMEOUT_S)})",
                "its error message is above",
            )
        threading.Thread(target=self._keep_recorder, daemon=True, name="joulelab-recorder-watch").start()
        self.started_ns = time.monotonic_ns()

    def _spawn(self, marks_read: int = 0) -> subprocess.Popen[bytes]:
        job = Job(
            trace=str(self._trace_path),
            events=str(self._events.path),
            ring=str(self._ring_path),
            pid=os.getpid(),
            marks_read=marks_read,
            config=self._config.model_dump(),
            sensors=sensors_for(self._config),
            fallback_sensors=fallback_sensors_for(self._config),
            power_limits=str(self._power_limits or ""),
        )
        return subprocess.Popen(
            # -P: a file of the user's directory that has the name of a module (statistics.py) is not imported.
            # The job is an argument and not on stdin, which is the pipe whose end of file reports the program's death.
            [sys.executable, "-P", "-m", RECORDER_MODULE, json.dumps(asdict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C reaches the foreground process group; in its own session the recorder survives
            # it and records how the program ends.
            start_new_session=True,
            # settings that the program made for itself must not apply to the recorder
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def _keep_recorder(self) -> None:
        """Sleep until the recorder ends; one that was killed is replaced, and the loss is recorded as a warning."""
        for _ in range(RESTARTS):
            recorder = self._recorder
            if recorder is None:
                return
            self._note_cpu_time(recorder)
            if recorder.wait() == 0:
                return
            with self._replacing:
                if self._stopping or not self._events.path.exists():  # the run directory was deleted
                    return
                self.event("warning", text="the recorder was killed and started again; readings paused meanwhile")
                self._recorder = self._spawn(marks_read=self._marks_drained())

    def _note_cpu_time(self, recorder: subprocess.Popen[bytes]) -> None:
        """Wait for the recorder's end and record its CPU time before it is reaped: the kernel then adds that time to
        this program's, and the next recorder must not count it as the program's work."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return
        with suppress(OSError, psutil.Error):  # `stop()` has waited for it, or the disk is full
            # WNOWAIT leaves the zombie: its CPU time can still be read from /proc, and Popen.wait
            # reaps it afterwards.
            os.waitid(os.P_PID, recorder.pid, os.WEXITED | os.WNOWAIT)
            if not self._stopping and (seconds := cpu_seconds(psutil.Process(recorder.pid))) is not None:
                note_ended(self._trace_path, os.getpid(), seconds)

    def _marks_drained(self) -> int:
        lines = (line for line in read_lines(self._events.path) if line["kind"] == "phases")
        return max((int(line["marks_read"]) for line in lines), default=0)

    def stop(self) -> None:
        """End the recorder after it has seen the last mark; a dead recorder is reported, not raised."""
        if self._recorder is None:
            return
        with self._replacing:
            self._stopping = True
            recorder, self._recorder = self._recorder, None
        try:
            # Asked and not signaled: the recorder takes a last reading of every counter before it
            # ends.
            recorder.communicate(STOP.encode(), timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            recorder.kill()
            with suppress(subprocess.TimeoutExpired):  # SIGKILL does not end a process inside a call of a driver
                recorder.wait(STOP_TIMEOUT_S)
        if recorder.returncode == 0:
            remove_ring(self._ring_path)  # fully drained into the events by now
        else:
            self.event("warning", text="the recorder ended before the run did; the trace stops there")
        self._ring.close()
        self._events.close()

    @property
    def is_open(self) -> bool:
        return self._recorder is not None

    @property
    def policy(self) -> str:
        return self._config.total_energy_policy

    def event(self, kind: str, **fields: Any) -> clock.Stamp:
        """A durable line in the event file: a stage's edge, a result, a warning."""
        stamp = clock.now()
        try:
            self._events.append({"kind": kind, **stamp.fields(), **fields}, sync=True)
        except OSError as error:  # a full disk must not end hours of training for the sake of a mark
            print(f"joulelab: a mark could not be written ({error})", file=sys.stderr)
        return stamp

    def enter_stage(self, name: str | None) -> None:
        """Phase marks from here on belong to this stage (None: to no stage)."""
        self._ring.stage = 0 if name is None else self._number(name, self._stage_numbers, "stage")

    def phase(self, name: str) -> Phase:
        """A reusable `with` block around part of a step; costs about a microsecond."""
        if name not in self._phases:
            numbers = {known: phase.number for known, phase in self._phases.items()}
            self._phases[name] = Phase(self._ring, self._number(name, numbers, "phase"))
        return self._phases[name]

    def exclude(self, begin_ns: int, end_ns: int) -> None:
        """Leave this time out of the phases that are open: their begin is moved by it."""
        for phase in self._phases.values():
            phase.exclude(begin_ns, end_ns)

    def _number(self, name: str, numbers: dict[str, int], of: str) -> int:
        if name not in numbers:
            numbers[name] = len(numbers) + 1
            self.event("name", of=of, number=numbers[name], name=name)
        return numbers[name]

    @property
    def trace_path(self) -> Path:
        return self._trace_path

    def live(self) -> LiveEnergy:
        """Energy so far, cheap enough to read every second."""
        return LiveEnergy(self._trace_path)

    def so_far(self, components: Sequence[str] = COMPONENTS) -> dict[str, EnergyFigure]:
        """Energy since `start()`, by component, as far as the trace is written."""
        trace = load_trace(self._trace_path)
        window = (self.started_ns, max(trace.last_ns, self.started_ns + 1))
        found = {component: component_energy(trace, component, [window]) for component in components}
        return {**found, "machine": machine_energy(trace, [window])} if self.policy == "machine" else found
