"""Calibration of a machine's sensors: refresh period, cost of a call, averaging window, agreement, idle power.

The first half is pure functions over recorded series of (seconds, value), so that every figure of a machine profile can
be recomputed, and tested with series of exactly known properties. The second half records such series, faster than any
sensor refreshes: NVML cards under a load and at rest, RAPL as it is found, and what measuring itself costs.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pstdev, quantiles
from typing import Any

import psutil

from joulelab.clock import NS
from joulelab.errors import JoulelabError
from joulelab.lookup import SENSORS
from joulelab.meter.config import EnergyConfig
from joulelab.meter.profile import CallCost, DeviceProfile, IdleState
from joulelab.meter.sensors import Device, SensorUnavailable
from joulelab.meter.sensors.nvml import power_field, power_w
from joulelab.meter.sensors.processes import cpu_seconds, is_recorder
from joulelab.meter.session import Meter

Reading = tuple[float, float]
"""Seconds and value."""

_FEWEST_CHANGES = 5
# Shares of a falling edge's height: away from the noise at its ends, with refresh steps on both sides.
_HIGH, _LOW = 0.9, 0.1
# Clocks within one step of this size are one state.
_CLOCK_STEP_MHZ = 100


def refresh_period_s(readings: Sequence[Reading]) -> float | None:
    """Median time between two changes of the value; None if it changed too rarely.

    It must be polled several times faster than it refreshes, under a load that keeps it changing.
    """
    changes = [later[0] for earlier, later in pairwise(readings) if later[1] != earlier[1]]
    if len(changes) <= _FEWEST_CHANGES:
        return None
    # The median, because two equal successive values hide a refresh and double an interval, and a
    # delayed poll lengthens one.
    return median(later - earlier for earlier, later in pairwise(changes))


def call_cost(durations_s: Sequence[float]) -> CallCost | None:
    if len(durations_s) < 2:
        return None
    # with few calls the 99th percentile is an extrapolation, which must not exceed the longest call
    worst = quantiles(durations_s, n=100)[-1]
    return CallCost(median_s=median(durations_s), p99_s=min(worst, max(durations_s)), calls=len(durations_s))


def averaging_window_s(readings: Sequence[Reading], load_end_s: float) -> float | None:
    """The length of the sensor's averaging window, from its fall after a load has ended.

    A moving average over a window falls linearly for the length of the window after a step, so the time from 90 % to
    10 % of the step is 0.8 windows. None if there was no step.
    """
    before = [value for stamp, value in readings if load_end_s - 0.5 <= stamp <= load_end_s]
    after = [(stamp, value) for stamp, value in readings if stamp > load_end_s]
    if len(before) < 3 or len(after) < 10:
        return None
    height = median(before)
    # the level just after the fall: power of an idle card keeps falling for many seconds as its clocks drop
    # Two to three seconds: after the longest averaging window known (1 s), before the clocks drop.
    # An H200 drew 126 W at 2 s after a load and 80 W only after its clocks had dropped
    # (docs/measuring.md).
    settled = [value for stamp, value in after if 2.0 <= stamp - load_end_s <= 3.0]
    floor = median(settled) if settled else after[-1][1]
    step = height - floor
    if step <= 0.1 * height:
        return None
    left = _crossing(after, floor + _HIGH * step)
    reached = _crossing(after, floor + _LOW * step)
    # Only the middle 80 % of the edge: its ends are where refresh steps and noise decide when a
    # level is first reached. Linear over the window, so the whole is 1 / 0.8 of it.
    return None if left is None or reached is None else (reached - left) / (_HIGH - _LOW)


def _crossing(falling: Sequence[Reading], level: float) -> float | None:
    return next((stamp for stamp, value in falling if value <= level), None)


def agreement_rel(counter_j: Sequence[Reading], power_w: Sequence[Reading]) -> float | None:
    """Integral of power over the counter's difference, minus 1, over the time both were read."""
    if len(counter_j) < 2 or len(power_w) < 2:
        return None
    start, end = max(counter_j[0][0], power_w[0][0]), min(counter_j[-1][0], power_w[-1][0])
    # counter and power are read at different times: both are interpolated at the ends of their common interval
    spent = _at(counter_j, end) - _at(counter_j, start) if end > start else 0.0
    if spent <= 0:
        return None
    inside = [(start, _at(power_w, start)), *(r for r in power_w if start < r[0] < end), (end, _at(power_w, end))]
    # Trapezoids; under a steady load the rule's own error is far below the 1 % that sensors differ
    # by.
    integral = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(inside))
    return integral / spent - 1


def _at(readings: Sequence[Reading], stamp: float) -> float:
    """Linear between two readings."""
    for (earlier, low), (later, high) in pairwise(readings):
        if earlier <= stamp <= later:
            return low + (high - low) * (stamp - earlier) / (later - earlier) if later > earlier else high
    return readings[0][1] if stamp < readings[0][0] else readings[-1][1]


