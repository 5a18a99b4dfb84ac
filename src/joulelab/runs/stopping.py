"""Signals as a request: the first asks the run to save and end, a second ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from joulelab.errors import EndedBySignal

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """While entered, SIGTERM and SIGINT set a flag; whoever reaches a safe point calls `check()`."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._receive) for signum in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise EndedBySignal(signum)
        self.signum = signum

    def check(self) -> None:
        if self.signum is not None:
            raise EndedBySignal(self.signum)
