"""Slurm's commands and accounting (output parsed into values, failures raised as errors) and its signals."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import FrameType

from joulelab.cluster.jobs import FOLDER, JobsFile, read_jobs
from joulelab.errors import DependencyMissing, JoulelabError, UsageError
from joulelab.meter.figures import Frozen
from joulelab.runs.paths import write_json
from joulelab.units import energy_text

TIMEOUT_S = 60.0
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED")
ALIVE = (*_WAITING, "RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT")


@dataclass(frozen=True)
class JobState:
    """State of a job, or of a task of an array."""

    job_id: str
    """`123`, or `123_4` for a task of an array."""
    state: str
    reason: str = ""
    nodes: str = ""

    @property
    def alive(self) -> bool:
        return self.state in ALIVE

    @property
    def executes(self) -> bool:
        """Whether it executes its program, or will: not if it is only ending."""
        return self.alive and self.state not in ("COMPLETING", "STAGE_OUT")


def require(program: str) -> None:
    if shutil.which(program) is None:
        raise DependencyMissing(
            f"{program} was not found: Slurm is not installed on this machine",
            "run this on the cluster's login node; --dry-run prints the scripts anywhere",
        )


def tool(*words: str) -> subprocess.CompletedProcess[str]:
    require(words[0])
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise JoulelabError(
            f"{words[0]} did not answer within {TIMEOUT_S:.0f} s", "try again later; check Slurm with `sinfo`"
        ) from None


def require_controller() -> None:
    """Refuse to submit if the commands are installed but no controller answers; no check without sinfo."""
    if shutil.which("sinfo") is None:
        return
    try:
        done = tool("sinfo", "--noheader", "--format=%P")
    except JoulelabError as error:
        reason = error.message
    else:
        if done.returncode == 0:
            return
        reason = next(iter(done.stderr.strip().splitlines()), f"sinfo ended with exit code {done.returncode}")
    raise UsageError(
        f"no Slurm controller answers ({reason}); nothing was submitted",
        "run this on the cluster's login node; --dry-run prints the scripts anywhere",
    )


def this_job() -> str | None:
    """Id of the job of this process; `12_3` for a task, because the bare id of the last task means the whole array."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def submit(script: Path, after: str | None = None) -> str:
    """Submit a script and return the job id; the job starts after `after` has succeeded."""
    # afterok and not afterany: a student without its teacher's outputs would train the teacher
    # again, unmeasured by the plan.
    dependency = [f"--dependency=afterok:{after}"] if after else []
    done = tool("sbatch", "--parsable", *dependency, str(script))
    if done.returncode != 0:
        raise JoulelabError(
            f"sbatch refused {script.name}: {done.stderr.strip() or f'exit code {done.returncode}'}",
            f"the script is {script}; compare its options with `sinfo`",
        )
    return done.stdout.strip().partition(";")[0]  # followed by the cluster's name in multi-cluster setups


def cancel(job_ids: Sequence[str]) -> None:
    if not job_ids:
        return
    done = tool("scancel", *job_ids)
    if done.returncode != 0 and not _is_unknown(done):
        raise JoulelabError(f"scancel: {done.stderr.strip()}", "squeue --me lists your jobs")


@dataclass(frozen=True)
class Partition:
    name: str
    is_default: bool
    gpu_types: tuple[str, ...]
    """Types of its GPUs as Slurm names them; "" for GPUs without a type."""


def partitions() -> tuple[Partition, ...] | None:
    """The cluster's partitions with their GPU types; None if sinfo is missing or does not answer."""
    if shutil.which("sinfo") is None:
        return None
    done = tool("sinfo", "--noheader", "--format=%P|%G")
    return parse_partitions(done.stdout) if done.returncode == 0 else None


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """Parse lines such as `gpu*|gpu:h100:4(S:0-1),license:2`; a partition has one line per kind of node."""
    found: dict[str, set[str]] = {}
    defaults = set()
    for line in text.splitlines():
        name, _, resources = line.strip().partition("|")
        if not name:
            continue
        if name.endswith("*"):
            defaults.add(name.removesuffix("*"))
        found.setdefault(name.removesuffix("*"), set()).update(_gpu_types(resources))
    return tuple(Partition(name, name in defaults, tuple(sorted(types))) for name, types in found.items())


