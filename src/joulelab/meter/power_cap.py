"""A power cap on the job's GPUs, only where asked for and permitted, and taken back afterwards.

A cap changes what is measured, so it is never a default: `energy.power_cap_w` asks for it, the driver may refuse (it
usually wants root), and the cap that was in force is in every trace's header either way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from joulelab.errors import ConfigError, SensorMissing
from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors.gpu_selection import select_gpus
from joulelab.meter.sensors.nvml import permitted_cards


@contextmanager
def power_cap(config: EnergyConfig, nvml: Any = None) -> Iterator[None]:
    """Inside, the job's GPUs have the cap; what they had before comes back at the end, also after an error."""
    if config.power_cap_w is None:
        yield
        return
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise SensorMissing(f"energy.power_cap_w: NVML does not answer ({error})", "leave the cap out") from None
    before: list[tuple[Any, int]] = []
    try:
        for handle in _job_handles(nvml, config):
            limit_mw = nvml.nvmlDeviceGetPowerManagementLimit(handle)
            _set(nvml, handle, round(1000 * config.power_cap_w))
            before.append((handle, limit_mw))
        yield
    finally:
        for handle, limit_mw in before:
            with suppress(nvml.NVMLError):  # a card that was lost keeps what it has
                nvml.nvmlDeviceSetPowerManagementLimit(handle, limit_mw)
        nvml.nvmlShutdown()


def _job_handles(nvml: Any, config: EnergyConfig) -> list[Any]:
    handles = permitted_cards(nvml)
    chosen = select_gpus(list(handles), config.gpus, os.environ).cards
    if not chosen:
        raise SensorMissing("energy.power_cap_w: no GPU was given to this job", "leave the cap out, or see energy.gpus")
    return [handles[card] for card in chosen]


def _set(nvml: Any, handle: Any, cap_mw: int) -> None:
    low_mw, high_mw = nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    if not low_mw <= cap_mw <= high_mw:
        raise ConfigError(
            f"energy.power_cap_w: {cap_mw / 1000:g} W is outside what the card takes",
            f"give {low_mw / 1000:g} to {high_mw / 1000:g} W",
        )
    try:
        nvml.nvmlDeviceSetPowerManagementLimit(handle, cap_mw)
    except nvml.NVMLError as error:
        raise ConfigError(
            f"energy.power_cap_w: the driver refuses to set the cap ({error})",
            f"run `sudo nvidia-smi -pl {cap_mw // 1000}` yourself, or ask whoever runs the node",
        ) from None
