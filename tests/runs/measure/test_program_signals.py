"""Signals, kills and the terminal: the program gets what is meant for it, and the record is never lost."""

import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from programs import SLEEPER, is_gone, measure_words, only_folder, record, stages, started, wait_for

from joulelab.errors import EndedBySignal
from joulelab.runs.context import StopRequest
from joulelab.runs.measure.program import ProcessGroup, SignalRelay, Terminal


@pytest.fixture
def store(tmp_path):
    return tmp_path / "runs"


SAYS_WHAT_IT_GETS = textwrap.dedent(
    """
    import os, pathlib, signal, sys, time
    got = []
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, lambda number, frame: got.append(number))
    pathlib.Path(os.environ["SIGN"]).write_text(str(os.getpid()))
    while len(got) < 3:
        time.sleep(0.01)
    sys.exit(40 + len(got))
    """
)


def test_sigterm_reaches_the_program_and_leaves_a_truncated_record(store):
    measuring, pid = started(store, "--repeat", "3", "--", sys.executable, "-c", SLEEPER)
    measuring.terminate()
    _, reported = measuring.communicate(timeout=20)
    assert measuring.returncode == 143, reported
    assert is_gone(pid)
    assert record(store)["status"] == "truncated"
    assert stages(store) == ["program.run.1"]
    assert record(store)["error"]["message"] == "ended by SIGTERM"


def test_a_signal_before_the_program_exists_keeps_it_from_starting(tmp_path):
    """It may arrive after the check at the beginning of the stage, which then writes and syncs a mark."""
    stop, terminal = StopRequest(), Terminal()
    relay = SignalRelay(stop, terminal.present)
    with ProcessGroup(relay, terminal) as group:
        relay._receive(signal.SIGTERM, None)
        with pytest.raises(EndedBySignal):
            group.run("/usr/bin/touch", ["touch", str(tmp_path / "started")])
    assert not (tmp_path / "started").exists() and relay.group is None and group.ended_well == 0


def test_a_program_that_ends_well_when_asked_to_end_is_still_truncated(store):
    code = SLEEPER.replace("; time.sleep", "; import signal; signal.signal(15, lambda *_: os._exit(0)); time.sleep")
    measuring, _ = started(store, "--", sys.executable, "-c", code.replace("os, pathlib", "os, signal, pathlib"))
    time.sleep(0.2)
    measuring.send_signal(signal.SIGTERM)
    measuring.communicate(timeout=20)
    assert (measuring.returncode, record(store)["status"]) == (143, "truncated")


def test_other_signals_pass_through_and_end_nothing(store):
    measuring, _ = started(store, "--", sys.executable, "-c", SAYS_WHAT_IT_GETS)
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        measuring.send_signal(signum)
        time.sleep(0.1)
    assert measuring.poll() is None
    measuring.send_signal(signal.SIGHUP)
    measuring.communicate(timeout=20)
    assert measuring.returncode == 43


def test_a_second_interrupt_while_the_record_is_written_does_not_lose_it(store):
    measuring, _ = started(store, "--", sys.executable, "-c", SLEEPER)
    for _ in range(20):
        measuring.send_signal(signal.SIGINT)
        time.sleep(0.03)
    _, reported = measuring.communicate(timeout=20)
    assert measuring.returncode == 130
    assert record(store)["status"] == "truncated"
    assert "joulelab/runs" not in reported  # the traceback of the interrupted program itself is its own


def test_after_a_signal_no_descendant_is_left_not_even_one_in_a_session_of_its_own(store):
    stubborn = "import os, signal, time; os.setsid(); signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}]); " + SLEEPER
    measuring, pid = started(store, "--", sys.executable, "-c", program)
    (child,) = psutil.Process(pid).children()
    time.sleep(0.3)
    measuring.terminate()
    measuring.communicate(timeout=20)
    wait_for(lambda: is_gone(child.pid))


