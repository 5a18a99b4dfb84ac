"""The learning rate as a function of the fraction of the budget that is spent.

A fraction, not a step number: a budget of joules or minutes has no last step that anyone knows in advance.
"""

from __future__ import annotations

import math


def rate_factor(schedule: str, fraction: float, warmup_share: float) -> float:
    """Factor on the peak rate: up to 1 over the warm-up, then as the schedule says until the budget is spent."""
    if fraction < warmup_share:
        return fraction / warmup_share
    rest = min(1.0, (fraction - warmup_share) / (1 - warmup_share))
    if schedule == "linear":
        return 1 - rest
    return 1.0 if schedule == "constant" else 0.5 * (1 + math.cos(math.pi * rest))
