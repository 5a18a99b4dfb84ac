"""Energy of jobs from Slurm's accounting, reported next to our own figure and never instead of it.

Slurm measures whole nodes with a plugin of the site (RAPL, IPMI, or none). The figure excludes GPUs unless the plugin
reads NVML, is 0 if the plugin is off, and on a shared node covers all users. The line of a job has the energy of its
srun steps; without such steps the energy is in the line of the batch script.
"""

from __future__ import annotations

import shutil
from datetime import datetime, timedelta
from pathlib import Path

from joulelab.cluster import slurm
from joulelab.cluster.jobs import FOLDER, JobsFile, read_jobs
from joulelab.meter.figures import Frozen
from joulelab.runs.paths import write_json
from joulelab.units import energy_text

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
    return slurm.tool("scontrol", "show", "hostnames", node_list).stdout.split()


def import_accounting(folder: Path) -> tuple[AccountedJob, ...]:
    """Query sacct for the jobs of a run or group and store the result with the scripts; () if there is no sacct."""
    jobs = read_jobs(folder)
    if jobs is None or shutil.which("sacct") is None:
        return ()
    ids = ",".join(job.job_id for job in jobs.jobs)
    # --duplicates: also the starts before a requeue; --starttime: job ids are reused after some years
    arguments = ("--duplicates", f"--jobs={ids}", f"--starttime={_day_before(jobs)}", f"--format={','.join(FIELDS)}")
    done = slurm.tool("sacct", "--noheader", "--parsable2", *arguments)
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
    done = slurm.tool("sinfo", "--noheader", "--Node", "--format=%N|%c")
    rows = [line.strip().split("|") for line in done.stdout.splitlines() if "|" in line]
    return {name: int(cpus) for name, cpus in rows if cpus.isdigit()}
