"""Energy per optimizer step of a training as it ran, and ways to divide it over the phases.

`direct` divides the measured energy of long windows by the number of steps in them. It works for whole steps, and for
phases that last seconds. `time-share` divides the step's energy by device time. It is the weakest method, because it
assumes that a memory-bound phase draws as much power as a compute-bound one.

The energy comes from the trace that the run's recorder is still writing, so the reader waits until the trace covers the
windows. Which windows are training and nothing else:

- Whatever keeps the loop from its next step (a checkpoint, an evaluation, a tracker's own measurement) ends a window,
  whether a hook announces it or the time between two steps shows it.
- The host knows when it has launched a step, not when the device has finished it. It does know at the log lines, where
  it waits for the losses, so an interrupted window ends at the last such point. Between consecutive windows the device
  is behind by about the same time, which cancels.
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
from joulelab.meter.figures import EnergyFigure, Frozen, missing, time_share_half_width_j
from joulelab.meter.integrate import COMPONENTS, Window, component_energy
from joulelab.meter.series import load_trace
from joulelab.meter.session import Meter
from joulelab.runs.record import EnergyByComponent, work_policy
from joulelab.stats import mean_t

# The recorder reads the driver's buffer every 0.5 to 2 s, and the buffer itself lags behind.
# Buffer of 2.4 s read at least every 2 s, samples about 70 ms late (docs/measuring.md, H200).
TRACE_LAG_NS = int(2.2 * NS)
TRACE_TIMEOUT_S = 6.0
NO_METER = missing("the training runs without a meter", "train inside a run: `joulelab train`")

Reader = Callable[[Sequence[Window]], EnergyFigure]


def energy_reader(meter: Meter | None, until_ns: int, device: str, earlier: Path | None = None) -> Reader:
    """A function from windows to the energy of work on `device`. Waits until the trace covers `until_ns`. `earlier`:
    the trace of another attempt, which has ended."""
    if meter is None:
        return lambda windows: NO_METER
    # Energy is computed from the same trace and by the same functions as the record, so that a
    # tracker's figures and the record's agree.
    if earlier is None:
        wait_for_trace(meter.trace_path, until_ns + TRACE_LAG_NS)
    trace = load_trace(earlier or meter.trace_path)
    # The trace has no CodeCarbon readings, so that policy falls back to the sensors.
    policy = work_policy("gpu_only" if meter.policy == "gpu_only" else "measured", device)

    def read(windows: Sequence[Window]) -> EnergyFigure:
        """The measured energy, else the estimate, labeled as such, else the reason why there is none."""
        figures = {name: component_energy(trace, name, windows) for name in COMPONENTS}
        return EnergyByComponent(**figures).best(policy)

    return read


def missing_energy_reason(meter: Meter | None, device: str) -> str | None:
    """Why no sensor and no estimate can measure work on `device`; None if one can."""
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
    """Timestamp of the last complete line, read from the end of the file."""
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


TimeSpan = tuple[int, int]
INTERRUPTIONS = ("checkpoint", "aside")
# Longer than writing a log line, shorter than any interruption that matters.
PAUSE_NS = NS // 10
# Long compared with the sensor's refresh (100 ms), so that windows can be compared with each other.
WINDOW_NS = 5 * NS
MAX_WINDOWS = 64


@dataclass(frozen=True)
class CleanWindow:
    """Undisturbed training: time spans, and the optimizer steps in them."""

    spans: tuple[TimeSpan, ...]
    steps: int

    @property
    def duration_s(self) -> float:
        return sum(end - begin for begin, end in self.spans) / NS


class CleanWindows:
    """Collects `windows` of a few seconds from the steps as they happen; merges pairs when there are many."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns, wait: Callable[[], None] = lambda: None) -> None:
        self.windows: list[CleanWindow] = []
        self._now_ns = now_ns
        self._wait = wait
        self._window_ns = WINDOW_NS
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
        # The next window begins where this one ends: the device is behind the host by about the
        # same number of kernels at both edges, so the energy that one window lacks at its end it
        # has gained at its start.
        if self._last_ns - self._begin_ns >= self._window_ns:
            end = self._last_ns
            self.interrupt()
            self._begin_ns = end

    def touch(self) -> None:
        """Extend the window to now; call it where the host has waited for the device."""
        self._last_ns = self._now_ns()

    def finish(self) -> None:
        """Close the window when the device has finished its steps."""
        self._wait()
        self.touch()
        self.interrupt()

    def interrupt(self) -> None:
        """Close the window: what follows is not training."""
        if self._begin_ns is not None and self._steps and self._last_ns > self._begin_ns:
            self.windows.append(CleanWindow(((self._begin_ns, self._last_ns),), self._steps))
            if len(self.windows) > MAX_WINDOWS:
                self._merge()
        self._begin_ns, self._steps = None, 0

    def _merge(self) -> None:
        # Memory stays bounded for a training of any length: 64 windows of 5 s, then 32 of 10 s, and
        # so on. Halving keeps windows equally long, so that they can be compared with each other.
        pairs = zip(self.windows[::2], self.windows[1::2], strict=False)
        odd = self.windows[-1:] if len(self.windows) % 2 else []
        self.windows = [*(_merge_windows(a, b) for a, b in pairs), *odd]
        self._window_ns *= 2


