"""Runs the measured program: unchanged streams, its own process group, signals forwarded, terminal lent, no orphans."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from joulelab.errors import EndedBySignal, JoulelabError, UsageError
from joulelab.meter.sensors import within
from joulelab.meter.sensors.processes import is_recorder
from joulelab.runs.context import StopRequest
from joulelab.runs.measure import process_guard

NOT_FOUND, NOT_EXECUTABLE = 127, 126


class CannotStart(UsageError):
    """The command cannot be started; exit codes are the shell's (127 not found, 126 not executable)."""

    def __init__(self, message: str, hint: str, exit_code: int) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


def find_program(word: str) -> str:
    """Path of the program, found as a shell would find it."""
    if not word:
        raise CannotStart("the command is empty", "pass the program after `--`", NOT_FOUND)
    if path_found := shutil.which(word):
        _require_interpreter(path_found, word)
        return path_found
    if "/" not in word:
        raise CannotStart(f"{word}: command not found", _not_found_hint(word), NOT_FOUND)
    path = Path(word)
    if not path.exists():
        hint = "check the path" if path.is_absolute() else "the path is relative to the current directory"
        raise CannotStart(f"{word}: no such file", hint, NOT_FOUND)
    if path.is_dir():
        raise CannotStart(f"{word} is a directory", "pass a program", NOT_EXECUTABLE)
    raise CannotStart(
        f"{word} is not executable", f"chmod +x {word}, or use its interpreter: python {word}", NOT_EXECUTABLE
    )


def _require_interpreter(path: str, word: str) -> None:
    """Refuse a script whose `#!` line names an interpreter that does not exist."""
    try:
        with Path(path).open("rb") as file:
            first_line = file.readline(256)
    except OSError:  # executable but not readable, as some binaries are
        return
    interpreter = first_line[2:].split()[:1] if first_line.startswith(b"#!") else []
    if interpreter and not Path(os.fsdecode(interpreter[0])).exists():
        name = os.fsdecode(interpreter[0])
        raise CannotStart(
            f"{word}: its interpreter {name} does not exist", "fix the first line of the script", NOT_FOUND
        )


def _not_found_hint(word: str) -> str:
    if Path(word).is_file():
        return f"a file of that name is in the current directory: ./{word}, or python {word}"
    if Path(word).is_dir():
        return "a folder of that name is in the current directory; name a program"
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    programs = {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}
    guess = difflib.get_close_matches(word, programs, n=1, cutoff=0.8)  # strict: a PATH has thousands of short names
    return f"did you mean '{guess[0]}'?" if guess else "no program of that name is on the PATH"


def default_name(command: Sequence[str]) -> str:
    """The script's name if an interpreter runs one, else the program's."""
    program = Path(command[0]).name
    script = next((Path(word).stem for word in command[1:] if word.endswith((".py", ".sh"))), None)
    if script and re.match(r"(python[\d.]*|bash|sh|torchrun)$", program):
        program = script
    return program[:80] or "program"


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
FORWARDED = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)


class SignalRelay:
    """Forwards signals to the program's process group.

    The first ending signal also requests the run to stop: no further repeat starts, and the status is `truncated`. No
    handler raises, so a second Ctrl-C while the record is being written does not lose it.
    """

    def __init__(self, stop: StopRequest, has_terminal: bool) -> None:
        self._stop = stop
        self._signals = (*FORWARDED, signal.SIGTSTP) if has_terminal else FORWARDED
        self.group: int | None = None
        self.received: list[int] = []

    def listen(self) -> None:
        for signum in self._signals:
            # ignored signals stay ignored and are inherited as such, as under nohup
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._receive)

    @property
    def requested_signum(self) -> int | None:
        return self._stop.signum

    def ignore_signals(self) -> None:
        """After the record is written: a late signal must not change the exit code."""
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
                # The whole group: a shell script's children would otherwise run on after the script
                # was stopped, and be measured by nothing.
                os.killpg(self.group, signum)


