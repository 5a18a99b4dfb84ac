"""Times of the phases of a step: clocks, quantiles over a whole training, and the tracker `simple`.

On a GPU the host's clock sees only kernel launches, so a CUDA event is put into the device's stream at both ends of a
phase and read later, when the device has passed it; nothing ever waits. Events are reused. A stream executes in order,
so the oldest pair of events is always the first that can be read.

Host and device times mean different things: the device time is how long the work took, the host time how long the
program took to launch it. A host time above the device time means that the device waits for the program.
"""

from __future__ import annotations

import json
import random
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from joulelab.train.stats.hooks import (
    PHASES,
    CsvFile,
    LossFile,
    TrackerContext,
    TrainerStats,
    device_synchronizer,
    unused_path,
)

# Far more than a device is ever behind. Phases beyond it are not timed, to bound the memory.
MAX_PENDING = 4096


class PhaseTiming(NamedTuple):
    """Duration of one phase."""

    phase: str
    host_s: float
    device_s: float | None
    """None on a CPU."""

    @property
    def duration_s(self) -> float:
        return self.host_s if self.device_s is None else self.device_s


class PhaseClock(Protocol):
    untimed: int
    """Phases that could not be timed."""

    def start(self, phase: str) -> None: ...

    def stop(self, phase: str) -> None: ...

    def harvest(self) -> list[PhaseTiming]:
        """Timings that became available since the last call."""


def clock_for(device: torch.device) -> PhaseClock:
    return CudaClock() if device.type == "cuda" else HostClock()


class HostClock:
    def __init__(self) -> None:
        self.untimed = 0
        self._started: dict[str, float] = {}
        self._done: list[PhaseTiming] = []

    def start(self, phase: str) -> None:
        self._started[phase] = time.perf_counter()

    def stop(self, phase: str) -> None:
        now = time.perf_counter()
        started = self._started.pop(phase, None)
        if started is not None:
            self._done.append(PhaseTiming(phase, now - started, None))

    def harvest(self) -> list[PhaseTiming]:
        done, self._done = self._done, []
        return done


class _Pending(NamedTuple):
    phase: str
    host_s: float
    begin: Any
    end: Any


class CudaClock:
    def __init__(self) -> None:
        self.untimed = 0
        self._free: list[Any] = []
        self._started: dict[str, tuple[float, Any]] = {}
        self._pending: deque[_Pending] = deque()

    def start(self, phase: str) -> None:
        # Events are recorded on the stream and read later: synchronizing at every phase would serialize host and
        # device and measure another program.
        event = self._event()
        event.record()
        self._started[phase] = (time.perf_counter(), event)

    def stop(self, phase: str) -> None:
        now = time.perf_counter()
        started = self._started.pop(phase, None)
        if started is None:
            return
        # The host may be far ahead of the device; events would otherwise grow without bound.
        if len(self._pending) >= MAX_PENDING:
            self.untimed += 1
            self._free.append(started[1])
            return
        end = self._event()
        end.record()
        self._pending.append(_Pending(phase, now - started[0], started[1], end))

    def harvest(self) -> list[PhaseTiming]:
        done = []
        # In order of submission, and a stream finishes in that order: the first unfinished event ends the search.
        while self._pending and self._pending[0].end.query():
            phase, host_s, begin, end = self._pending.popleft()
            done.append(PhaseTiming(phase, host_s, begin.elapsed_time(end) / 1000))
            self._free += (begin, end)
        return done

    def _event(self) -> Any:
        make: Any = torch.cuda.Event  # torch leaves its methods untyped
        return self._free.pop() if self._free else make(enable_timing=True)


STEP_PHASES = ("input", "forward", "backward", "optimizer_step")


