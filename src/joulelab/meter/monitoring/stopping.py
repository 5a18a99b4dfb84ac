"""SIGINT, SIGTERM and SIGHUP as a wish to end, seen at once: the wait between ticks is a wait for the signal too."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType
from typing import Any


class StopSignals:
    """While entered, a signal sets `signum` and wakes `wait`. A repeated signal changes nothing: closing is short."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}
        self._reader, self._writer = -1, -1

    def __enter__(self) -> StopSignals:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer)
        wanted = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` has asked to outlive the terminal
            wanted.append(signal.SIGHUP)
        self._before = {signum: signal.signal(signum, self._receive) for signum in wanted}
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        os.close(self._reader)
        os.close(self._writer)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum

    def wait(self, timeout_s: float) -> str | None:
        """Sleep; the signal's name if one came."""
        if self.signum is None:
            select.select([self._reader], [], [], max(0.0, timeout_s))
        return None if self.signum is None else signal.Signals(self.signum).name
