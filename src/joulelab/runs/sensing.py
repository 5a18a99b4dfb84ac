"""What this machine can measure, said before a run starts rather than discovered after it."""

from __future__ import annotations

import os

from joulelab import lookup
from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import Device, SensorUnavailable
from joulelab.meter.session import sensors_for


def sensing_text(estimate_cpu: bool) -> str:
    """Which joules will be measured, which estimated by what model, and why the rest is missing."""
    config = EnergyConfig(estimate_cpu=estimate_cpu)
    lines = []
    measured = False
    for name in sensors_for(config):
        sensor = lookup.SENSORS.resolve(name)(config, os.getpid())
        try:
            devices: list[Device] = sensor.open()
        except SensorUnavailable as gone:
            lines.append(f"  {gone.component:<4} not measured: {gone.reason}")
            continue
        sensor.close()
        for device in devices:
            if device.component == "cpu_estimate":
                estimate = device
            elif device.counted:
                measured = True
                lines.append(f"  {device.component:<4} measured: {device.name} ({device.device})")
    if measured:
        return "\n".join(["Joules of this run are measured by:", *lines])
    if not estimate_cpu:
        return "\n".join(["No joules can be measured here:", *lines])
    watts, source = estimate.facts["w_per_thread"], estimate.facts["source"]
    return "\n".join(
        [
            "The joules below are ESTIMATED, not measured: this machine shows no energy sensor.",
            *lines,
            f"  Model: CPU time of the run x {watts:.1f} W per hardware thread ({estimate.name}: {source}).",
            f"  Uncertain by ±{100 * (estimate.gain_error_rel or 0):.0f} % in scale; that factor is the same for all",
            "  runs on this machine, so ratios between them are far better known than the joules themselves.",
        ]
    )