class Terminal:
    """The terminal, lent to the measured program while it runs, so that Ctrl-C, Ctrl-Z and input reach it.

    A program in its own process group is in the background until the group owns the terminal; reading would stop it.
    In a pipeline (`joulelab measure -- a | less`) other processes of our group need the terminal, so there it is lent
    only when the program tries to read.
    """

    def __init__(self) -> None:
        self._fd = _foreground_terminal()
        self.lent = False

    @property
    def present(self) -> bool:
        return self._fd is not None

    def lend_if_ours(self, group: int) -> None:
        """At the start, if no other process of a pipeline can need it."""
        if os.isatty(0) and os.isatty(1):
            self.lend(group)

    def lend(self, group: int) -> None:
        if self._fd is not None and os.tcgetpgrp(self._fd) == os.getpgrp():
            self._set_owner(group)
            self.lent = True

    def take_back(self) -> None:
        if self.lent:
            self._set_owner(os.getpgrp())
            self.lent = False

    def _set_owner(self, group: int) -> None:
        assert self._fd is not None
        # a background process that changes the owner of the terminal is stopped by SIGTTOU unless it is blocked
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            os.tcsetpgrp(self._fd, group)
        except OSError:  # the terminal is gone, as after a hang-up
            self._fd = None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _foreground_terminal() -> int | None:
    """The controlling terminal if this process is in its foreground; a background job has nothing to lend."""
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


PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
GRACE_S = 2.0
GUARD_LIMIT_S = 60.0  # it starts in 20 ms on an idle machine
SHELL_SIGNAL_CODES = 128


class ProgramFailed(JoulelabError):
    """The program failed; `measure` exits with the same code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class ProgramExit:
    """How a program ended: its exit code as in a shell, and the signal that killed it, if any."""

    exit_code: int
    signum: int | None

    def check(self, requested_signum: int | None) -> None:
        """Raise unless it succeeded; a program that was asked to end has not finished, whatever it returned."""
        if requested_signum is not None:
            ended = EndedBySignal(requested_signum)
            ended.exit_code = self.exit_code or ended.exit_code
            raise ended
        if self.signum in ENDING:
            raise EndedBySignal(self.signum or 0)
        if self.signum is not None:
            how = f"was killed by signal {signal_name(self.signum)} (exit code {self.exit_code})"
            raise ProgramFailed(f"the program {how}", self.exit_code)
        if self.exit_code:
            how = f"ended with exit code {self.exit_code}{describe_shell_exit_code(self.exit_code)}"
            raise ProgramFailed(f"the program {how}", self.exit_code)


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # real-time signals have no names
        return str(signum)


def describe_shell_exit_code(exit_code: int) -> str:
    """A shell reports a signal that killed its program as a code above 128; other programs may return such a code."""
    signum = exit_code - SHELL_SIGNAL_CODES
    if signum not in set(signal.Signals):
        return ""
    return f" ({signal_name(signum)}, as reported by the shell)"


def start_guard() -> subprocess.Popen[bytes]:
    """A new process group that ends when this process is killed; its number is the process id of the returned guard,
    which a byte on its standard input ends."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(process_guard.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # The guard is the group's leader: a group exists as long as it has a member, so its
        # number cannot be reused for another group between two repeats of the program.
        process_group=0,
    )
    assert guard.stdout is not None
    try:
        ready = within(GUARD_LIMIT_S, guard.stdout.readline)
    except TimeoutError:
        guard.kill()
        ready = b""
    if ready != process_guard.READY:
        raise JoulelabError("the guard of the program's process group did not start")
    guard.stdout.close()
    return guard


