"""What Slurm itself says a job took, beside our own figure and never in its place.

Slurm counts by a plugin of the site (RAPL, IPMI, or none), for whole nodes. It knows no NVIDIA joules unless the plugin
does, reads 0 where the plugin is off, and on a node that several jobs share each of them is told everybody's. A job's
own line has the joules of what srun started; where that was nothing, they stand in the line of the batch script.
"""

from __future__ import annotations

import shutil
from datetime import datetime, timedelta
from pathlib import Path

from joulelab.cluster import slurm
from joulelab.cluster.jobs import FOLDER, JobsFile, read_jobs
from joulelab.meter.figures import Frozen
from joulelab.runs.storage import write_json
from joulelab.units import energy_text

FIELDS = ("JobID", "State", "Elapsed", "ConsumedEnergyRaw", "NodeList", "AllocCPUS", "NNodes")
FILE = "accounting.json"


class AccountedJob(Frozen):
    job_id: str
    state: str
    elapsed: str
    nodes: str
    energy_j: float | None
    """As Slurm's plugin counted; null where it counted nothing."""
    remark: str
    """Why it is no measurement of this job, or what it covers."""

    @property
    def text(self) -> str:
        energy = f"{energy_text(self.energy_j)} by Slurm's accounting" if self.energy_j is not None else "no joules"
        return f"job {self.job_id} ({self.state}, {self.elapsed}): {energy}; {self.remark}"


def parse_accounting(text: str, node_cpus: dict[str, int] | None = None) -> tuple[AccountedJob, ...]:
    """`sacct --parsable2 --noheader` with `FIELDS`; `node_cpus` tells a job that has part of its node.

    A job that went back to the queue has one entry for each time it ran.
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
    energy_j, remark = _judge(job, batch, node_cpus)
    return AccountedJob(
        job_id=job["JobID"],
        state=job["State"].split()[0] if job["State"] else "",
        elapsed=job["Elapsed"],
        nodes=job["NodeList"],
        energy_j=energy_j,
        remark=remark,
    )


def _judge(job: dict[str, str], batch: dict[str, str] | None, node_cpus: dict[str, int]) -> tuple[float | None, str]:
    told = [_joules(row["ConsumedEnergyRaw"]) for row in (job, batch) if row is not None]
    energy_j = next((joules for joules in told if joules), None)
    if energy_j is None and 0 not in told:
        return None, "Slurm's accounting has no energy for it"
    if energy_j is None:
        return None, "Slurm says 0 J: its energy plugin is off or saw nothing (AcctGatherEnergyType)"
    whole, given = sum(node_cpus.get(node, 0) for node in _names(job["NodeList"])), int(job["AllocCPUS"] or 0)
    if not whole or given < whole:
        share = f"{given} of {whole} CPUs" if whole else "an unknown share"
        return energy_j, f"of whole nodes, and the job had {share}: other jobs' work may be in it"
    return energy_j, "of whole nodes, which the job had to itself; without GPUs unless the site's plugin has them"


def _joules(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _names(node_list: str) -> list[str]:
    if "[" not in node_list:
        return [name for name in node_list.split(",") if name]
    return slurm.tool("scontrol", "show", "hostnames", node_list).stdout.split()


def import_accounting(folder: Path) -> tuple[AccountedJob, ...]:
    """Ask sacct for the jobs of a run or group and keep the answer beside the scripts; () where there is no sacct."""
    jobs = read_jobs(folder)
    if jobs is None or shutil.which("sacct") is None:
        return ()
    ids = ",".join(job.job_id for job in jobs.jobs)
    # --duplicates: what a job took before it was requeued; the day: numbers of jobs are used again after some years
    asked = ("--duplicates", f"--jobs={ids}", f"--starttime={_day_before(jobs)}", f"--format={','.join(FIELDS)}")
    told = slurm.tool("sacct", "--noheader", "--parsable2", *asked)
    if told.returncode != 0:
        return ()
    found = parse_accounting(told.stdout, _node_cpus())
    write_json(folder / FOLDER / FILE, {"jobs": [row.model_dump(mode="json") for row in found]})
    return found


def _day_before(jobs: JobsFile) -> str:
    """Early enough in whatever time zone the cluster reads it."""
    first = min(datetime.fromisoformat(job.submitted_at) for job in jobs.jobs)
    return (first - timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%S")


def _node_cpus() -> dict[str, int]:
    told = slurm.tool("sinfo", "--noheader", "--Node", "--format=%N|%c")
    rows = [line.strip().split("|") for line in told.stdout.splitlines() if "|" in line]
    return {name: int(cpus) for name, cpus in rows if cpus.isdigit()}
