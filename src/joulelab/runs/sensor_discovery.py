"""What this machine can measure, said before a run starts rather than discovered after it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from joulelab import lookup
from joulelab.errors import SensorMissing, UsageError
from joulelab.meter.config import EnergyConfig
from joulelab.meter.sampling import SensorReader, open_sensors
from joulelab.meter.sensors import Device, SensorUnavailable
from joulelab.meter.session import sensors_for
from joulelab.runs.record import MEASURED_COMPONENTS


@dataclass(frozen=True)
class DiscoveredSensors:
    """The devices that answer, and the components nobody can read, with reason and fix."""

    devices: tuple[Device, ...]
    missing: tuple[SensorUnavailable, ...]

    @property
    def measured(self) -> tuple[Device, ...]:
        return tuple(d for d in self.devices if d.counted and d.component in MEASURED_COMPONENTS)

    @property
    def estimate(self) -> Device | None:
        return next((device for device in self.devices if device.component == "cpu_estimate"), None)


def discover_sensors(config: EnergyConfig) -> DiscoveredSensors:
    """Open every sensor the settings ask for, once, and close it again."""
    pid = os.getpid()
    readers = [SensorReader(name, partial(lookup.SENSORS.resolve(name), config, pid)) for name in sensors_for(config)]
    opened, devices, missing = open_sensors(readers)
    for reader in opened:
        reader.close()
    return DiscoveredSensors(tuple(devices), tuple(missing))


def require_rapl_root(root: str) -> None:
    """The kernel's own tree may be absent, as on most virtual machines; one that somebody named must exist."""
    if root != EnergyConfig().rapl_root and not Path(root).is_dir():
        raise UsageError(
            f"energy.rapl_root (--rapl-root): expected a folder with a RAPL tree, found no folder at {root}",
            f"leave it out to read the kernel's own tree, {EnergyConfig().rapl_root}",
        )


def demand_sensors(config: EnergyConfig) -> None:
    """Before a run: exit code 3 where a GPU was named that cannot be read, or joules are required and none can be."""
    require_rapl_root(config.rapl_root)
    named = config.gpus not in ("auto", "none")
    if config.require != "measured" and not named:
        return
    sensed = discover_sensors(config)
    if named and not any(device.component == "gpu" for device in sensed.devices):
        why = next((gone.reason for gone in sensed.missing if gone.component == "gpu"), "no such GPU")
        raise SensorMissing(
            f"the GPUs '{config.gpus}' were asked for and cannot be read: {why}; nothing was started",
            "`joulelab doctor` lists the GPUs of this machine; auto takes those of the job",
        )
    if config.require != "measured":
        return
    if sensed.measured:
        return
    reasons = "; ".join(f"{gone.component}: {gone.reason}" for gone in sensed.missing)
    fixes = "; ".join(gone.fix for gone in sensed.missing if gone.fix)
    raise SensorMissing(
        f"measured joules are required, and no sensor can measure here ({reasons}); nothing was started",
        fixes or "`joulelab doctor` says more",
    )


def discovery_text(estimate_cpu: bool) -> str:
    """Which joules will be measured, which estimated by what model, and why the rest is missing."""
    sensed = discover_sensors(EnergyConfig(estimate_cpu=estimate_cpu))
    lines = [f"  {gone.component:<4} not measured: {gone.reason}" for gone in sensed.missing]
    lines += [f"  {device.component:<4} measured: {device.name} ({device.device})" for device in sensed.measured]
    if sensed.measured:
        return "\n".join(["Joules of this run are measured by:", *lines])
    estimate = sensed.estimate
    if estimate is None:
        return "\n".join(["No joules can be measured here:", *lines])
    watts, source = estimate.facts["w_per_thread"], estimate.facts["source"]
    return "\n".join(
        [
            "The joules below are ESTIMATED, not measured: this machine shows no energy sensor.",
            *lines,
            f"  Model: CPU time of the run x {watts:.1f} W per hardware thread ({estimate.name}: {source}).",
            f"  Uncertain by ±{100 * (estimate.gain_error_rel or 0):.0f} % in scale; that factor is the same for all",
            "  runs on this machine, so ratios between them are far better known than the joules themselves,",
            "  provided that nothing else keeps its cores busy meanwhile; where others do, the record says so.",
        ]
    )
