"""How long a call takes: `torch.utils.benchmark` in rounds, each a window that joules can be read for.

A block of calls is timed between two synchronisations, and blocks follow each other until the round is long enough.
What is timed is therefore a stream of inferences; how long one takes when the host waits for each result is another
question, answered by `waited_for`.
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
# torch calls twice to warm up before it times a block; only beside many calls that is nothing
_LARGE_BLOCK = 100
_SYNC_S = 1.0


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
    counted = _CountedCall(call)
    timer = Timer("call()", globals={"call": counted}, num_threads=threads)
    begin_ns = time.monotonic_ns()
    if before is None or before.calls_per_block < _LARGE_BLOCK:
        found = timer.blocked_autorange(min_run_time=min_run_time_s)
        times, size = tuple(found.times), found.number_per_run
    else:
        times, size = _time_blocks(timer, min_run_time_s, before.calls_per_block), before.calls_per_block
    return Round(begin_ns, time.monotonic_ns(), counted.calls, times, size)


def _time_blocks(timer: Timer, min_run_time_s: float, size: int) -> tuple[float, ...]:
    """What blocked autorange does once it knows the size."""
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
    """Median seconds of a call whose result the host waits for before it starts the next one."""
    wait = device_synchronizer(device)
    times: list[float] = []
    while len(times) < _SYNC_CALLS and sum(times) < _SYNC_S:
        begin = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


# Going on until the energy's interval is as tight as asked, or the time limit ends it.


# With fewer pieces than this their spread says nothing.
_MIN_SEGMENTS = 3


StopReason = Literal["", "no joules", "tight", "limit"]
"""Why a row was not run longer, where an interval was asked for."""


class MeasuredRow(Protocol):
    """Whatever is run in rounds."""

    ended: StopReason

    @property
    def turns(self) -> list[ItemWindow]: ...

    @property
    def seconds(self) -> float: ...


T = TypeVar("T", bound=MeasuredRow)


def run_until_ci(
    rows: Sequence[T], meter: Meter, spec: InferSpec, device: str, go_on: Callable[[T, float], None]
) -> None:
    """`go_on` runs a row for so many seconds more. Rows take turns as before, as long as they are open."""
    if spec.target_ci is None:
        return
    if missing_energy_reason(meter, device) is not None:
        for row in rows:
            row.ended = "no joules"
        return
    seconds, still_open = max(spec.min_run_time_s / spec.rounds, SEGMENT_S), list(rows)
    while still_open:
        read = energy_reader(meter, 0, device)  # what the trace covers by now; waiting would let the card cool down
        for row in still_open:
            row.ended = _stop_reason(row, read, spec.target_ci, spec.limit_s)
        still_open = [row for row in still_open if not row.ended]
        for row in still_open:
            go_on(row, seconds)


def _stop_reason(row: MeasuredRow, read: Reader, target: float, limit_s: float) -> StopReason:
    found, _ = energy_per_item(row.turns, read)
    if found is not None and row.seconds >= _MIN_SEGMENTS * SEGMENT_S and found.relative <= target:
        return "tight"
    return "limit" if row.seconds >= limit_s else ""


def stop_reason_text(row: MeasuredRow, spec: InferSpec) -> str:
    """Without the interval itself: the trace ran late while it was decided, and the table has the final one."""
    asked = f"{100 * (spec.target_ci or 0):g} %"
    return {
        "": "",
        "no joules": "there are no joules whose interval could become tight",
        "tight": f"the energy's interval reached {asked}",
        "limit": f"the time limit of {spec.limit_s:g} s, before the energy's interval reached {asked}",
    }[row.ended]


# A row's figures as plain values for the record; how the GPU was while they came about.


def row_values(
    case: Case, item: str, items: int, latency: Latency, rounds: Sequence[Round], read: Reader
) -> dict[str, Any]:
    """The latency is a median; items per second are a mean over the windows, as watts and joules are."""
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
                "begin_ns": one.begin_ns,
                "end_ns": one.end_ns,
                "calls": one.calls,
                "median_s": one.median_s,
                "power_w": mean_power_w(one.window, read),
            }
            for one in rounds
        ],
    }


def machine_state(trace: Path, windows: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Clocks, temperature and what held the card back: a figure without them is hard to repeat."""
    states = load_health(trace).during(windows)

    def told(name: str) -> dict[str, float] | None:
        values = [getattr(state, name) for state in states if getattr(state, name) is not None]
        return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None

    return {
        "sm_utilisation_percent": told("utilization_percent"),
        "sm_clock_mhz": told("sm_clock_mhz"),
        "temperature_c": told("temperature_c"),
        "throttled": throttle_shares(states) if states else {},
        "readings": len(states),
    }


def model_flops_utilization(
    flops: float | None, how: str, items_per_s: float, dtype: str, device: torch.device
) -> tuple[float | None, str]:
    """Share of the data sheet's peak, or why it is not known."""
    if device.type != "cuda":
        return None, "no peak is known for a CPU"
    if flops is None:
        return None, f"FLOPs {how}"
    name = torch.cuda.get_device_name(device)
    peak = peak_flops(name, peak_precision(dtype))
    if peak is None:
        return None, f"no peak of the {name} in {dtype} is known here (train/devices.py)"
    return flops * items_per_s / peak, ""
