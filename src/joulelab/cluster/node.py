"""The ranks of one node: torchrun with the run's command, started by srun once per node, or by the job itself.

A warning of the scheduler must reach the ranks and spare torchrun, which would take it for the end of everything: it is
started with SIGUSR1 ignored, and its children, the ranks, are told directly. One of them would be enough: they tell
each other with the next step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from types import FrameType

import psutil


def torchrun_command(nodes: int, ranks: int, endpoint: str, job: str, address: str, words: list[str]) -> list[str]:
    """`words` follow `joulelab`, the same on every rank."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={job}", f"--local-addr={address}"]
    return [*command, "--max-restarts=0", "-m", "joulelab", *words]


def run_ranks(command: list[str]) -> int:
    """Start the ranks, pass warnings on to them, and wait; the launcher's exit code."""
    launcher: subprocess.Popen[bytes] | None = None

    def warn(signum: int, frame: FrameType | None) -> None:
        if launcher is not None:
            tell_ranks(launcher.pid)

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited by the launcher
    launcher = subprocess.Popen(command)
    signal.signal(signal.SIGUSR1, warn)
    signal.signal(signal.SIGTERM, lambda signum, frame: launcher.terminate())
    return launcher.wait()


def tell_ranks(launcher_pid: int) -> None:
    with contextlib.suppress(psutil.Error):
        for rank in psutil.Process(launcher_pid).children():
            rank.send_signal(signal.SIGUSR1)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m joulelab.cluster.node")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--endpoint", required=True, help="address and free port of the first node")
    parser.add_argument("--address", help="this node's own, where its name does not resolve")
    parser.add_argument("words", nargs="+")
    asked = parser.parse_args(words)
    from joulelab.cluster.job import node_address

    job = f"{os.environ.get('SLURM_JOB_ID', os.getpid())}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    address = asked.address or node_address()
    return run_ranks(torchrun_command(asked.nodes, asked.ranks, asked.endpoint, job, address, asked.words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
