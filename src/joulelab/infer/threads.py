"""How many threads of the CPU an inference gets where nobody says so."""

from __future__ import annotations

import os

from joulelab.meter.sensors.cpu import usable_cores

WISH = "OMP_NUM_THREADS"


def threads_without_a_wish() -> int:
    """What the variable that all of OpenMP obeys says, for its outermost level; else every core we may use."""
    said = os.environ.get(WISH, "").split(",")[0].strip()
    return min(int(said), usable_cores()) if said.isdecimal() and int(said) > 0 else usable_cores()