def _gpu_types(resources: str) -> set[str]:
    """GPU types named in resources such as `gpu:4`, `gpu:h100:4` or `gpu:h100:4(S:0-1),license:2`."""
    words = [word.split(":") for word in re.sub(r"\([^)]*\)", "", resources).split(",")]
    gpus = [word for word in words if word[0] == "gpu"]
    return {word[1] if len(word) > 2 or (len(word) == 2 and not word[1].isdigit()) else "" for word in gpus}


def signal_steps(job_id: str, name: str) -> bool:
    """Send a signal to the srun steps, not to the batch script."""
    return tool("scancel", f"--signal={name}", job_id).returncode == 0


def requeue(job_id: str) -> str | None:
    """Requeue the job; returns the reason if Slurm refuses, else None."""
    done = tool("scontrol", "requeue", job_id)
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def states(job_ids: Sequence[str]) -> dict[str, JobState]:
    """All jobs and tasks that Slurm knows: from squeue, else scontrol (recent jobs), else sacct.

    Raises if Slurm does not answer, because that says nothing about the jobs.
    """
    found: dict[str, JobState] = {}
    for job_id in job_ids:
        # In order of cost and of how long each remembers a job: squeue until it ends, scontrol for
        # minutes, sacct for good, where accounting is installed.
        for state in _from_squeue(job_id) or _from_scontrol(job_id) or _from_sacct(job_id):
            found[state.job_id] = state
    return found


def _from_squeue(job_id: str) -> list[JobState]:
    done = tool("squeue", "--noheader", "--array", f"--jobs={job_id}", "--format=%F|%K|%T|%r|%N")
    if done.returncode != 0 and not _is_unknown(done):
        raise JoulelabError(f"squeue: {done.stderr.strip()}", "try again later; check Slurm with `sinfo`")
    return parse_queue(done.stdout)


