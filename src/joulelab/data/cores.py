"""How many CPU cores this process may use."""

from __future__ import annotations

import os

from joulelab.meter.sensors.cpu import allowed_cores


def usable_cores() -> int:
    """CPU cores available to this process (respects affinity, for example under Slurm)."""
    return len(allowed_cores(os.getpid()))
