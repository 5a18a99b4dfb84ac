"""The ranks of one node: torchrun with the run's command, started by srun once per node, or by the job itself.

A request to stop must reach the ranks but not torchrun, which would kill them before they have saved: 30 s after a
SIGTERM, or immediately at a second one (scancel signals every process, and srun repeats it). torchrun is therefore
started with SIGTERM and SIGUSR1 ignored, and its children get SIGUSR1. One rank would suffice: ranks share the request
at the next step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys

import psutil

from joulelab.cluster.slurm import SIGNALS, TimeLimitSignal

RESEND_S = 0.5


def torchrun_command(nodes: int, ranks: int, endpoint: str, job: str, address: str, words: list[str]) -> list[str]:
    """`words` are the arguments of `joulelab`, the same on every rank."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={job}", f"--local-addr={address}"]
    return [*command, "--max-restarts=0", "-m", "joulelab", *words]


def run_ranks(command: list[str]) -> int:
    """Start the ranks, pass requests to stop on to them, and return the launcher's exit code."""
    stop = TimeLimitSignal()
    # the default of --signals-to-handle, which older releases of torchrun do not have
    environment = {**os.environ, "PET_SIGNALS_TO_HANDLE": "SIGINT,SIGHUP,SIGQUIT"}
    launcher = subprocess.Popen(command, env=environment, preexec_fn=_ignore_signals)
    while True:
        try:
            return launcher.wait(timeout=RESEND_S)
        except subprocess.TimeoutExpired:
            if stop.received:
                # again and again: a rank that is still importing ignores it
                signal_ranks(launcher.pid)


def _ignore_signals() -> None:
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


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
