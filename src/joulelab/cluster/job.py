"""What a job runs: `python -m joulelab.cluster run FOLDER`, with nothing but the folder.

Refuse what cannot work before a GPU is touched; start the run, here or on every node; pass on the warning ahead of the
time limit; go back to the queue, or tell those who wait that they wait for nothing.
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
from joulelab.cluster.accounting import import_accounting
from joulelab.cluster.jobs import home_of, read_jobs, tell_waiting
from joulelab.cluster.time_limit_signal import TimeLimitSignal
from joulelab.errors import JoulelabError, UsageError
from joulelab.meter.sensors import SensorUnavailable
from joulelab.runs.attempt import close_run
from joulelab.runs.lock import STALE_S, holding
from joulelab.runs.paths import RunPaths
from joulelab.runs.phases import PHASES
from joulelab.runs.spec import check, read_mapping
from joulelab.runs.store import load_record

# Where a job's nodes can be reached, and which GPUs it has on this one.


def node_address() -> str:
    """This node's address as Slurm itself uses it: its name need not resolve, and may mean another network."""
    name = os.environ.get("SLURMD_NODENAME")
    if name:
        try:
            told = slurm.tool("scontrol", "--oneliner", "show", "node", name)
        except JoulelabError:
            return name
        found = re.search(r"\bNodeAddr=(\S+)", told.stdout)
        return found.group(1) if found else name
    return socket.gethostname()


def free_port() -> int:
    """One that nobody listens on now, on the node that asks."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def gpus_text() -> str:
    """Which cards the job was given, by UUID and by whose word: the log says what is measured."""
    from joulelab.meter.config import EnergyConfig
    from joulelab.meter.sensors.nvml import NvmlSensor

    sensor = NvmlSensor(EnergyConfig(), os.getpid())
    try:
        devices = sensor.open()
    except SensorUnavailable as missing:
        return f"no GPU: {missing.reason}"
    except Exception as error:  # a driver that fails here is told by the recorder too, and ends nothing
        return f"no GPU: {type(error).__name__}: {error}"
    sensor.close()
    return ", ".join(f"{device.name} {device.device.removeprefix('gpu:')}" for device in devices)


JOULELAB = (sys.executable, "-m", "joulelab")


def run_in_job(folder: Path, part: str | None, nodes: int, ranks: int, warned: TimeLimitSignal) -> int:
    """One run, or one part of it, as this job's work; the exit code."""
    paths = RunPaths(folder)
    try:
        # Slurm may start a requeued job while the last processes of the one before still end
        with holding(folder, wait_s=STALE_S):
            if load_record(folder).status == "done":
                _say(f"{paths.run_id} is done already")
                return 0
            _close_without_inputs(paths)
    except JoulelabError as error:
        _say(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
        tell_waiting(folder, f"{paths.run_id}: {error.message}")
        return error.exit_code
    _say(f"{paths.run_id} on {os.environ.get('SLURM_JOB_NODELIST', 'this machine')}: {gpus_text()}")
    words = ["run", "--resume", str(folder), *(["--part", part] if part else [])]
    code = _Child(_launch(words, nodes, ranks), nodes, ranks).wait(warned)
    if code == 0:
        return 0
    if warned.received and _back_to_the_queue(folder):
        return code
    record = load_record(folder)
    why = record.error.message if record.error else f"ended with exit code {code}"
    tell_waiting(folder, f"{paths.run_id}: {why}")
    return code


def _close_without_inputs(paths: RunPaths) -> None:
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
    """The program this job is for. It is warned once; what Slurm does after that is the end anyway."""

    def __init__(self, command: list[str], nodes: int, ranks: int) -> None:
        self._on_nodes = nodes > 1
        self._signal = signal.SIGUSR1 if ranks > 1 else signal.SIGTERM
        self._process = subprocess.Popen(command)

    def wait(self, warned: TimeLimitSignal) -> int:
        told = False
        while self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=0.2)
            if warned.received and not told:
                told = True
                self._tell()
        return self._process.returncode

    def _tell(self) -> None:
        _say("asked to end: the run saves and writes its record")
        job_id = slurm.this_job()
        if self._on_nodes and job_id:
            slurm.signal_steps(job_id, "USR1")
        else:
            self._process.send_signal(self._signal)


def _back_to_the_queue(folder: Path) -> bool:
    """Where the job was warned of its limit, is still meant to run, and may come back; says so either way."""
    job_id = slurm.this_job()
    jobs = read_jobs(home_of(folder))
    if job_id is None or jobs is None or jobs.cancelled_at is not None:
        return False
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if restarts >= jobs.max_restarts:
        _say(f"not requeued: restarted {restarts} times, {jobs.max_restarts} are allowed (max_restarts)")
        return False
    try:
        state = slurm.states([job_id])
        if not any(found.state == "RUNNING" for found in state.values()):
            _say("not requeued: the job was cancelled")
            return False
        refused = slurm.requeue(job_id)
    except JoulelabError as error:
        refused = error.message
    if refused is not None:
        _say(f"the cluster does not requeue this job ({refused}); by hand: joulelab submit --resume {folder}")
        return False
    _say(f"job {job_id} goes back to the queue and will go on from the checkpoint")
    return True


def report_in_job(folder: Path) -> int:
    """The last job of a chain: what Slurm counted, and the page."""
    from joulelab.report.page import write_report

    for row in import_accounting(folder):
        _say(row.text)
    print(write_report(folder))
    return 0


def _say(text: str) -> None:
    print(f"job: {text}", file=sys.stderr, flush=True)


def main(words: list[str], warned: TimeLimitSignal) -> int:
    parser = argparse.ArgumentParser(prog="python -m joulelab.cluster", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run")
    run.add_argument("folder", type=Path)
    run.add_argument("--part", choices=PHASES)
    run.add_argument("--nodes", type=int, default=1)
    run.add_argument("--ranks", type=int, default=1)
    report = verbs.add_parser("report")
    report.add_argument("folder", type=Path)
    asked = parser.parse_args(words)
    try:
        if not asked.folder.is_dir():
            raise UsageError(f"no such folder: {asked.folder}", "is its file system mounted on this node?")
        if asked.verb == "report":
            return report_in_job(asked.folder)
        return run_in_job(asked.folder, asked.part, asked.nodes, asked.ranks, warned)
    except JoulelabError as error:
        _say(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
        return error.exit_code
