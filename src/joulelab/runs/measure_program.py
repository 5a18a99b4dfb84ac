"""One foreign program, run to its end: untouched streams, its own process group, signals passed on, no orphans."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from joulelab.errors import EndedBySignal, JoulelabError
from joulelab.meter.sensors.processes import is_recorder
from joulelab.runs import measure_guard
from joulelab.runs.measure_command import NOT_EXECUTABLE, NOT_FOUND, CannotStart
from joulelab.runs.measure_signals import ENDING, SignalRelay
from joulelab.runs.measure_terminal import Terminal

PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
GRACE_S = 2.0
SHELL_SIGNAL_CODES = 128


class ProgramFailed(JoulelabError):
    """The program ended badly by itself; `measure` ends with the same code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit code as a shell gives it, and the signal that killed it, if one did."""

    exit_code: int
    signum: int | None

    def check(self, asked_to_end: int | None) -> None:
        """Raise unless it ended well; a program that was told to end has not done its work, whatever it returned."""
        if asked_to_end is not None:
            ended = EndedBySignal(asked_to_end)
            ended.exit_code = self.exit_code or ended.exit_code
            raise ended
        if self.signum in ENDING:
            raise EndedBySignal(self.signum or 0)
        if self.signum is not None:
            how = f"was killed by signal {signal_name(self.signum)} (exit code {self.exit_code})"
            raise ProgramFailed(f"the program {how}", self.exit_code)
        if self.exit_code:
            how = f"ended with exit code {self.exit_code}{shell_s_meaning(self.exit_code)}"
            raise ProgramFailed(f"the program {how}", self.exit_code)


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # real-time signals have numbers only
        return str(signum)


def shell_s_meaning(exit_code: int) -> str:
    """A shell that outlives its program tells a signal by a code above 128; any program may return such a code."""
    signum = exit_code - SHELL_SIGNAL_CODES
    if signum not in set(signal.Signals):
        return ""
    return f", with which a shell says that {signal_name(signum)} killed its program"


class Guarded:
    """The program's process group, held and guarded while entered. Programs are run one after another in it."""

    def __init__(self, relay: SignalRelay, terminal: Terminal) -> None:
        self._relay = relay
        self._terminal = terminal
        self._strangers: set[int] = set()

    def __enter__(self) -> Guarded:
        adopt_orphans()
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(measure_guard.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        assert self._guard.stdout is not None
        if self._guard.stdout.readline() != measure_guard.READY:
            raise JoulelabError("the guard of the program's process group did not start")
        self._guard.stdout.close()
        self._strangers = {child.pid for child in psutil.Process().children(recursive=True)}
        return self

    def __exit__(self, *_: object) -> None:
        self._terminal.take_back()
        with contextlib.suppress(BrokenPipeError):
            self._guard.communicate(b"x")

    def run(self, executable: str, command: Sequence[str]) -> Ended:
        """Start the program in our group and wait for its end, passing on what is meant for it meanwhile."""
        self._relay.group = self._guard.pid
        early = len(self._relay.received)
        self._terminal.lend_if_ours(self._guard.pid)
        try:
            program = self._start(executable, command)
            for signum in self._relay.received[early:]:  # came while there was nobody to get it yet
                program.send_signal(signum)
            status = self._wait(program.pid)
            self._bury()
        finally:
            self._relay.group = None
            self._terminal.take_back()
        program.returncode = os.waitstatus_to_exitcode(status)  # or Popen would wait for it again
        killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        return Ended(os.WEXITSTATUS(status) if killed_by is None else 128 + killed_by, killed_by)

    def _start(self, executable: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        try:
            return self._popen(executable, command)
        except OSError as error:
            if error.errno == errno.ENOEXEC:  # a script without a first line: shells hand it to sh
                return self._popen("/bin/sh", ["sh", executable, *command[1:]])
            # the file is there (it was found), so it is its interpreter that is not
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            raise CannotStart(
                f"{command[0]} cannot be started: {error.strerror}", "look at the script's first line", code
            ) from None

    def _popen(self, executable: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        # descriptors stay open: `<(...)` of shells and make's job server hand them to programs; ours are closed on exec
        return subprocess.Popen(command, executable=executable, process_group=self._guard.pid, close_fds=False)

    def _wait(self, pid: int) -> int:
        while True:
            _, status = os.waitpid(pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                return status
            self._on_stop(os.WSTOPSIG(status))

    def _bury(self) -> None:
        """Wait for adopted descendants that have ended: only then does their CPU time stand on our account."""
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if child.pid not in self._strangers and child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)

    def _on_stop(self, signum: int) -> None:
        """The program stopped: because it wants the terminal, or because a person pressed Ctrl-Z."""
        if not self._terminal.present:
            return  # somebody else's SIGSTOP; whoever sent it will continue it
        if signum in (signal.SIGTTIN, signal.SIGTTOU):
            self._terminal.lend(self._guard.pid)
            if self._terminal.lent:
                self._relay.send(signal.SIGCONT)
                return
        was_lent = self._terminal.lent
        self._terminal.take_back()
        os.kill(os.getpid(), signal.SIGSTOP)  # the shell now shows the job as stopped; `fg` goes on below
        if was_lent:
            self._terminal.lend(self._guard.pid)
        self._relay.send(signal.SIGCONT)

    def left_over(self) -> list[psutil.Process]:
        """What the program started and did not wait for."""
        found = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                ours = child.pid in self._strangers or is_recorder(child)
                if not ours and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return found


def end_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()


def adopt_orphans() -> None:
    """Descendants whose parent ends become our children (Linux): the CPU estimate and the clean-up still see them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
