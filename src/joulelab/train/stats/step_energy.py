"""Joules per optimiser step: of the training as it ran, and how they divide over the phases by time.

The step's figure is `direct`: measured joules of long windows over the steps in them. The phases' figure is its
`time-share`, the weakest of all: it takes a phase that waits for memory to draw as much power as one that multiplies.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulelab.clock import NS
from joulelab.meter.figures import EnergyFigure, Frozen, missing
from joulelab.meter.integrate import COMPONENTS, Window, component_energy
from joulelab.meter.series import load_trace
from joulelab.meter.session import Meter
from joulelab.runs.record import EnergyByComponent, work_policy
from joulelab.stats import mean_t

# Joules of windows in the past of a run that is still going on, from the trace its recorder writes.


# The recorder reads the driver's buffer every 0.5 to 2 s and the buffer itself runs late.
TRACE_LAG_NS = int(2.2 * NS)
TRACE_TIMEOUT_S = 6.0
NO_METER = missing("this training runs without a meter", "train inside a run: `joulelab train`")

Reader = Callable[[Sequence[Window]], EnergyFigure]


def energy_reader(meter: Meter | None, until_ns: int, device: str) -> Reader:
    """A function from windows to the joules of work on `device`, after waiting until the trace covers them."""
    if meter is None:
        return lambda windows: NO_METER
    path = meter.trace_path
    wait_for_trace(path, until_ns + TRACE_LAG_NS)
    trace = load_trace(path)
    # the trace has no readings of CodeCarbon's
    policy = work_policy("gpu_only" if meter.policy == "gpu_only" else "measured", device)

    def read(windows: Sequence[Window]) -> EnergyFigure:
        """What sensors measured, else the estimate under its own label, else why there is nothing."""
        figures = {name: component_energy(trace, name, windows) for name in COMPONENTS}
        return EnergyByComponent(**figures).best(policy)

    return read


def missing_energy_reason(meter: Meter | None, device: str) -> str | None:
    """The reason where no sensor, and no estimate, will ever measure work on `device` here."""
    if meter is None:
        return NO_METER.reason
    trace = load_trace(meter.trace_path)
    sensors = [series for series in trace.devices if series.counted and series.component in COMPONENTS]
    if any(device != "cpu" or meter.policy == "gpu_only" or series.component != "gpu" for series in sensors):
        return None
    return energy_reader(meter, 0, device)([(trace.first_ns, trace.last_ns + 1)]).reason


def wait_for_trace(trace: Path, moment_ns: int) -> None:
    end_s = time.monotonic() + TRACE_TIMEOUT_S
    while last_timestamp_ns(trace) < moment_ns and time.monotonic() < end_s:
        time.sleep(0.05)


def last_timestamp_ns(trace: Path, tail_bytes: int = 1 << 16) -> int:
    """When the newest whole line was written, without reading the others."""
    try:
        with trace.open("rb") as file:
            file.seek(max(0, trace.stat().st_size - tail_bytes))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    for raw in reversed(lines):
        try:
            return int(json.loads(raw)["mono_ns"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


# Which stretches of time were training and nothing else: what joules per step may be divided from.
#
# Whatever keeps the loop from its next step (a checkpoint, an evaluation, a tracker's own measurement) ends a
# stretch, whether its hooks tell of it or the time between two steps does. The host knows when it has handed a step
# over, not when the device has done it. It does know at the log lines, where it waits for the losses; so a stretch
# that is interrupted ends at the last hook at which the device was caught up with. Between two pieces of one stretch
# the device lies behind by about the same, which cancels.


TimeSpan = tuple[int, int]
INTERRUPTIONS = ("checkpoint", "aside")
# Longer than a line of metrics takes, shorter than anything worth setting apart.
PAUSE_NS = NS // 10
# Long against the sensor's refresh (100 ms), so that pieces can be compared with one another.
WINDOW_NS = 5 * NS
MAX_WINDOWS = 64


@dataclass(frozen=True)
class CleanWindow:
    windows: tuple[TimeSpan, ...]
    steps: int

    @property
    def duration_s(self) -> float:
        return sum(end - begin for begin, end in self.windows) / NS


class CleanWindows:
    """Told of steps as they happen. `pieces` are cut to a few seconds each, and longer ones when there are many."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.pieces: list[CleanWindow] = []
        self._now_ns = now_ns
        self._piece_ns = WINDOW_NS
        self._begin_ns: int | None = None
        self._last_ns = 0
        self._steps = 0

    def start_step(self) -> None:
        now = self._now_ns()
        if self._begin_ns is not None and now - self._last_ns > PAUSE_NS:
            self.interrupt()
        if self._begin_ns is None:
            self._begin_ns = now

    def stop_step(self) -> None:
        if self._begin_ns is None:
            return
        self._steps += 1
        self.touch()
        if self._last_ns - self._begin_ns >= self._piece_ns:
            end = self._last_ns
            self.interrupt()
            self._begin_ns = end

    def touch(self) -> None:
        """Training has lasted until now: the host waited here for the device."""
        self._last_ns = self._now_ns()

    def interrupt(self) -> None:
        """What comes next is not training."""
        if self._begin_ns is not None and self._steps and self._last_ns > self._begin_ns:
            self.pieces.append(CleanWindow(((self._begin_ns, self._last_ns),), self._steps))
            if len(self.pieces) > MAX_WINDOWS:
                self._merge()
        self._begin_ns, self._steps = None, 0

    def _merge(self) -> None:
        pairs = zip(self.pieces[::2], self.pieces[1::2], strict=False)
        odd = self.pieces[-1:] if len(self.pieces) % 2 else []
        self.pieces = [*(_merge_windows(a, b) for a, b in pairs), *odd]
        self._piece_ns *= 2