def _merge_windows(a: CleanWindow, b: CleanWindow) -> CleanWindow:
    if a.spans[-1][1] == b.spans[0][0]:
        seam = (a.spans[-1][0], b.spans[0][1])
        return CleanWindow((*a.spans[:-1], seam, *b.spans[1:]), a.steps + b.steps)
    return CleanWindow(a.spans + b.spans, a.steps + b.steps)


# Ten refreshes of a GPU's energy counter; the error of shorter windows is several percent.
MIN_DURATION_S = 1.0


class PerStep(Frozen):
    """Energy and time of a phase, or of all phases, in one optimizer step."""

    method: str
    """`direct`, `isolated` or `time-share`."""
    energy_j: float
    half_width_j: float
    """Random 95 % half-width."""
    duration_s: float

    @property
    def power_w(self) -> float | None:
        """None if the duration is not resolved, for example for an input that is always ready."""
        return self.energy_j / self.duration_s if self.duration_s > 1e-6 else None


class StepEnergy(Frozen):
    """Energy per step over the undisturbed windows; `step` is None if there is none, and `problem` says why."""

    step: PerStep | None
    steps: int
    duration_s: float
    figure: EnergyFigure

    @property
    def problem(self) -> str | None:
        """Why there is no energy per step, with the fix if one is known."""
        if self.step is not None:
            return None
        if self.figure.energy_j is None:
            return f"{self.figure.reason}" + (f" ({self.figure.fix})" if self.figure.fix else "")
        return f"{self.duration_s:.1f} s of undisturbed training is too short; the sensors need {MIN_DURATION_S:g} s"


def energy_per_step(windows: Sequence[CleanWindow], read: Reader) -> StepEnergy:
    spans = [span for window in windows for span in window.spans]
    steps, duration_s = sum(window.steps for window in windows), sum(window.duration_s for window in windows)
    figure = read(spans)
    if figure.energy_j is None or duration_s < MIN_DURATION_S:
        return StepEnergy(step=None, steps=steps, duration_s=duration_s, figure=figure)
    energy_j, half_width_j = _for_whole_time(figure)
    # Two estimates of the same error: the meter's model of itself, and what the windows show. The
    # larger one, because the model does not know how the training varies, and few windows may agree
    # by chance.
    per_step = PerStep(
        method="direct",
        energy_j=energy_j / steps,
        half_width_j=max(half_width_j / steps, _spread(windows, read)),
        duration_s=duration_s / steps,
    )
    return StepEnergy(step=per_step, steps=steps, duration_s=duration_s, figure=figure)