def test_killing_measure_ends_the_program_its_children_and_the_recorder(store):
    program = "import subprocess; subprocess.Popen(['sleep', '60']); " + SLEEPER
    measuring, pid = started(store, "--estimate-cpu", "--", sys.executable, "-c", program)
    everyone = psutil.Process(measuring.pid).children(recursive=True)
    assert pid in [process.pid for process in everyone] and len(everyone) >= 4
    time.sleep(0.7)
    measuring.kill()
    measuring.communicate()
    for process in everyone:
        wait_for(lambda pid=process.pid: is_gone(pid), 8)
    words = [sys.executable, "-m", "joulelab", "show", str(only_folder(store))]
    shown = subprocess.run(words, capture_output=True, text=True)
    assert "truncated" in shown.stdout and "program" in shown.stdout


def test_what_nohup_ignores_stays_ignored_for_the_program(store):
    program = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    words = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *measure_words(store, "--", sys.executable, "-c", program)]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "True\n"


class InTerminal:
    """A shell-less session on a terminal of its own, as a person has it."""

    def __init__(self, words):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(words[0], words)
        self.seen = ""

    def until(self, text, seconds=20):
        end = time.monotonic() + seconds
        while text not in self.seen and time.monotonic() < end:
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 4096).decode()
                except OSError:
                    break
        assert text in self.seen, self.seen

    def type(self, text):
        os.write(self.fd, text.encode())

    def end(self):
        self.until("run directory:")
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)


def test_a_program_reads_what_is_typed(store):
    program = "print('Name?', flush=True); print('Hello ' + input().upper(), flush=True)"
    terminal = InTerminal(measure_words(store, "--", sys.executable, "-c", program))
    terminal.until("Name?")
    terminal.type("ada\n")
    terminal.until("Hello ADA")
    assert terminal.end() == 0


def test_ctrl_c_reaches_the_program_which_may_continue(store):
    program = textwrap.dedent(
        """
        import time
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("caught", flush=True)
            print("Hello " + input(), flush=True)
        """
    )
    terminal = InTerminal(measure_words(store, "--", sys.executable, "-c", program))
    terminal.until("ready")
    terminal.type("\x03")
    terminal.until("caught")
    terminal.type("again\n")
    terminal.until("Hello again")
    assert terminal.end() == 0
    assert record(store)["status"] == "done"


def test_ctrl_c_that_ends_the_program_leaves_a_truncated_record(store):
    terminal = InTerminal(measure_words(store, "--", "sh", "-c", "echo ready; exec sleep 60"))
    terminal.until("ready")
    terminal.type("\x03")
    assert terminal.end() == 130
    assert record(store)["status"] == "truncated"


def test_a_program_in_a_pipeline_gets_the_terminal_when_it_reads(store):
    program = "import sys; print('asks', file=sys.stderr, flush=True); print('Hello ' + input(), file=sys.stderr)"
    words = measure_words(store, "--", sys.executable, "-c", program)
    shell = ["/bin/sh", "-c", '"$@" | cat', "sh", *words]
    terminal = InTerminal(shell)
    terminal.until("asks")
    terminal.type("pipe\n")
    terminal.until("Hello pipe")
    assert terminal.end() == 0


def test_ctrl_z_stops_program_and_measure_together_and_fg_continues(store):
    """A shell with job control around `measure`: the job is shown as stopped, and `fg` brings the program back."""
    program = "print('ready', flush=True); print('Hello ' + input(), flush=True)"
    words = measure_words(store, "--", sys.executable, "-c", program)
    line = " ".join(shlex.quote(word) for word in words)
    terminal = InTerminal([shutil.which("bash"), "--norc", "--noprofile", "-i"])
    terminal.type("PS1='$ '; set +H\n" + line + "\n")
    terminal.until("ready\r\n")
    terminal.type("\x1a")
    terminal.until("Stopped")
    terminal.type("fg\n")
    time.sleep(0.3)
    terminal.type("again\n")
    terminal.until("Hello again")
    terminal.until("run directory:")
    terminal.type("exit 5\n")
    assert terminal.end() == 5
    assert record(store)["status"] == "done"
