"""How long a call takes: `torch.utils.benchmark` in rounds, each a window that joules can be read for.

A block of calls is timed between two synchronisations, and blocks follow each other until the round is long enough.
What is timed is therefore a stream of inferences; how long one takes when the host waits for each result is another
question, answered by `waited_for`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.benchmark import Timer

from joulelab.train.stats.sync import waiter

Call = Callable[[], Any]
_WAITED_CALLS = 100
# torch calls twice to warm up before it times a block; only beside many calls that is nothing
_LARGE_BLOCK = 100
_WAITED_S = 1.0


@dataclass(frozen=True)
class Round:
    """One window: its two moments on the monotonic clock, and what was done in it."""

    begin_ns: int
    end_ns: int
    calls: int
    """All of them, those that looked for the size of a block included."""
    times_s: tuple[float, ...]
    """Mean seconds of a call, block by block."""
    calls_per_block: int

    @property
    def window(self) -> tuple[int, int]:
        return self.begin_ns, self.end_ns

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    @property
    def median_s(self) -> float:
        return float(np.median(self.times_s))


@dataclass(frozen=True)
class Latency:
    """Over the blocks of all rounds."""

    median_s: float
    iqr_s: float
    measurements: int
    calls_per_block: int

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> Latency:
        times = np.concatenate([np.asarray(found.times_s) for found in rounds])
        low, middle, high = np.percentile(times, [25, 50, 75])
        return cls(float(middle), float(high - low), len(times), rounds[0].calls_per_block)


def run_round(call: Call, min_run_time_s: float, threads: int, before: Round | None = None) -> Round:
    """`before`: an earlier round of the same call, whose blocks had the right size; looking for it takes a second."""
    counted = _Counted(call)
    timer = Timer("call()", globals={"call": counted}, num_threads=threads)
    begin_ns = time.monotonic_ns()
    if before is None or before.calls_per_block < _LARGE_BLOCK:
        found = timer.blocked_autorange(min_run_time=min_run_time_s)
        times, size = tuple(found.times), found.number_per_run
    else:
        times, size = _blocks(timer, min_run_time_s, before.calls_per_block), before.calls_per_block
    return Round(begin_ns, time.monotonic_ns(), counted.calls, times, size)


def _blocks(timer: Timer, min_run_time_s: float, size: int) -> tuple[float, ...]:
    """What blocked autorange does once it knows the size."""
    times: list[float] = []
    while size * sum(times) < min_run_time_s:
        times.append(timer.timeit(size).median)
    return tuple(times)


class _Counted:
    def __init__(self, call: Call) -> None:
        self._call = call
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        self._call()


def waited_for(call: Call, device: torch.device) -> float:
    """Median seconds of a call whose result the host waits for before it starts the next one."""
    wait = waiter(device)
    times: list[float] = []
    while len(times) < _WAITED_CALLS and sum(times) < _WAITED_S:
        begin = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))