def _for_whole_time(figure: EnergyFigure) -> tuple[float, float]:
    """Energy and 95 % half-width of all of the windows. The part without readings is assumed to be like the rest; the
    interval allows it to have used nothing or twice as much, also on devices without a known power limit."""
    seen_j, covered = figure.energy_j or 0.0, max(figure.coverage, 1e-9)
    return seen_j / covered, max(figure.half_width_j or 0.0, (1 - covered) * seen_j) / covered


def _spread(windows: Sequence[CleanWindow], read: Reader) -> float:
    """95 % half-width of the mean from the spread between windows (Student's t), which includes the meter's noise and
    the variation of the training itself; 0 for fewer than three windows."""
    long = [window for window in windows if window.duration_s >= MIN_DURATION_S]
    figures = [(window, read(window.spans)) for window in long]
    # A window with gaps would look like a step that uses less energy.
    values = [(figure.energy_j or 0.0) / window.steps for window, figure in figures if figure.coverage > 0.98]
    if len(values) < 3:
        return 0.0
    interval = mean_t(values)
    return interval.high - interval.value


def time_shares(step: PerStep, shares: Mapping[str, float]) -> dict[str, PerStep]:
    """The step's energy by time. The interval covers every possible value: phases may differ in power."""
    return {
        phase: PerStep(
            method="time-share",
            energy_j=share * step.energy_j,
            half_width_j=time_share_half_width_j(share, step.energy_j),
            duration_s=share * step.duration_s,
        )
        for phase, share in shares.items()
    }


def within_intervals(a: PerStep, b: PerStep) -> bool:
    # The difference of two independent figures has the standard deviation sqrt(s_a^2 + s_b^2);
    # intervals may overlap where the difference is significant, so overlap is not the test.
    return abs(a.energy_j - b.energy_j) <= math.hypot(a.half_width_j, b.half_width_j)


def to_record(row: PerStep) -> dict[str, Any]:
    return {**row.model_dump(), "power_w": row.power_w}


MAX_PHASE_WINDOWS = 256


class LongPhases:
    """Measures phases that last many refreshes of the sensor directly.

    The device is synchronized at the edges of such phases only, where the wait is negligible compared with the phase.
    """

    def __init__(self, wait: Callable[[], None], now_ns: Callable[[], int]) -> None:
        self._wait = wait
        self._now_ns = now_ns
        self._times_per_step: dict[str, int] = {}
        self._started_ns: dict[str, int] = {}
        self._windows: dict[str, list[TimeSpan]] = {}

    def choose(self, per_step_s: Mapping[str, float], accumulate: int) -> None:
        """Select the phases to measure from here on: those that are long enough."""
        for phase, seconds in per_step_s.items():
            times = 1 if phase == "optimizer_step" else accumulate
            if seconds / times >= MIN_DURATION_S:
                self._times_per_step[phase] = times

    def start(self, phase: str) -> None:
        if phase in self._times_per_step and len(self._windows.get(phase, ())) < MAX_PHASE_WINDOWS:
            self._wait()
            self._started_ns[phase] = self._now_ns()

    def stop(self, phase: str) -> None:
        if phase in self._started_ns:
            self._wait()
            self._windows.setdefault(phase, []).append((self._started_ns.pop(phase), self._now_ns()))

    def last_ns(self) -> int:
        return max((windows[-1][1] for windows in self._windows.values()), default=0)

    def energy(self, read: Reader) -> dict[str, PerStep]:
        return {phase: found for phase in self._windows if (found := self._phase(phase, read)) is not None}

    def _phase(self, phase: str, read: Reader) -> PerStep | None:
        windows = self._windows[phase]
        figure = read(windows)
        if figure.energy_j is None:
            return None
        # Mean of one occurrence times the occurrences in a step: forward and backward run once per
        # micro-batch, the optimizer once per step.
        scale = self._times_per_step[phase] / len(windows)
        energy_j, half_width_j = _for_whole_time(figure)
        return PerStep(
            method="direct",
            energy_j=energy_j * scale,
            half_width_j=half_width_j * scale,
            duration_s=sum(end - begin for begin, end in windows) / 1e9 * scale,
        )
