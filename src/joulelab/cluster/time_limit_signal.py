"""The scheduler's word that a job's time is nearly over, kept until somebody can act on it."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class TimeLimitSignal:
    """Listens from its making on; a warning that comes while modules are still being imported is not lost."""

    def __init__(self) -> None:
        self.received = False
        for signum in SIGNALS:
            signal.signal(signum, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received = True
