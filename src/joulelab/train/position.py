"""Where training stands: the next micro-batch to draw, and what was done so far, over all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Position:
    drawn: int = 0
    """Micro-batches drawn by all ranks together; the next one follows from it alone."""
    step: int = 0
    """Optimiser steps."""
    samples: int = 0
    tokens: int = 0

    def after_step(self, samples: int, tokens: int) -> Position:
        return replace(self, step=self.step + 1, samples=self.samples + samples, tokens=self.tokens + tokens)
