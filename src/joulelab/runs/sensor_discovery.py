"""Which sensors work on this machine, checked before a run starts."""

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
from joulelab.meter.session import fallback_sensors_for, sensors_for
from joulelab.runs.record import MEASURED_COMPONENTS


@dataclass(frozen=True)
class DiscoveredSensors:
    """Devices that can be read, and components that cannot, with reason and fix."""

    devices: tuple[Device, ...]
    missing: tuple[SensorUnavailable, ...]

    @property
    def measured(self) -> tuple[Device, ...]:
        return tuple(d for d in self.devices if d.counted and d.component in MEASURED_COMPONENTS)

    @property
    def estimate(self) -> Device | None:
        return next((device for device in self.devices if device.component == "cpu_estimate"), None)


def discover_sensors(config: EnergyConfig) -> DiscoveredSensors:
    """Open every sensor that the settings select, and close it again."""
    readers, fallback = (
        [SensorReader(name, partial(lookup.SENSORS.resolve(name), config, os.getpid())) for name in names]
        for names in (sensors_for(config), fallback_sensors_for(config))
    )
    opened, devices, missing = open_sensors(readers, fallback)
    for reader in opened:
        reader.close()
    return DiscoveredSensors(tuple(devices), tuple(missing))


def require_rapl_root(root: str) -> None:
    """The default path may be absent, as on most virtual machines; one that the user set must exist."""
    if root != EnergyConfig().rapl_root and not Path(root).is_dir():
        raise UsageError(
            f"energy.rapl_root (--rapl-root): expected a directory with a RAPL tree, found no directory at {root}",
            f"omit it to read the kernel's own tree, {EnergyConfig().rapl_root}",
        )


def demand_sensors(config: EnergyConfig) -> None:
    """Refuse a run (exit code 3) if a named GPU cannot be read, or if measured energy is required but unavailable."""
    require_rapl_root(config.rapl_root)
    if config.require == "measured" and config.total_energy_policy == "machine":
        raise UsageError(
            "--scope machine (energy.total_energy_policy=machine) is an estimate; --require measured refuses estimates",
            "leave one of them out",
        )
    gpus_named = config.gpus not in ("auto", "none")
    if config.require != "measured" and not gpus_named:
        return
    sensors = discover_sensors(config)
    if gpus_named and not any(device.component == "gpu" for device in sensors.devices):
        reason = next((absent.reason for absent in sensors.missing if absent.component == "gpu"), "no such GPU")
        raise SensorMissing(
            f"the requested GPUs '{config.gpus}' cannot be read: {reason}; nothing was started",
            "`joulelab doctor` lists the GPUs of this machine; `auto` selects those of the job",
        )
    if config.require != "measured" or sensors.measured:
        return
    reasons = "; ".join(f"{absent.component}: {absent.reason}" for absent in sensors.missing)
    fixes = "; ".join(absent.fix for absent in sensors.missing if absent.fix)
    raise SensorMissing(
        f"measured energy is required but no sensor works on this machine ({reasons}); nothing was started",
        fixes or "run `joulelab doctor` for details",
    )


def sensors_line(estimate_cpu: bool) -> str:
    """The same in one sentence."""
    sensors = discover_sensors(EnergyConfig(estimate_cpu=estimate_cpu))
    if sensors.measured:
        return f"Measured: {', '.join(dict.fromkeys(device.name for device in sensors.measured))}."
    if sensors.estimate is None:
        return "No energy sensor works on this machine: see `joulelab doctor`."
    return "Energy is estimated from CPU time: no energy sensor works on this machine (see `joulelab doctor`)."


def discovery_text(estimate_cpu: bool) -> str:
    """Which components are measured, which are estimated by which model, and why the rest is missing."""
    sensors = discover_sensors(EnergyConfig(estimate_cpu=estimate_cpu))
    lines = [f"  {absent.component:<4} not measured: {absent.reason}" for absent in sensors.missing]
    lines += [f"  {device.component:<4} measured: {device.name} ({device.device})" for device in sensors.measured]
    if sensors.measured:
        return "\n".join(["Energy sensors of this run:", *lines])
    estimate = sensors.estimate
    if estimate is None:
        return "\n".join(["No energy sensor works on this machine:", *lines])
    watts, source = estimate.facts["w_per_thread"], estimate.facts["source"]
    return "\n".join(
        [
            "Energy below is ESTIMATED, not measured: no energy sensor works on this machine.",
            *lines,
            f"  Model: CPU time of the run x {watts:.1f} W per hardware thread ({estimate.name}: {source}).",
            f"  Scale uncertain by ±{100 * (estimate.gain_error_rel or 0):.0f} %. The factor is the same for all runs",
            "  on this machine, so ratios between runs are much more precise than absolute values, unless other",
            "  processes use the same cores; the record reports such CPU contention.",
        ]
    )
