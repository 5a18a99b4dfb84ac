"""Signals as a request: the first asks the run to save and end, another a second later ends it at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from joulelab.errors import EndedBySignal, JoulelabError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A scheduler announces the time limit by the one or the other.
JOB_SIGNALS = (*SIGNALS, signal.SIGUSR1)
# A scheduler signals every process of a job, and a launcher passes on what it got: the same request, twice.
ECHO_S = 1.0


class StopRequest:
    """While entered, these signals set a flag; whoever reaches a safe point calls `check()`."""

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self.signum: int | None = None
        self._signals = signals
        self._asked_s = 0.0
        self._settling = False
        self._refusal: JoulelabError | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._receive) for signum in self._signals}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.signum is None:
            self.signum, self._asked_s = signum, now_s
        elif not self._settling and now_s - self._asked_s > ECHO_S:
            raise EndedBySignal(signum)

    def settle(self) -> None:
        """The work is over and its record is being written: a launcher that signals twice must not spoil that."""
        self._settling = True

    def refuse(self, error: JoulelabError) -> None:
        """End the work at its next safe point with an error of ours."""
        self._refusal = error

    def check(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        if self.signum is not None:
            raise EndedBySignal(self.signum)
