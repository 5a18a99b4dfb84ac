"""Execution inside a job: `python -m joulelab.cluster run FOLDER`.

Check the inputs before using a GPU; start the run, here or on every node; forward the signal before the time limit;
requeue the job, or close the runs of jobs that depend on it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

from joulelab.cluster import slurm
from joulelab.cluster.jobs import fail_dependent_runs, home_of, read_jobs
from joulelab.cluster.slurm import TimeLimitSignal, import_accounting
from joulelab.errors import JoulelabError, UsageError
from joulelab.meter.sensors import SensorUnavailable
from joulelab.runs.attempt import close_run
from joulelab.runs.lock import STALE_S, holding
from joulelab.runs.paths import RunPaths
from joulelab.runs.phases import PHASES
from joulelab.runs.spec import check, read_mapping
from joulelab.runs.store import load_record


def node_address() -> str:
    """This node's address as Slurm uses it: the host name may not resolve, or resolve to another network."""
    name = os.environ.get("SLURMD_NODENAME")
    if name:
        try:
            done = slurm.tool("scontrol", "--oneliner", "show", "node", name)
        except JoulelabError:
            return name
        found = re.search(r"\bNodeAddr=(\S+)", done.stdout)
        return found.group(1) if found else name
    return socket.gethostname()


def free_port() -> int:
    """A TCP port that is free on this node now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def gpus_text() -> str:
    """Names and UUIDs of the job's GPUs, for the log."""
    from joulelab.meter.config import EnergyConfig
    from joulelab.meter.sensors.nvml import NvmlSensor

    sensor = NvmlSensor(EnergyConfig(), os.getpid())
    try:
        devices = sensor.open()
    except SensorUnavailable as missing:
        return f"no GPU: {missing.reason}"
    except Exception as error:  # the recorder reports a failing driver too; it does not end the job
        return f"no GPU: {type(error).__name__}: {error}"
    sensor.close()
    return ", ".join(f"{device.name} {device.device.removeprefix('gpu:')}" for device in devices)


JOULELAB = (sys.executable, "-m", "joulelab")