def _is_unknown(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether the id is no longer known to Slurm."""
    return "nvalid job id" in done.stderr


def parse_queue(text: str) -> list[JobState]:
    found = []
    for line in text.splitlines():
        job, task, state, reason, nodes = line.strip().split("|")
        found.append(JobState(job if task == "N/A" else f"{job}_{task}", state, _reason(reason), nodes))
    return found


def _from_scontrol(job_id: str) -> list[JobState]:
    """scontrol shows a finished job for some minutes."""
    done = tool("scontrol", "--oneliner", "show", "job", job_id)
    return parse_jobs(done.stdout) if done.returncode == 0 else []


def parse_jobs(text: str) -> list[JobState]:
    found = []
    for line in text.splitlines():
        facts = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
        if "JobState" not in facts:
            continue
        task = facts.get("ArrayTaskId", "")
        job_id = f"{facts['ArrayJobId']}_{task}" if task.isdigit() else facts.get("ArrayJobId", facts["JobId"])
        found.append(JobState(job_id, facts["JobState"], _reason(facts.get("Reason", "")), facts.get("NodeList", "")))
    return found


def _from_sacct(job_id: str) -> list[JobState]:
    if shutil.which("sacct") is None:
        return []
    done = tool("sacct", "--noheader", "--parsable2", "-X", f"--jobs={job_id}", "--format=JobID,State,NodeList")
    if done.returncode != 0:
        return []
    rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 2]
    return [JobState(job, state.split()[0], "", nodes) for job, state, nodes in rows]


def _reason(text: str) -> str:
    return "" if text in ("None", "(null)") else text


SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class TimeLimitSignal:
    """Handles the signal from construction on, so that one that arrives during imports is not lost."""

    def __init__(self) -> None:
        self.received = False
        for signum in SIGNALS:
            signal.signal(signum, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self.received = True


# Energy of jobs from Slurm's accounting, reported next to our own figure and never instead of it.
#
# Slurm measures whole nodes with a plugin of the site (RAPL, IPMI, or none). The figure excludes GPUs unless the
# plugin reads NVML, is 0 if the plugin is off, and on a shared node covers all users. The line of a job has the
# energy of its srun steps; without such steps the energy is in the line of the batch script.


FIELDS = ("JobID", "State", "Elapsed", "ConsumedEnergyRaw", "NodeList", "AllocCPUS", "NNodes")
FILE = "accounting.json"


class AccountedJob(Frozen):
    job_id: str
    state: str
    elapsed: str
    nodes: str
    energy_j: float | None
    """As reported by Slurm's plugin; null if it reported nothing."""
    remark: str
    """What the figure covers, or why there is none."""

    @property
    def text(self) -> str:
        energy = f"{energy_text(self.energy_j)} by Slurm's accounting" if self.energy_j is not None else "no energy"
        return f"job {self.job_id} ({self.state}, {self.elapsed}): {energy}; {self.remark}"


def parse_accounting(text: str, node_cpus: dict[str, int] | None = None) -> tuple[AccountedJob, ...]:
    """Parse `sacct --parsable2 --noheader` with `FIELDS`; `node_cpus` (CPUs per node) identifies jobs on shared nodes.

    A requeued job has one entry per start.
    """
    jobs: list[tuple[dict[str, str], dict[str, str] | None]] = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != len(FIELDS):
            continue
        row = dict(zip(FIELDS, cells, strict=True))
        if "." not in row["JobID"]:
            jobs.append((row, None))
        elif jobs and row["JobID"] == f"{jobs[-1][0]['JobID']}.batch":
            jobs[-1] = (jobs[-1][0], row)
    return tuple(_accounted(job, batch, node_cpus or {}) for job, batch in jobs)


def _accounted(job: dict[str, str], batch: dict[str, str] | None, node_cpus: dict[str, int]) -> AccountedJob:
    energy_j, remark = _energy_and_remark(job, batch, node_cpus)
    return AccountedJob(
        job_id=job["JobID"],
        state=job["State"].split()[0] if job["State"] else "",
        elapsed=job["Elapsed"],
        nodes=job["NodeList"],
        energy_j=energy_j,
        remark=remark,
    )


def _energy_and_remark(
    job: dict[str, str], batch: dict[str, str] | None, node_cpus: dict[str, int]
) -> tuple[float | None, str]:
    readings = [_joules(row["ConsumedEnergyRaw"]) for row in (job, batch) if row is not None]
    energy_j = next((joules for joules in readings if joules), None)
    if energy_j is None and 0 not in readings:
        return None, "Slurm's accounting has no energy for it"
    if energy_j is None:
        return None, "Slurm reports 0 J: its energy plugin is off or recorded nothing (AcctGatherEnergyType)"
    total, allocated = sum(node_cpus.get(node, 0) for node in _names(job["NodeList"])), int(job["AllocCPUS"] or 0)
    if not total or allocated < total:
        share = f"{allocated} of {total} CPUs" if total else "an unknown share"
        return energy_j, f"whole nodes, of which the job had {share}: may include other jobs"
    return energy_j, "whole nodes, used by this job only; excludes GPUs unless the site's plugin reads NVML"


def _joules(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _names(node_list: str) -> list[str]:
    if "[" not in node_list:
        return [name for name in node_list.split(",") if name]
    return tool("scontrol", "show", "hostnames", node_list).stdout.split()


def import_accounting(folder: Path) -> tuple[AccountedJob, ...]:
    """Query sacct for the jobs of a run or group and store the result with the scripts; () if there is no sacct."""
    jobs = read_jobs(folder)
    if jobs is None or shutil.which("sacct") is None:
        return ()
    ids = ",".join(job.job_id for job in jobs.jobs)
    # --duplicates: also the starts before a requeue; --starttime: job ids are reused after some years
    arguments = ("--duplicates", f"--jobs={ids}", f"--starttime={_day_before(jobs)}", f"--format={','.join(FIELDS)}")
    done = tool("sacct", "--noheader", "--parsable2", *arguments)
    if done.returncode != 0:
        return ()
    found = parse_accounting(done.stdout, _node_cpus())
    write_json(folder / FOLDER / FILE, {"jobs": [row.model_dump(mode="json") for row in found]})
    return found


def _day_before(jobs: JobsFile) -> str:
    """A day before the first submission, so that it is early enough in any time zone of the cluster."""
    first = min(datetime.fromisoformat(job.submitted_at) for job in jobs.jobs)
    return (first - timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%S")


def _node_cpus() -> dict[str, int]:
    done = tool("sinfo", "--noheader", "--Node", "--format=%N|%c")
    rows = [line.strip().split("|") for line in done.stdout.splitlines() if "|" in line]
    return {name: int(cpus) for name, cpus in rows if cpus.isdigit()}
