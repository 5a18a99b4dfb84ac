"""Where a job's nodes can be reached, and which GPUs it has on this one."""

from __future__ import annotations

import os
import re
import socket

from joulelab.cluster import slurm
from joulelab.errors import JoulelabError
from joulelab.meter.sensors import SensorUnavailable


def node_address() -> str:
    """This node's address as Slurm itself uses it: its name need not resolve, and may mean another network."""
    name = os.environ.get("SLURMD_NODENAME")
    if name:
        try:
            told = slurm.tool("scontrol", "--oneliner", "show", "node", name)
        except JoulelabError:
            return name
        found = re.search(r"\bNodeAddr=(\S+)", told.stdout)
        return found.group(1) if found else name
    return socket.gethostname()


def free_port() -> int:
    """One that nobody listens on now, on the node that asks."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def gpus_text() -> str:
    """Which cards the job was given, by UUID and by whose word: the log says what is measured."""
    from joulelab.meter.config import EnergyConfig
    from joulelab.meter.sensors.nvml import NvmlSensor

    sensor = NvmlSensor(EnergyConfig(), os.getpid())
    try:
        devices = sensor.open()
    except SensorUnavailable as missing:
        return f"no GPU: {missing.reason}"
    except Exception as error:  # a driver that fails here is told by the recorder too, and ends nothing
        return f"no GPU: {type(error).__name__}: {error}"
    sensor.close()
    return ", ".join(f"{device.name} {device.device.removeprefix('gpu:')}" for device in devices)