def run_in_job(folder: Path, until: str | None, nodes: int, ranks: int, time_limit: TimeLimitSignal) -> int:
    """Execute a run, or one phase of it, and return the exit code."""
    paths = RunPaths(folder)
    try:
        # Slurm may start a requeued job while the last processes of the previous start are still ending
        with holding(folder, wait_s=STALE_S):
            if load_record(folder).status == "done":
                _log(f"{paths.run_id} is already done")
                return 0
            _require_inputs(paths)
    except JoulelabError as error:
        _log(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
        fail_dependent_runs(folder, f"{paths.run_id}: {error.message}")
        return error.exit_code
    _log(f"{paths.run_id} on {os.environ.get('SLURM_JOB_NODELIST', 'this machine')}: {gpus_text()}")
    # -v: the log of a job is read afterwards and has all tables, by host, device and process too
    words = ["run", "--resume", str(folder), "-v", *(["--until", until] if until else [])]
    # A child process, so that this one stays responsive to the time-limit signal and can requeue
    # the job after the run has saved its checkpoint; torch cannot be interrupted inside a kernel
    # launch.
    code = _Child(_launch(words, nodes, ranks), nodes, ranks).wait(time_limit)
    if code == 0:
        return 0
    if time_limit.received and _requeue(folder):
        return code
    record = load_record(folder)
    reason = record.error.message if record.error else f"exit code {code}"
    fail_dependent_runs(folder, f"{paths.run_id}: {reason}")
    return code


def _require_inputs(paths: RunPaths) -> None:
    """Fail the run if files or samples that it names are missing where it will run: exit code 2 before any GPU work."""
    try:
        check(read_mapping(paths.config)).preflight()
    except JoulelabError as error:
        close_run(paths, "failed", error)
        raise


def _launch(words: list[str], nodes: int, ranks: int) -> list[str]:
    if nodes * ranks == 1:
        return [*JOULELAB, *words]
    here = node_address()
    ranks_here = [sys.executable, "-m", "joulelab.cluster.node", f"--nodes={nodes}", f"--ranks={ranks}"]
    ranks_here += [f"--endpoint={here}:{free_port()}", "--", *words]
    if nodes == 1:
        return ranks_here
    return ["srun", f"--nodes={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *ranks_here]


class _Child:
    """The program of this job. The time-limit signal is forwarded once; afterwards Slurm kills the job."""

    def __init__(self, command: list[str], nodes: int, ranks: int) -> None:
        self._on_nodes = nodes > 1
        # torchrun answers SIGTERM by killing its ranks before they can save; node.py ignores
        # SIGUSR1 in the launcher and passes it on to the ranks.
        self._signal = signal.SIGUSR1 if ranks > 1 else signal.SIGTERM
        self._process = subprocess.Popen(command)

    def wait(self, time_limit: TimeLimitSignal) -> int:
        forwarded = False
        while self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                # Polled instead of blocking: a signal handler only sets a flag, and `wait` would
                # restart after it (PEP 475).
                self._process.wait(timeout=0.2)
            if time_limit.received and not forwarded:
                forwarded = True
                self._forward_signal()
        return self._process.returncode

    def _forward_signal(self) -> None:
        _log("received the signal to stop: the run saves a checkpoint and its record")
        job_id = slurm.this_job()
        if self._on_nodes and job_id:
            slurm.signal_steps(job_id, "USR1")
        else:
            self._process.send_signal(self._signal)


def _requeue(folder: Path) -> bool:
    """Requeue this job unless it was cancelled or has reached max_restarts; True if requeued."""
    job_id = slurm.this_job()
    jobs = read_jobs(home_of(folder))
    if job_id is None or jobs is None or jobs.cancelled_at is not None:
        return False
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if restarts >= jobs.max_restarts:
        _log(f"not requeued: restarted {restarts} times (max_restarts is {jobs.max_restarts})")
        return False
    try:
        # The signal may also come from a cancellation. Only Slurm's state distinguishes the two: a
        # job at its time limit is still RUNNING, a cancelled one is not, and requeueing it would
        # undo the user's decision.
        state = slurm.states([job_id])
        if not any(found.state == "RUNNING" for found in state.values()):
            _log("not requeued: the job was cancelled")
            return False
        refused = slurm.requeue(job_id)
    except JoulelabError as error:
        refused = error.message
    if refused is not None:
        _log(f"Slurm refused to requeue this job ({refused}); resubmit with: joulelab submit --resume {folder}")
        return False
    _log(f"job {job_id} is requeued and will resume from the checkpoint")
    return True


def report_in_job(folder: Path) -> int:
    """The last job of a chain: import Slurm's accounting and write the report."""
    from joulelab.report import report_line

    for row in import_accounting(folder):
        _log(row.text)
    print(report_line(folder).removeprefix("report: "))
    return 0


def _log(text: str) -> None:
    print(f"job: {text}", file=sys.stderr, flush=True)


def main(words: list[str], time_limit: TimeLimitSignal) -> int:
    parser = argparse.ArgumentParser(prog="python -m joulelab.cluster", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run")
    run.add_argument("folder", type=Path)
    run.add_argument("--until", "--part", choices=PHASES)  # scripts of earlier versions pass --part
    run.add_argument("--nodes", type=int, default=1)
    run.add_argument("--ranks", type=int, default=1)
    report = verbs.add_parser("report")
    report.add_argument("folder", type=Path)
    arguments = parser.parse_args(words)
    try:
        if not arguments.folder.is_dir():
            raise UsageError(f"no such directory: {arguments.folder}", "is its file system mounted on this node?")
        if arguments.verb == "report":
            return report_in_job(arguments.folder)
        return run_in_job(arguments.folder, arguments.until, arguments.nodes, arguments.ranks, time_limit)
    except JoulelabError as error:
        _log(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
        return error.exit_code
