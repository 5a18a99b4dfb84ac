"""Recording the series that a machine profile is made of: NVML cards under a load and at rest, RAPL as it is found.

The readings are taken here, in this process, faster than any sensor refreshes; `calibrate.py` turns them into figures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from joulelab.clock import NS
from joulelab.lookup import SENSORS
from joulelab.meter.calibrate import (
    Reading,
    agreement_rel,
    averaging_window_s,
    call_cost,
    idle_states,
    refresh_period_s,
)
from joulelab.meter.config import EnergyConfig
from joulelab.meter.load import burning
from joulelab.meter.profile import DeviceProfile
from joulelab.meter.sensors import Device, SensorUnavailable
from joulelab.meter.sensors.nvml_card import power_field, power_w

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
    """What one card said, by what was asked; times in seconds on the monotonic clock."""

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
        # the load ends by itself meanwhile: its fall must be polled without a hole
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
    """A card that lacks something says so with an error; that is an answer, too."""
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
                notes.append(f"{device.name}: no torch with a GPU, so it was read at rest only")
            profiles.append(card_profile(device, readings))
    finally:
        pynvml.nvmlShutdown()
    return profiles, load


def calibrate_rapl(config: EnergyConfig, notes: list[str], seconds: float = RAPL_S) -> list[DeviceProfile]:
    """Refresh and cost of the RAPL domains; one read takes them all, so they share its cost."""
    sensor = SENSORS.resolve("rapl")(config, os.getpid())
    try:
        devices: list[Device] = sensor.open()
    except SensorUnavailable as gone:
        notes.append(f"{gone.component}: {gone.reason}")
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
