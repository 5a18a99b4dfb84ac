"""The host's own vital signs: CPU and memory use. No joules; its lines are also the recorder's heartbeat."""

from __future__ import annotations

import psutil

from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import Device, Line
from joulelab.units import BYTES_PER_MB


class HostSensor:
    def __init__(self, config: EnergyConfig, pid: int) -> None:
        self.interval_s = config.sample_interval_s

    def open(self) -> list[Device]:
        psutil.cpu_percent(None)  # the first call only sets the start of the next interval
        return []

    def read(self) -> list[Line]:
        memory = psutil.virtual_memory()
        return [
            {
                "kind": "host",
                "device": "host",
                "cpu_utilization_percent": psutil.cpu_percent(None),
                "host_memory_used_MB": round((memory.total - memory.available) / BYTES_PER_MB, 1),
            }
        ]

    def close(self) -> None:
        pass