def _merge_windows(a: CleanWindow, b: CleanWindow) -> CleanWindow:
    if a.windows[-1][1] == b.windows[0][0]:
        seam = (a.windows[-1][0], b.windows[0][1])
        return CleanWindow((*a.windows[:-1], seam, *b.windows[1:]), a.steps + b.steps)
    return CleanWindow(a.windows + b.windows, a.steps + b.steps)


# Ten refreshes of a GPU's counter: shorter windows err by several per cent.
MIN_DURATION_S = 1.0


class PerStep(Frozen):
    """Joules and seconds of a phase, or of the whole, in one optimiser step."""

    method: str
    """`direct`, `isolated` or `time-share`."""
    energy_j: float
    half_width_j: float
    """Random 95 % half-width."""
    duration_s: float

    @property
    def power_w(self) -> float | None:
        """None where the time is not resolved, as for an input that is always ready."""
        return self.energy_j / self.duration_s if self.duration_s > 1e-6 else None


class StepEnergy(Frozen):
    """What the trace says of some steps; without joules there is the reason."""

    step: PerStep | None
    steps: int
    duration_s: float
    figure: EnergyFigure

    @property
    def problem(self) -> str | None:
        """Why there are no joules per step, with the way out where one is known."""
        if self.step is not None:
            return None
        if self.figure.energy_j is None:
            return f"{self.figure.reason}" + (f" ({self.figure.fix})" if self.figure.fix else "")
        return f"{self.duration_s:.1f} s of undisturbed training are too short; the sensors need {MIN_DURATION_S:g} s"


def energy_per_step(pieces: Sequence[CleanWindow], read: Reader) -> StepEnergy:
    windows = [window for piece in pieces for window in piece.windows]
    steps, duration_s = sum(piece.steps for piece in pieces), sum(piece.duration_s for piece in pieces)
    figure = read(windows)
    if figure.energy_j is None or duration_s < MIN_DURATION_S:
        return StepEnergy(step=None, steps=steps, duration_s=duration_s, figure=figure)
    # a window's unseen part is taken to be as the seen one
    seen = max(figure.coverage, 1e-9)
    half_width_j = max((figure.half_width_j or 0.0) / steps, _spread(pieces, read))
    per_step = PerStep(
        method="direct",
        energy_j=figure.energy_j / seen / steps,
        half_width_j=half_width_j / seen,
        duration_s=duration_s / steps,
    )
    return StepEnergy(step=per_step, steps=steps, duration_s=duration_s, figure=figure)


def _spread(pieces: Sequence[CleanWindow], read: Reader) -> float:
    """Half-width from how the pieces differ: it contains the meter's noise, and what the training itself varies."""
    long = [piece for piece in pieces if piece.duration_s >= MIN_DURATION_S]
    figures = [(piece, read(piece.windows)) for piece in long]
    values = [(figure.energy_j or 0.0) / piece.steps for piece, figure in figures if figure.coverage > 0.98]
    if len(values) < 3:
        return 0.0
    interval = mean_t(values)
    return interval.high - interval.value


def time_shares(step: PerStep, shares: Mapping[str, float]) -> dict[str, PerStep]:
    return {
        phase: PerStep(
            method="time-share",
            energy_j=share * step.energy_j,
            half_width_j=share * step.half_width_j,
            duration_s=share * step.duration_s,
        )
        for phase, share in shares.items()
    }


def within_intervals(a: PerStep, b: PerStep) -> bool:
    return abs(a.energy_j - b.energy_j) <= math.hypot(a.half_width_j, b.half_width_j)


def to_record(row: PerStep) -> dict[str, Any]:
    return {**row.model_dump(), "power_w": row.power_w}


# Phases that last seconds can be read off the sensor directly; this notes when they ran.
#
# Only where a phase takes many refreshes of the sensor is the device waited for at its edges: there the wait is lost
# in the phase's own length. Shorter phases are never waited for.


MAX_PHASE_WINDOWS = 256


class LongPhases:
    def __init__(self, wait: Callable[[], None], now_ns: Callable[[], int]) -> None:
        self._wait = wait
        self._now_ns = now_ns
        self._times_per_step: dict[str, int] = {}
        self._begun_ns: dict[str, int] = {}
        self._windows: dict[str, list[TimeSpan]] = {}

    def choose(self, per_step_s: Mapping[str, float], accumulate: int) -> None:
        """From here on the phases that are long enough are noted."""
        for phase, seconds in per_step_s.items():
            times = 1 if phase == "optimiser_step" else accumulate
            if seconds / times >= MIN_DURATION_S:
                self._times_per_step[phase] = times

    def start(self, phase: str) -> None:
        if phase in self._times_per_step and len(self._windows.get(phase, ())) < MAX_PHASE_WINDOWS:
            self._wait()
            self._begun_ns[phase] = self._now_ns()

    def stop(self, phase: str) -> None:
        if phase in self._begun_ns:
            self._wait()
            self._windows.setdefault(phase, []).append((self._begun_ns.pop(phase), self._now_ns()))

    def last_ns(self) -> int:
        return max((windows[-1][1] for windows in self._windows.values()), default=0)

    def energy(self, read: Reader) -> dict[str, PerStep]:
        return {phase: found for phase in self._windows if (found := self._phase(phase, read)) is not None}

    def _phase(self, phase: str, read: Reader) -> PerStep | None:
        windows = self._windows[phase]
        figure = read(windows)
        if figure.energy_j is None:
            return None
        scale = self._times_per_step[phase] / len(windows)
        return PerStep(
            method="direct",
            energy_j=figure.energy_j / max(figure.coverage, 1e-9) * scale,
            half_width_j=(figure.half_width_j or 0.0) * scale,
            duration_s=sum(end - begin for begin, end in windows) / 1e9 * scale,
        )
