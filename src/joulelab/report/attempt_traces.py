"""The traces of a run on one time axis, as its figures need them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from joulelab.clock import NS
from joulelab.meter.series import Trace, load_trace
from joulelab.runs.paths import RunPaths


@dataclass(frozen=True)
class AttemptTrace:
    """A trace on the run's own time axis, where attempts follow each other without the pause between them."""

    attempt: int
    host: str
    trace: Trace
    shift_s: float
    path: Path

    def seconds(self, mono_ns: float) -> float:
        return (mono_ns - self.trace.first_ns) / NS + self.shift_s


def attempt_traces(paths: RunPaths) -> list[AttemptTrace]:
    placed: list[AttemptTrace] = []
    shift_s, end_s, previous = 0.0, 0.0, None
    for host, number, path in paths.traces():
        trace = load_trace(path)
        if number != previous:
            shift_s, previous = end_s, number
        placed.append(AttemptTrace(number, host, trace, shift_s, path))
        end_s = max(end_s, shift_s + (trace.last_ns - trace.first_ns) / NS)
    return placed