def kill_group(guard: subprocess.Popen[bytes]) -> None:
    """Kill what is left in the group of this guard, and the guard."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(guard.pid, signal.SIGKILL)
    assert guard.stdin is not None
    guard.stdin.close()
    guard.wait()


class ProcessGroup:
    """The program's process group, guarded while entered. Programs run in it one after the other."""

    def __init__(self, relay: SignalRelay, terminal: Terminal) -> None:
        self._relay = relay
        self._terminal = terminal
        self._own_children: set[int] = set()
        self.ended_well = 0
        """Number of programs that ended with exit code 0."""

    def __enter__(self) -> ProcessGroup:
        adopt_orphans()
        self._guard = start_guard()
        self._own_children = {child.pid for child in psutil.Process().children(recursive=True)}
        return self

    def __exit__(self, *_: object) -> None:
        self._terminal.take_back()
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._guard.communicate(b"x", timeout=GUARD_LIMIT_S)

    def run(self, executable: str, command: Sequence[str]) -> ProgramExit:
        """Start the program in the group, forward signals, and wait for its end."""
        self._relay.group = self._guard.pid
        received_before = len(self._relay.received)
        # A signal that arrived before `group` was set reached no program, and the stage's own check may be over: it
        # writes and syncs a mark after that. Without this the program would run to its end first.
        if self._relay.requested_signum is not None:
            self._relay.group = None
            raise EndedBySignal(self._relay.requested_signum)
        self._terminal.lend_if_ours(self._guard.pid)
        try:
            program = self._start(executable, command)
            for signum in self._relay.received[received_before:]:  # received before the program existed
                program.send_signal(signum)
            status = self._wait(program.pid)
            self._reap_adopted()
        finally:
            self._relay.group = None
            self._terminal.take_back()
        program.returncode = os.waitstatus_to_exitcode(status)  # otherwise Popen would wait for it again
        killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        self.ended_well += status == 0
        return ProgramExit(os.WEXITSTATUS(status) if killed_by is None else 128 + killed_by, killed_by)

    def _start(self, executable: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        try:
            return self._popen(executable, command)
        except OSError as error:
            if error.errno == errno.ENOEXEC:  # a script without `#!`: shells run it with sh
                return self._popen("/bin/sh", ["sh", executable, *command[1:]])
            # the file exists, so its interpreter is missing
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            raise CannotStart(
                f"{command[0]} cannot be started: {error.strerror}", "check the first line of the script", code
            ) from None

    def _popen(self, executable: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        # descriptors stay open: shells' `<(...)` and make's job server pass them to programs; ours close on exec
        return subprocess.Popen(command, executable=executable, process_group=self._guard.pid, close_fds=False)

    def _wait(self, pid: int) -> int:
        while True:
            # WUNTRACED also returns when the program is stopped: a stopped program must stop
            # `measure` too, or the shell would show a running job that does nothing.
            _, status = os.waitpid(pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                return status
            self._on_stop(os.WSTOPSIG(status))

    def _reap_adopted(self) -> None:
        """Reap adopted descendants that have ended: only then is their CPU time added to this process."""
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if child.pid not in self._own_children and child.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(child.pid, os.WNOHANG)

    def _on_stop(self, signum: int) -> None:
        """The program stopped because it needs the terminal, or because the user pressed Ctrl-Z."""
        if not self._terminal.present:
            return  # SIGSTOP by another process, which will also continue it
        if signum in (signal.SIGTTIN, signal.SIGTTOU):
            self._terminal.lend(self._guard.pid)
            if self._terminal.lent:
                self._relay.send(signal.SIGCONT)
                return
        was_lent = self._terminal.lent
        self._terminal.take_back()
        # SIGSTOP, because SIGTSTP is caught above; the shell's job control does not distinguish the
        # two.
        os.kill(os.getpid(), signal.SIGSTOP)  # the shell shows the job as stopped; `fg` continues here
        if was_lent:
            self._terminal.lend(self._guard.pid)
        self._relay.send(signal.SIGCONT)

    def left_over(self) -> list[psutil.Process]:
        """Processes that the program started and did not wait for."""
        processes = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                ours = child.pid in self._own_children or is_recorder(child)
                if not ours and child.status() != psutil.STATUS_ZOMBIE:
                    processes.append(child)
        return processes


def end_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()


def adopt_orphans() -> None:
    """On Linux: become the parent of orphaned descendants, so that CPU estimate and cleanup include them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
