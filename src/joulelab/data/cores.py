"""How many cores there are for us."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """That this process may use, which under Slurm are fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
