"""Who used the cores while something was measured, and from when on that spoils times and CPU estimates."""

from __future__ import annotations

from collections.abc import Sequence

from joulelab.meter.figures import Frozen

# Others' tenth of the cores does no harm while there is room beside the program; without room it is time taken from it.
CROWD_SHARE = 0.10
ROOM_SHARE = 0.25


class CoreUse(Frozen):
    """Mean over some time, in hardware threads that the program was allowed to use."""

    cores: int
    others_cores: float
    """Used by other programs, or by other virtual machines of the same hardware."""
    idle_cores: float

    @property
    def crowded(self) -> bool:
        return self.others_cores >= CROWD_SHARE * self.cores and self.idle_cores <= ROOM_SHARE * self.cores

    @property
    def words(self) -> str:
        return f"others used {self.others_cores:.2g} of {self.cores} CPU core{'s' if self.cores > 1 else ''}"


def mean_use(readings: Sequence[CoreUse]) -> CoreUse | None:
    if not readings:
        return None
    others = sum(reading.others_cores for reading in readings) / len(readings)
    idle = sum(reading.idle_cores for reading in readings) / len(readings)
    return CoreUse(cores=readings[-1].cores, others_cores=others, idle_cores=idle)


def most_crowded(uses: Sequence[CoreUse | None]) -> CoreUse | None:
    """Of several hosts or attempts: one that was crowded spoils what all of them did together."""
    known = [use for use in uses if use is not None]
    return max(known, key=lambda use: (use.crowded, use.others_cores / use.cores), default=None)
