"""One member of a sweep in its own process: `python -m joulelab.cli.sweep_member FOLDER DETAIL`.

Memory, caches and peaks of the members are then independent, and an out-of-memory kill does not end the sweep.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from joulelab.cli.options import Detail, detail, detail_level
from joulelab.runs.context import StopRequest
from joulelab.runs.paths import RunPaths

if TYPE_CHECKING:
    from joulelab.runs.record import RunRecord

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
GRACE_S = 20.0


def run_in_subprocess(run: RunPaths) -> RunRecord:
    """Execute the run in a child process and return its record; signals are forwarded and end the sweep."""
    from joulelab.runs.store import load_record

    command = [sys.executable, "-m", __name__, str(run.folder), detail()]
    with StopRequest() as stop:
        # a separate session: Ctrl-C in the terminal reaches only this process, which forwards it once
        child = subprocess.Popen(command, start_new_session=True)
        try:
            _wait(child, stop)
        finally:
            _end(child)
    stop.check()
    return load_record(run.folder)


def _wait(child: subprocess.Popen[bytes], stop: StopRequest) -> None:
    forwarded = False
    while child.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.1)
        if stop.signum is not None and not forwarded:
            child.send_signal(stop.signum)
            forwarded = True


def _end(child: subprocess.Popen[bytes]) -> None:
    """Stop a child that is still running, after a second signal or an error of ours."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()


def main(folder: Path, level: Detail) -> int:
    """Execute the run; output goes to stderr, with -v of the sweep all stages; the record is in the folder."""
    from joulelab.cli.console import watching
    from joulelab.errors import JoulelabError
    from joulelab.runs.execute import execute

    _exit_with_parent()
    try:
        with detail_level(level), watching(stages=False) as progress:
            execute(RunPaths(folder), progress)
    except JoulelabError as error:
        print(f"  failed: {error.message}" + (f"\n  hint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    return 0


def _exit_with_parent() -> None:
    """Let the kernel signal this process when a killed sweep disappears (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), cast(Detail, sys.argv[2])))
