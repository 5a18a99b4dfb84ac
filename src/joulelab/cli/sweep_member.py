"""One member of a sweep in a process of its own: `python -m joulelab.cli.sweep_member FOLDER`.

Its memory, its caches and its peak are then its own, and when it runs out of memory the sweep does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from joulelab.runs.context import StopRequest
from joulelab.runs.paths import RunPaths

if TYPE_CHECKING:
    from joulelab.runs.record import RunRecord

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
GRACE_S = 20.0


def run_apart(run: RunPaths) -> RunRecord:
    """Run the folder's pipeline in a child and read its record back; a signal to us reaches it and ends the sweep."""
    from joulelab.runs.store import load_record

    command = [sys.executable, "-m", __name__, str(run.folder)]
    with StopRequest() as stop:
        # a session of its own: Ctrl-C in the terminal then reaches us alone, and the child once, from us
        child = subprocess.Popen(command, start_new_session=True)
        try:
            _wait(child, stop)
        finally:
            _end(child)
    stop.check()
    return load_record(run.folder)


def _wait(child: subprocess.Popen[bytes], stop: StopRequest) -> None:
    told = False
    while child.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.1)
        if stop.signum is not None and not told:
            child.send_signal(stop.signum)
            told = True


def _end(child: subprocess.Popen[bytes]) -> None:
    """Only where we are leaving before it: a second signal, or a bug."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()


def main(folder: Path) -> int:
    """What is printed goes to stderr; the record is in the folder."""
    from joulelab.cli.console import watching
    from joulelab.errors import JoulelabError
    from joulelab.runs.execute import execute

    _end_with_our_parent()
    try:
        with watching() as progress:
            execute(RunPaths(folder), progress)
    except JoulelabError as error:
        print(f"  failed: {error.message}" + (f"\n  hint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    return 0


def _end_with_our_parent() -> None:
    """A sweep that is killed does not leave a member training for hours (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
