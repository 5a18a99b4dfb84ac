"""What CodeCarbon's reading of a few milliseconds is worth, judged by the readings themselves.

Where it reads a counter that is refreshed every 100 ms, a short phase reads 0 J until a refresh happens to fall into
it, and then gets the joules of all phases since the last one. Where it has no counter it multiplies the duration by a
constant, which reads smoothly and says nothing that the duration did not.
"""

from __future__ import annotations

import math
from typing import Any

from joulelab.units import energy_text, percent_text

# Readings that keep this close to duration x constant carry nothing else.
CONSTANT_REL = 0.02


class Readings:
    """Of one phase; sums only, so a long training costs nothing more."""

    def __init__(self) -> None:
        self.count = 0
        self._zeros = 0
        self._gpu_zeros = 0
        self._duration_s = 0.0
        self._energy_j = 0.0
        self._gpu_j = 0.0
        self._energy_squared = 0.0
        self._power_w = 0.0
        self._power_squared = 0.0

    def add(self, duration_s: float, energy_j: float, gpu_j: float) -> None:
        power_w = energy_j / max(duration_s, 1e-9)
        self.count += 1
        self._zeros += energy_j == 0
        self._gpu_zeros += gpu_j == 0
        self._duration_s += duration_s
        self._energy_j += energy_j
        self._gpu_j += gpu_j
        self._energy_squared += energy_j**2
        self._power_w += power_w
        self._power_squared += power_w**2

    @property
    def zero_share(self) -> float:
        """Of the GPU's joules where it read a GPU at all: its constants for other parts are never 0."""
        return (self._gpu_zeros if self._gpu_j > 0 else self._zeros) / max(1, self.count)

    @property
    def spread(self) -> float:
        """Standard deviation over mean of the joules."""
        return _spread(self._energy_j, self._energy_squared, self.count)

    @property
    def is_duration_times_constant(self) -> bool:
        return self._gpu_j == 0 and _spread(self._power_w, self._power_squared, self.count) < CONSTANT_REL

    def text(self, phase: str) -> str:
        mean_ms = 1000 * self._duration_s / max(1, self.count)
        start = f"  {phase}: {self.count} readings of {mean_ms:.1f} ms, {energy_text(self._energy_j / self.count)} each"
        if self.is_duration_times_constant:
            return f"{start}: duration times a constant, so nothing that the duration does not say"
        if self.zero_share > 0:
            return f"{start}: {percent_text(self.zero_share, 0)} of them read 0 J, so a single one is worth nothing"
        return f"{start}: none read 0 J; they scatter by {percent_text(self.spread, 0)}"

    def values(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "mean_s": self._duration_s / max(1, self.count),
            "energy_j": self._energy_j,
            "zero_share": self.zero_share,
            "spread_rel": self.spread,
            "duration_times_constant": self.is_duration_times_constant,
        }


def _spread(total: float, squares: float, count: int) -> float:
    mean = total / max(1, count)
    variance = squares / max(1, count) - mean**2
    return math.sqrt(max(0.0, variance)) / mean if mean else 0.0