class PhaseTimes:
    """Mean time of each phase, from one step in `every`: enough for a mean, and the other steps have no overhead.

    It is the one in the middle, because the first steps of an attempt load libraries and compile; and the second step,
    so that a training of a few steps has times, too.
    """

    def __init__(self, device: torch.device, every: int = 10) -> None:
        self.watching = False
        """Whether the current step is timed."""
        self._clock = clock_for(device)
        self._every = every
        self._seen = 0
        self._watched = 0
        self._sums_s: dict[str, float] = {}

    def start(self, phase: str) -> None:
        if phase == "step":
            self.watching = self._seen == 1 or self._seen % self._every == self._every // 2
            self._seen += 1
        if self.watching:
            self._clock.start(phase)

    def stop(self, phase: str) -> None:
        if self.watching:
            self._clock.stop(phase)
            self.watching = phase != "step"

    def harvest(self) -> None:
        for timed in self._clock.harvest():
            self._sums_s[timed.phase] = self._sums_s.get(timed.phase, 0.0) + timed.duration_s
            self._watched += timed.phase == "step"

    def per_step_s(self) -> dict[str, float]:
        """Seconds of each phase in one optimizer step, summed over its micro-batches."""
        return {phase: self._sums_s.get(phase, 0.0) / max(1, self._watched) for phase in STEP_PHASES}

    def shares(self) -> dict[str, float]:
        """Fraction of the step's time in each phase; empty if nothing was timed."""
        per_step_s = self.per_step_s()
        # Of the phases and not of the step: gaps between phases (logging, stop requests) belong to none of them.
        whole_s = sum(per_step_s.values())
        return {phase: seconds / whole_s for phase, seconds in per_step_s.items()} if whole_s else {}


# Quantiles are exact up to this many values. Beyond, reservoir sampling (Vitter, 1985) keeps a uniform sample, whose
# p99 is between the true p98.7 and p99.3 with 95 % probability.
RESERVOIR_SIZE = 4096


