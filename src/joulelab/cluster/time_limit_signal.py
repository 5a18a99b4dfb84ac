"""Remembers the scheduler's signal that the time limit of a job is near."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class TimeLimitSignal:
    """Handles the signal from construction on, so that one that arrives during imports is not lost."""

    def __init__(self) -> None:
        self.received = False
        for signum in SIGNALS:
            signal.signal(signum, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received = True
