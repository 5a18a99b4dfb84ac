"""Signals that reach `joulelab measure` are meant for the program: passed on to its group, never acted on by us.

The first ending signal also asks the run to stop: no further repeat starts, and the record says `truncated`. No signal
raises here, so a second Ctrl-C while the record is being written does not lose it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

from joulelab.runs.stopping import StopRequest

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)


class SignalRelay:
    def __init__(self, stop: StopRequest, has_terminal: bool) -> None:
        self._stop = stop
        self._signals = (*PASSED_ON, signal.SIGTSTP) if has_terminal else PASSED_ON
        self.group: int | None = None
        self.received: list[int] = []

    def listen(self) -> None:
        for signum in self._signals:
            # what is ignored stays ignored and is inherited so, as under nohup
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._receive)

    def deafen(self) -> None:
        """The record is written and only the exit is left: a late signal must not change its code."""
        for signum in ENDING:
            signal.signal(signum, signal.SIG_IGN)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)
        if signum in ENDING and self._stop.signum is None:
            self._stop.signum = signum
        self.send(signum)

    def send(self, signum: int) -> None:
        if self.group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, signum)
