"""Requests to stop reach the ranks of a node, and their launcher lets them save."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

# In place of torchrun: the real one takes seconds to start.
LAUNCHER = """
import signal, subprocess, sys
from joulelab.cluster.node import run_ranks
rank = '''
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "importing").touch()
time.sleep(1.5)  # imports; a request that arrives now must not be lost
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))
while not asked:
    time.sleep(0.01)
time.sleep(1)  # a checkpoint
(folder / "saved").touch()
'''
starter = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}, {sys.argv[1]!r}])"
sys.exit(run_ranks([sys.executable, "-c", starter]))
"""


def test_ranks_save_although_every_process_is_asked_twice_and_while_they_import(tmp_path):
    node = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)])
    end = time.monotonic() + 60
    while not (tmp_path / "importing").exists() and time.monotonic() < end:
        time.sleep(0.02)
    everyone = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
    assert len(everyone) == 3  # as scancel does it
    for _ in range(2):
        for process in everyone:
            process.send_signal(signal.SIGTERM)
    assert node.wait(60) == 0
    assert Path(tmp_path / "saved").exists()


def test_torchrun_leaves_sigterm_to_the_ranks():
    """Against the real torchrun: its own handler would kill them."""
    code = "import os, signal; print(os.environ['TORCHELASTIC_SIGNALS_TO_HANDLE'], signal.getsignal(15).name)"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", sys.executable, "-c", code]
    runner = f"import sys; from joulelab.cluster.node import run_ranks; sys.exit(run_ranks({command!r}))"
    done = subprocess.run([sys.executable, "-c", runner], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["SIGINT,SIGHUP,SIGQUIT", "SIG_IGN"], done.stderr
