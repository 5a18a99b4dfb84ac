"""The terminal, lent to the measured program while it runs, so that Ctrl-C, Ctrl-Z and typing reach it.

A program in a process group of its own is in the background until the terminal is handed to that group; reading would
stop it. In a pipeline (`joulelab measure -- a | less`) others of our group need the terminal, so there it is lent only
when the program asks by trying to read.
"""

from __future__ import annotations

import os
import signal


class Terminal:
    def __init__(self) -> None:
        self._fd = _foreground_terminal()
        self.lent = False

    @property
    def present(self) -> bool:
        return self._fd is not None

    def lend_if_ours(self, group: int) -> None:
        """At the start: when nobody else in a pipeline with us can want it."""
        if os.isatty(0) and os.isatty(1):
            self.lend(group)

    def lend(self, group: int) -> None:
        if self._fd is not None and os.tcgetpgrp(self._fd) == os.getpgrp():
            self._hand_to(group)
            self.lent = True

    def take_back(self) -> None:
        if self.lent:
            self._hand_to(os.getpgrp())
            self.lent = False

    def _hand_to(self, group: int) -> None:
        assert self._fd is not None
        # whoever is in the background and changes the terminal's owner is stopped by SIGTTOU unless it is blocked
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            os.tcsetpgrp(self._fd, group)
        except OSError:  # the terminal is gone, as after a hang-up: nobody can type any more
            self._fd = None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _foreground_terminal() -> int | None:
    """The controlling terminal if we are in its foreground; a job in the background has nothing to lend."""
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.tcgetpgrp(terminal) == os.getpgrp():
            return terminal
    except OSError:
        pass
    os.close(terminal)
    return None
