"""The ranks of one node: torchrun with the run's command, started by srun once per node, or by the job itself.

The scheduler's signal must reach the ranks but not torchrun, which would kill them all. torchrun is therefore started
with SIGUSR1 ignored, and the signal is sent to its children. One rank would suffice: ranks share the request at the
next step.
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
    """`words` are the arguments of `joulelab`, the same on every rank."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={job}", f"--local-addr={address}"]
    return [*command, "--max-restarts=0", "-m", "joulelab", *words]


def run_ranks(command: list[str]) -> int:
    """Start the ranks, forward SIGUSR1 to them, and return the launcher's exit code."""
    launcher: subprocess.Popen[bytes] | None = None

    def forward(signum: int, frame: FrameType | None) -> None:
        if launcher is not None:
            signal_ranks(launcher.pid)

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited by the launcher
    launcher = subprocess.Popen(command)
    signal.signal(signal.SIGUSR1, forward)
    signal.signal(signal.SIGTERM, lambda signum, frame: launcher.terminate())
    return launcher.wait()


def signal_ranks(launcher_pid: int) -> None:
    with contextlib.suppress(psutil.Error):
        for rank in psutil.Process(launcher_pid).children():
            rank.send_signal(signal.SIGUSR1)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m joulelab.cluster.node")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--endpoint", required=True, help="address and free port of the first node")
    parser.add_argument("--address", help="address of this node, if its name does not resolve")
    parser.add_argument("words", nargs="+")
    arguments = parser.parse_args(words)
    from joulelab.cluster.job import node_address

    job = f"{os.environ.get('SLURM_JOB_ID', os.getpid())}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    address = arguments.address or node_address()
    return run_ranks(
        torchrun_command(arguments.nodes, arguments.ranks, arguments.endpoint, job, address, arguments.words)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
