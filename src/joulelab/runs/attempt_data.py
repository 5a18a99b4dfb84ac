"""One attempt of a run as read back from its folder: trace, marks, vital signs, and the windows of its stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from joulelab.clock import NS, iso
from joulelab.meter.integrate import COMPONENTS, component_energy, without
from joulelab.meter.series import Trace, load_trace
from joulelab.meter.vitals import Vitals, load_vitals
from joulelab.runs.beside import CodecarbonReadings, load_codecarbon
from joulelab.runs.events import AttemptEvents, Window, read_events
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import EnergyByComponent

IDLE_STAGES = ("idle.before", "idle.after")


@dataclass(frozen=True, eq=False)
class AttemptData:
    number: int
    host: str
    trace: Trace
    trace_path: Path
    events: AttemptEvents
    begin_ns: int
    end_ns: int
    windows: dict[str, list[Window]]
    codecarbon: CodecarbonReadings

    def energy(self, windows: list[Window]) -> EnergyByComponent:
        figures = {name: component_energy(self.trace, name, windows) for name in COMPONENTS}
        return EnergyByComponent(**figures, codecarbon=self.codecarbon.energy(windows))

    def started_at(self, mono_ns: int) -> str:
        return iso(mono_ns / NS + self.trace.offset_s)

    @cached_property
    def vitals(self) -> Vitals:
        return load_vitals(self.trace_path)

    @property
    def idle_windows(self) -> list[Window]:
        return [window for stage in IDLE_STAGES for window in self.windows.get(stage, [])]

    @property
    def billed_windows(self) -> list[Window]:
        """All of the attempt but its idle baselines."""
        return without((self.begin_ns, self.end_ns), self.idle_windows)

    @property
    def overhead_windows(self) -> list[Window]:
        """What no stage claims."""
        staged = [window for windows in self.windows.values() for window in windows]
        return without((self.begin_ns, self.end_ns), staged)


def load_attempts(paths: RunPaths) -> list[AttemptData]:
    return [_load_attempt(paths, host, number, trace) for host, number, trace in paths.traces()]


def _load_attempt(paths: RunPaths, host: str, number: int, trace_path: Path) -> AttemptData:
    trace = load_trace(trace_path)
    events_path = paths.events(host, 0, number)
    events = read_events(events_path) if events_path.exists() else AttemptEvents()
    begin_ns = events.begin_ns or trace.first_ns
    end_ns = max(begin_ns, events.end_ns or trace.last_ns)
    return AttemptData(
        number=number,
        host=host,
        trace=trace,
        trace_path=trace_path,
        events=events,
        begin_ns=begin_ns,
        end_ns=end_ns,
        windows=events.closed_windows(end_ns),
        codecarbon=load_codecarbon(paths.folder, host, number),
    )


def seconds(windows: list[Window]) -> float:
    return sum(end - start for start, end in windows) / NS
