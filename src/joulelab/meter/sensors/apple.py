"""Apple silicon: the chip's own energy channels (IOReport), read without root by the package zeus-apple-silicon.

CPU, GPU and memory are components; the neural engine is listed and not counted, because there is no component for it.
The channels count the energy of the whole machine. Tested with a fake module only.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import Device, Line, SensorUnavailable

MJ = 1e-3
# Apple documents no accuracy for these channels, which are partly modeled.
GAIN_ERROR_REL = 0.2
CHANNELS = {"cpu": "cpu_total_mj", "gpu": "gpu_mj", "dram": "dram_mj", "ane": "ane_mj"}


def present() -> bool:
    """Whether this is a Mac."""
    return sys.platform == "darwin"


class AppleSensor:
    def __init__(self, config: EnergyConfig, pid: int, monitor: Any = None) -> None:
        self.interval_s = config.sample_interval_s
        self._monitor = monitor

    def open(self) -> list[Device]:
        self._monitor = self._monitor or _monitor()
        return [
            Device(
                device=f"apple:{channel}",
                component=channel,
                name=f"Apple silicon {channel}",
                counted=channel != "ane",
                refresh_s=0.1,
                gain_error_rel=GAIN_ERROR_REL,
                facts={"node_wide": True, "reason": "energy of the chip, all programs included"},
            )
            for channel in self._joules()
        ]

    def read(self) -> list[Line]:
        counters = {f"apple:{channel}": joules for channel, joules in self._joules().items()}
        return [{"kind": "counters", "device": "host", "counters_j": counters}]

    def _joules(self) -> dict[str, float]:
        """Chips differ in which channels they have; one they lack reads None."""
        metrics = self._monitor.get_cumulative_energy()
        values = {channel: getattr(metrics, name, None) for channel, name in CHANNELS.items()}
        return {channel: value * MJ for channel, value in values.items() if value is not None}

    def close(self) -> None:
        self._monitor = None


def _monitor() -> Any:
    try:
        zeus_apple_silicon = importlib.import_module("zeus_apple_silicon")
    except ImportError:
        raise SensorUnavailable(
            "cpu",
            "the package zeus-apple-silicon is missing",
            "on a Mac with Apple silicon: pip install zeus-apple-silicon",
        ) from None
    try:
        return zeus_apple_silicon.AppleEnergyMonitor()
    except RuntimeError as error:
        raise SensorUnavailable("cpu", f"the chip's energy channels cannot be read ({error})", "") from None
