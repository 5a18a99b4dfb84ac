"""Latency of a call: `torch.utils.benchmark` in rounds, each a window whose energy can be read.

A block of calls is timed between two synchronizations, and blocks follow each other until the round is long enough, so
latency is that of a pipelined stream of calls. `synchronized_latency` is one call including the wait for its result.
Also here: measuring until the confidence interval is narrow enough, and a row's values for the record.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.benchmark import Timer

from joulelab.infer.config import Case, InferSpec
from joulelab.infer.energy import SEGMENT_S, ItemWindow, Reader, energy_per_item, mean_power_w
from joulelab.infer.recipes import peak_precision
from joulelab.meter.health import load_health, throttle_shares
from joulelab.meter.session import Meter
from joulelab.train.devices import peak_flops
from joulelab.train.stats.hooks import device_synchronizer
from joulelab.train.stats.step_energy import energy_reader, missing_energy_reason

Call = Callable[[], Any]
_SYNC_CALLS = 100
# Timer.timeit makes two warm-up calls per block, which is negligible only for large blocks.
_LARGE_BLOCK = 100
_SYNC_S = 1.0


@dataclass(frozen=True)
class Round:
    """One window on the monotonic clock, and the calls in it."""

    begin_ns: int
    end_ns: int
    calls: int
    """All calls, including those that determine the block size."""
    times_s: tuple[float, ...]
    """Mean seconds per call of each block."""
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
        # Median and quartiles: latencies are skewed to the right by the scheduler and by clock
        # changes, which a mean and a standard deviation would report as typical.
        low, middle, high = np.percentile(times, [25, 50, 75])
        return cls(float(middle), float(high - low), len(times), rounds[0].calls_per_block)


def run_round(call: Call, min_run_time_s: float, threads: int, before: Round | None = None) -> Round:
    """Run one round. `before`: an earlier round of the same call, whose block size is reused; finding it takes a
    second."""
    counted = _CountedCall(call)
    timer = Timer("call()", globals={"call": counted}, num_threads=threads)
    begin_ns = time.monotonic_ns()
    if before is None or before.calls_per_block < _LARGE_BLOCK:
        # Grows the block until the timer's own overhead is 1e-4 of it, so that calls of
        # microseconds are timed in blocks of thousands.
        found = timer.blocked_autorange(min_run_time=min_run_time_s)
        times, size = tuple(found.times), found.number_per_run
    else:
        times, size = _time_blocks(timer, min_run_time_s, before.calls_per_block), before.calls_per_block
    return Round(begin_ns, time.monotonic_ns(), counted.calls, times, size)


def _time_blocks(timer: Timer, min_run_time_s: float, size: int) -> tuple[float, ...]:
    """What `blocked_autorange` does once it knows the block size."""
    times: list[float] = []
    while size * sum(times) < min_run_time_s:
        times.append(timer.timeit(size).median)
    return tuple(times)


class _CountedCall:
    def __init__(self, call: Call) -> None:
        self._call = call
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        self._call()


def synchronized_latency(call: Call, device: torch.device) -> float:
    """Median seconds of a call, if the host waits for each result before the next call."""
    wait = device_synchronizer(device)
    times: list[float] = []
    while len(times) < _SYNC_CALLS and sum(times) < _SYNC_S:
        begin = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


# The spread of fewer segments is not meaningful.
_MIN_SEGMENTS = 3


StopReason = Literal["", "no energy", "target", "limit"]
"""Why the measurement of a row ended, if `target_ci` is set."""


class MeasuredRow(Protocol):
    """A row that is measured in rounds."""

    stop_reason: StopReason

    @property
    def item_windows(self) -> list[ItemWindow]: ...

    @property
    def seconds(self) -> float: ...


T = TypeVar("T", bound=MeasuredRow)


def run_until_ci(
    rows: Sequence[T], meter: Meter, spec: InferSpec, device: str, measure_more: Callable[[T, float], None]
) -> None:
    """Measure until the energy interval of each row reaches `target_ci` or the time limit.

    `measure_more` runs a row for a number of seconds. Unfinished rows keep taking turns.
    """
    if spec.target_ci is None:
        return
    if missing_energy_reason(meter, device) is not None:
        for row in rows:
            row.stop_reason = "no energy"
        return
    seconds, still_open = max(spec.min_run_time_s / spec.rounds, SEGMENT_S), list(rows)
    while still_open:
        # Looking at the interval after every round and stopping when it is narrow is sequential
        # sampling: it makes the coverage slightly less than 95 % (Chow and Robbins, 1965), by less
        # the more segments there are. `_MIN_SEGMENTS` avoids stopping on a chance agreement of two.
        read = energy_reader(meter, 0, device)  # what the trace covers by now; waiting would let the GPU cool down
        for row in still_open:
            row.stop_reason = _stop_reason(row, read, spec.target_ci, spec.limit_s)
        still_open = [row for row in still_open if not row.stop_reason]
        for row in still_open:
            measure_more(row, seconds)


def _stop_reason(row: MeasuredRow, read: Reader, target: float, limit_s: float) -> StopReason:
    found, _ = energy_per_item(row.item_windows, read)
    if found is not None and row.seconds >= _MIN_SEGMENTS * SEGMENT_S and found.relative <= target:
        return "target"
    return "limit" if row.seconds >= limit_s else ""


def stop_reason_text(row: MeasuredRow, spec: InferSpec) -> str:
    """Without the interval itself: the trace lagged when this was decided, and the table has the final one."""
    target = f"{100 * (spec.target_ci or 0):g} %"
    return {
        "": "",
        "no energy": "no energy was measured, so there is no interval to narrow",
        "target": f"the energy interval reached {target}",
        "limit": f"the time limit of {spec.limit_s:g} s was reached before the energy interval reached {target}",
    }[row.stop_reason]


def row_values(
    case: Case, item: str, items: int, latency: Latency, rounds: Sequence[Round], read: Reader
) -> dict[str, Any]:
    """A row as plain values. Latency is a median; items per second are a mean over the windows, like power and
    energy."""
    calls, seconds = sum(found.calls for found in rounds), sum(found.duration_s for found in rounds)
    return {
        **asdict(case),
        "item": item,
        "items_per_call": items,
        "latency": asdict(latency),
        "items_per_s": items * calls / seconds,
        "calls": calls,
        "seconds": seconds,
        "rounds": [
            {
                "begin_ns": window.begin_ns,
                "end_ns": window.end_ns,
                "calls": window.calls,
                "median_s": window.median_s,
                "power_w": mean_power_w(window.window, read),
            }
            for window in rounds
        ],
    }


def machine_state(trace: Path, windows: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Clocks, temperature and throttling of the GPU during the windows, which are needed to reproduce a figure."""
    states = load_health(trace).during(windows)

    def summary(name: str) -> dict[str, float] | None:
        values = [getattr(state, name) for state in states if getattr(state, name) is not None]
        return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None

    return {
        "sm_utilization_percent": summary("utilization_percent"),
        "sm_clock_mhz": summary("sm_clock_mhz"),
        "temperature_c": summary("temperature_c"),
        "throttled": throttle_shares(states) if states else {},
        "readings": len(states),
    }


def model_flops_utilization(
    flops: float | None, how: str, items_per_s: float, dtype: str, device: torch.device
) -> tuple[float | None, str]:
    """FLOPs per second over the data sheet's peak, or None and the reason."""
    if device.type != "cuda":
        return None, "the peak FLOP/s of a CPU is unknown"
    if flops is None:
        return None, f"FLOPs {how}"
    name = torch.cuda.get_device_name(device)
    peak = peak_flops(name, peak_precision(dtype))
    if peak is None:
        return None, f"the peak FLOP/s of {name} in {dtype} is unknown (see train/devices.py)"
    return flops * items_per_s / peak, ""