def idle_states(rows: Sequence[tuple[float, float, float | None]]) -> tuple[IdleState, ...]:
    """Idle power by clock, from (seconds, watts, SM clock) of an idle card; states below a second are left out."""
    by_clock: dict[float | None, list[tuple[float, float]]] = {}
    for (stamp, watts, clock_mhz), (following, _, _) in pairwise(rows):
        # a reading counts until the next one, so that states are weighted by time
        state = None if clock_mhz is None else round(clock_mhz / _CLOCK_STEP_MHZ) * float(_CLOCK_STEP_MHZ)
        by_clock.setdefault(state, []).append((following - stamp, watts))
    found = [
        IdleState(
            sm_clock_MHz=clock,
            power_w=fmean(power for _, power in seen),
            spread_w=pstdev(power for _, power in seen),
            duration_s=sum(step for step, _ in seen),
        )
        for clock, seen in by_clock.items()
    ]
    return tuple(sorted((s for s in found if s.duration_s >= 1.0), key=lambda state: -state.power_w))


LOAD_MODULE = "joulelab.train.burn"
_GRACE_S = 60.0


@dataclass
class Load:
    """What the load reports about itself; `end_ns` is known after the block."""

    what: str
    begin_ns: int
    end_ns: int | None = None
    problems: list[str] = field(default_factory=list)


@contextlib.contextmanager
def burning(seconds: float, gpu_uuid: str | None = None) -> Iterator[Load]:
    """Run the load for about `seconds` from the start of the block, on the given card; leaving the block waits."""
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": gpu_uuid} if gpu_uuid else {})}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", LOAD_MODULE, str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        first = _line(process)
        if "load" not in first:
            _, errors = process.communicate(timeout=_GRACE_S)
            reason = errors.strip().splitlines()[-1] if errors.strip() else "it printed nothing"
            raise JoulelabError(
                f"the load did not start: {reason}",
                f"try it alone: {sys.executable} -m {LOAD_MODULE} 1",
            )
        load = Load(str(first["load"]), int(first["begin_ns"]))
        yield load
        out, errors = process.communicate(timeout=seconds + _GRACE_S)
        load.end_ns = _ended(out)
        if process.returncode != 0:
            load.problems.append(f"the load ended with {process.returncode}: {errors.strip()[-300:]}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    return _parsed(process.stdout.readline())


def _ended(output: str) -> int | None:
    ends = [fields["end_ns"] for text in output.splitlines() if "end_ns" in (fields := _parsed(text))]
    return int(ends[-1]) if ends else None


def _parsed(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


BURN_S = 6.0
REST_S = 12.0
RAPL_S = 0.5
# Longer than any averaging window known (1 s), with a level after it.
FALL_S = 4.0
_POLL_S = 0.002
_COUNTER_EVERY_S = 0.02
# The load's first second has a start-up overshoot; the counter's share of it is compared from then on.
_WARM_S = 1.0


@dataclass
class CardReadings:
    """Readings of one card by name (`instant`, `average`, `counter`); times in seconds on the monotonic clock."""

    series: dict[str, list[Reading]] = field(default_factory=dict)
    durations_s: dict[str, list[float]] = field(default_factory=dict)
    rest: list[tuple[float, float, float | None]] = field(default_factory=list)
    """(when, watts, SM clock) while nothing ran."""
    load: str | None = None
    begin_s: float = 0.0
    end_s: float = 0.0

    def take(self, what: str, call: Callable[[], float | None]) -> float | None:
        before = time.monotonic_ns()
        value = call()
        after = time.monotonic_ns()
        if value is not None:
            self.series.setdefault(what, []).append(((before + after) / 2 / NS, value))
            self.durations_s.setdefault(what, []).append((after - before) / NS)
        return value


def card_profile(device: Device, readings: CardReadings) -> DeviceProfile:
    """All figures of one card, from its readings alone."""
    loaded = {
        what: [reading for reading in series if readings.begin_s + _WARM_S <= reading[0] <= readings.end_s]
        for what, series in readings.series.items()
    }
    costs = {what: cost for what, durations in readings.durations_s.items() if (cost := call_cost(durations))}
    shape = loaded.get("instant") or loaded.get("average") or []
    return DeviceProfile(
        device=device.device,
        name=device.name,
        refresh_s={what: refresh_period_s(series) for what, series in loaded.items()},
        call_cost=costs,
        averaging_window_s={
            what: averaging_window_s(readings.series[what], readings.end_s)
            for what in ("instant", "average")
            if what in readings.series
        },
        agreement_rel=agreement_rel(loaded.get("counter", []), shape),
        idle=idle_states(readings.rest),
    )


def record_card(nvml: Any, uuid: str, burn_s: float = BURN_S, rest_s: float = REST_S) -> CardReadings:
    """At rest, under load, at rest again: about `burn_s` + 1.5 x `rest_s` seconds."""
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    readings = CardReadings()
    _rest(nvml, handle, readings, rest_s / 2)
    with burning(burn_s, uuid) as load:
        readings.load, readings.begin_s = load.what, load.begin_ns / NS
        _poll(nvml, handle, readings, readings.begin_s + burn_s)
        # the load ends by itself meanwhile, and its fall must be polled without a gap
        _poll(nvml, handle, readings, readings.begin_s + burn_s + FALL_S, counter=False)
    readings.end_s = (load.end_ns or time.monotonic_ns()) / NS
    _rest(nvml, handle, readings, rest_s)
    return readings


def _poll(nvml: Any, handle: Any, readings: CardReadings, until_s: float, counter: bool = True) -> None:
    due_s = 0.0
    while (now := time.monotonic()) < until_s:
        readings.take("average", lambda: _quietly(nvml, lambda: power_w(nvml, handle, "average")))
        readings.take("instant", lambda: _quietly(nvml, lambda: power_w(nvml, handle, "instant")))
        if counter and now >= due_s:
            due_s = now + _COUNTER_EVERY_S
            readings.take(
                "counter", lambda: _quietly(nvml, lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)
            )
        time.sleep(_POLL_S)


def _rest(nvml: Any, handle: Any, readings: CardReadings, seconds: float) -> None:
    end = time.monotonic() + seconds
    field = power_field(nvml, handle)
    while time.monotonic() < end:
        watts = _quietly(nvml, lambda: power_w(nvml, handle, field))
        clock = _quietly(nvml, lambda: float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)))
        if watts is not None:
            readings.rest.append((time.monotonic(), watts, clock))
        time.sleep(0.1)


