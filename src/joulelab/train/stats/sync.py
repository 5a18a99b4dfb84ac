"""What synchronising costs: a tracker that waits for the device at every hook and measures nothing.

A GPU runs behind the program that feeds it. Whoever waits for it at every phase, to time it from the host, empties its
queue each time; on models that are bound by launches or by the loader that has cost 30 % and more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from joulelab.train.stats.hooks import Bench, TrainerStats


def waiter(device: torch.device) -> Callable[[], None]:
    """Call it to wait until the device has done all it was given; a CPU is never behind."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


class NoOpSyncStats(TrainerStats):
    """Waits for the device at the begin and the end of every phase."""

    def attach(self, bench: Bench) -> None:
        self._wait = waiter(bench.device)

    def start(self, phase: str) -> None:
        self._wait()

    def stop(self, phase: str) -> None:
        self._wait()
