"""The learning rate as a function of the fraction of the budget that is spent, in optimiser steps."""

from __future__ import annotations


def linear_with_warmup(fraction: float, warmup_share: float) -> float:
    """Factor on the peak rate: up to 1 over the warm-up, then linearly down to 0 at the end of the budget."""
    if fraction < warmup_share:
        return fraction / warmup_share
    return max(0.0, (1 - fraction) / (1 - warmup_share))