class Durations:
    """Mean and quantiles of a stream of durations in constant memory."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0
        self._kept: list[float] = []
        self._random = random.Random(0)  # separate: must not change the training's random numbers

    def add(self, duration_s: float) -> None:
        self.count += 1
        self.sum_s += duration_s
        self.max_s = max(self.max_s, duration_s)
        if len(self._kept) < RESERVOIR_SIZE:
            self._kept.append(duration_s)
        # Algorithm R: the n-th value replaces a random one with probability size / n, so that after
        # any n every value has been kept with the same probability.
        elif (place := int(self._random.random() * self.count)) < RESERVOIR_SIZE:
            self._kept[place] = duration_s

    @property
    def mean_s(self) -> float:
        return self.sum_s / self.count if self.count else 0.0

    def quantiles_s(self, *levels: float) -> list[float]:
        ordered = sorted(self._kept)
        return [_interpolate(ordered, level * (len(ordered) - 1)) for level in levels]


def _interpolate(ordered: list[float], place: float) -> float:
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_COLUMNS = ("phase", "clock", "count", "mean_s", *(f"{name}_s" for name in QUANTILES), "max_s")


_STEP_COLUMNS = ("step", *(f"{phase}_s" for phase in STEP_PHASES), "step_s")


class SimpleStats(TrainerStats):
    """Mean and quantiles of every phase, on the host clock and on the device clock, and a table with a row per step."""

    def __init__(self) -> None:
        self._steps: CsvFile | None = None
        self._unread: deque[int] = deque()  # steps whose times are not known yet: a GPU works behind the program
        self._step_s: dict[str, float] = {}
        self._clock: PhaseClock = HostClock()
        self._times: dict[tuple[str, str], Durations] = {}
        self._losses = LossFile(None)
        self._first_loss: float | None = None
        self._last_loss: float | None = None
        self._context: TrackerContext | None = None

    def attach(self, context: TrackerContext) -> None:
        self._context = context
        self._clock = clock_for(context.device)
        self._losses = LossFile(self._folder())
        if (folder := self._folder()) is not None:
            self._steps = CsvFile(unused_path(folder, "steps", ".csv"), _STEP_COLUMNS)

    def start_train(self) -> None:
        if self._context is not None:
            self._losses.step = self._context.trainer.position.step  # above 0 in a resumed run
        super().start_train()

    def start(self, phase: str) -> None:
        self._clock.start(phase)

    def stop(self, phase: str) -> None:
        untimed = self._clock.untimed
        self._clock.stop(phase)
        if phase == "step" and self._clock.untimed == untimed:
            self._unread.append(self._losses.step + 1)

    def log_loss(self, loss: float) -> None:
        self._first_loss = loss if self._first_loss is None else self._first_loss
        self._last_loss = loss
        self._losses.add(loss)

    def log_step(self, step: int) -> None:
        self._losses.step = step
        for timed in self._clock.harvest():
            self._take(timed)

    def _take(self, timed: PhaseTiming) -> None:
        self._row(timed.phase, "host").add(timed.host_s)
        if timed.device_s is not None:
            self._row(timed.phase, "device").add(timed.device_s)
        if timed.phase == "step" or timed.phase in STEP_PHASES:
            self._step_s[timed.phase] = self._step_s.get(timed.phase, 0.0) + timed.duration_s
        if timed.phase == "step" and self._unread:
            self._end_step(self._unread.popleft(), self._step_s)
            self._step_s = {}

    def _end_step(self, step: int, times_s: dict[str, float]) -> None:
        """The times of a step are known: the sums over its micro-batches."""
        if self._steps is not None:
            self._steps.add((step, *(round(times_s.get(phase, 0.0), 9) for phase in (*STEP_PHASES, "step"))))

    def _row(self, phase: str, clock: str) -> Durations:
        row = self._times.get((phase, clock))
        if row is None:
            row = self._times[phase, clock] = Durations()
        return row

    def log_stats(self) -> str:
        if self._context is not None:
            device_synchronizer(self._context.device)()  # training is over, so waiting for the last events is fine
        self.log_step(self._losses.step)
        self._losses.close()
        if self._steps is not None:
            self._steps.close()
        rows = self._rows()
        if self._context is not None:
            self._context.result("simple", {"phases": rows, "untimed": self._clock.untimed})
        if (folder := self._folder()) is not None:
            _write_tables(folder, rows)
        return self._table(rows)

    def _folder(self) -> Path | None:
        folder = self._context.folder if self._context else None
        return None if folder is None else folder / "simple"

    def _rows(self) -> list[dict[str, Any]]:
        """In the order of the loop, device clock first."""
        order = sorted(self._times.items(), key=lambda item: (PHASES.index(item[0][0]), item[0][1]))
        return [_row_values(phase, clock, times) for (phase, clock), times in order]

    def _table(self, rows: list[dict[str, Any]]) -> str:
        columns = ("mean", *QUANTILES, "max")
        lines = [f"{'phase':<16}{'clock':<8}{'count':>9}" + "".join(f"{head + ' ms':>11}" for head in columns)]
        for row in rows:
            times = "".join(f"{1000 * row[f'{head}_s']:>11.2f}" for head in columns)
            lines.append(f"{row['phase']:<16}{row['clock']:<8}{row['count']:>9}{times}")
        if self._clock.untimed:
            lines.append(f"{self._clock.untimed} phases were not timed: the device was too far behind")
        if self._last_loss is not None:
            lines.append(f"loss {self._first_loss:.4f} at the first log line, {self._last_loss:.4f} at the last")
        return "\n".join(lines)


class SimpleStepStats(SimpleStats):
    """`simple`, with a line on the terminal for every step."""

    def _end_step(self, step: int, times_s: dict[str, float]) -> None:
        super()._end_step(step, times_s)
        if self._context is not None:
            parts = ", ".join(f"{phase} {1000 * times_s[phase]:.2f} ms" for phase in STEP_PHASES if phase in times_s)
            self._context.write(f"step {step}: {1000 * times_s['step']:.2f} ms ({parts})")


def _row_values(phase: str, clock: str, times: Durations) -> dict[str, Any]:
    quantiles = dict(zip(QUANTILES, times.quantiles_s(*QUANTILES.values()), strict=True))
    numbers = {"mean": times.mean_s, **quantiles, "max": times.max_s}
    rounded = {f"{name}_s": round(value, 9) for name, value in numbers.items()}
    return {"phase": phase, "clock": clock, "count": times.count, **rounded}


def _write_tables(folder: Path, rows: list[dict[str, Any]]) -> None:
    table = CsvFile(unused_path(folder, "phases", ".csv"), _COLUMNS)
    for row in rows:
        table.add(row[name] for name in _COLUMNS)
    table.close()
    text = json.dumps({"units": "seconds", "phases": rows}, indent=1)
    unused_path(folder, "phases", ".json").write_text(text + "\n", encoding="utf-8")