def _quietly(nvml: Any, call: Callable[[], Any]) -> Any:
    """None if the card does not support the call."""
    try:
        return call()
    except nvml.NVMLError:
        return None


def calibrate_gpus(devices: list[Device], notes: list[str]) -> tuple[list[DeviceProfile], str | None]:
    """Every NVIDIA card, one after the other, and what the load was."""
    cards = [device for device in devices if device.device.startswith("gpu:GPU-")]
    if not cards:
        return [], None
    import pynvml

    pynvml.nvmlInit()
    profiles, load = [], None
    try:
        for device in cards:
            readings = record_card(pynvml, device.device.removeprefix("gpu:"))
            load = readings.load
            if not (load or "").startswith("torch"):
                notes.append(f"{device.name}: no torch with GPU support, so only idle readings were taken")
            profiles.append(card_profile(device, readings))
    finally:
        pynvml.nvmlShutdown()
    return profiles, load


def calibrate_rapl(config: EnergyConfig, notes: list[str], seconds: float = RAPL_S) -> list[DeviceProfile]:
    """Refresh and cost of the RAPL domains; one read takes them all, so they share its cost."""
    sensor = SENSORS.resolve("rapl")(config, os.getpid())
    try:
        devices: list[Device] = sensor.open()
    except SensorUnavailable as unavailable:
        notes.append(f"{unavailable.component}: {unavailable.reason}")
        return []
    series: dict[str, list[Reading]] = {}
    durations: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = time.monotonic_ns()
        lines = sensor.read()
        after = time.monotonic_ns()
        durations.append((after - before) / NS)
        for line in lines:
            for domain, joules in line.get("rapl", {}).items():
                series.setdefault(f"rapl:{domain}", []).append(((before + after) / 2 / NS, joules))
    sensor.close()
    cost = call_cost(durations)
    return [
        DeviceProfile(
            device=device.device,
            name=device.name,
            refresh_s={"counter": refresh_period_s(series.get(device.device, []))},
            call_cost={"counter": cost} if cost else {},
        )
        for device in devices
    ]


def fsync_cost(folder: Path, writes: int = 20) -> CallCost | None:
    """One line written and synced, where runs are kept: what a durable mark costs. None where it cannot be written."""
    line = b"x" * 200 + b"\n"
    durations = []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".joulelab-fsync-") as file:
            for _ in range(writes):
                before = time.perf_counter()
                os.write(file.fileno(), line)
                os.fsync(file.fileno())
                durations.append(time.perf_counter() - before)
    except OSError:
        return None
    return call_cost(durations)


def clock_cost(calls: int = 2000) -> CallCost | None:
    durations = []
    for _ in range(calls):
        before = time.perf_counter()
        time.monotonic_ns()
        durations.append(time.perf_counter() - before)
    return call_cost(durations)


def recorder_cpu_share(config: EnergyConfig, seconds: float = 3.0) -> float | None:
    """CPU time of a recorder at work over wall time, start-up left out; None where it cannot be seen."""
    with tempfile.TemporaryDirectory(prefix="joulelab-doctor-") as folder:
        meter = Meter(Path(folder) / "trace.jsonl", Path(folder) / "events.jsonl", config)
        meter.start()
        try:
            time.sleep(0.5)
            before = _recorder_seconds()
            started = time.monotonic()
            time.sleep(seconds)
            after, elapsed = _recorder_seconds(), time.monotonic() - started
        finally:
            meter.stop()
    return None if before is None or after is None else (after - before) / elapsed


def _recorder_seconds() -> float | None:
    children = psutil.Process().children(recursive=True)
    return next((cpu_seconds(child) for child in children if is_recorder(child)), None)
