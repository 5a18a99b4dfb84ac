"""What Slurm itself says a job took, beside our own figure and never in its place.

Slurm counts by a plugin of the site (RAPL, IPMI, or none), for whole nodes. It knows no NVIDIA joules unless the plugin
does, reads 0 where the plugin is off, and on a node that several jobs share each of them is told everybody's.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from joulelab.cluster import slurm
from joulelab.cluster.jobs_file import FOLDER, read_jobs
from joulelab.meter.figures import Frozen
from joulelab.runs.json_file import write_json
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
    """`sacct --parsable2 --noheader` with `FIELDS`; `node_cpus` tells a job that has part of its node."""
    jobs = []
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != len(FIELDS):
            continue
        facts: dict[str, Any] = dict(zip(FIELDS, cells, strict=True))
        if "." in facts["JobID"]:  # a step: the job's own line has it all
            continue
        energy_j, remark = _judge(facts, node_cpus or {})
        jobs.append(
            AccountedJob(
                job_id=facts["JobID"],
                state=facts["State"].split()[0] if facts["State"] else "",
                elapsed=facts["Elapsed"],
                nodes=facts["NodeList"],
                energy_j=energy_j,
                remark=remark,
            )
        )
    return tuple(jobs)


def _judge(facts: dict[str, Any], node_cpus: dict[str, int]) -> tuple[float | None, str]:
    raw = facts["ConsumedEnergyRaw"].strip()
    if not raw.isdigit():
        return None, "Slurm's accounting has no energy for it"
    if int(raw) == 0:
        return None, "Slurm says 0 J: its energy plugin is off or saw nothing (AcctGatherEnergyType)"
    whole = sum(node_cpus.get(node, 0) for node in _names(facts["NodeList"]))
    given = int(facts["AllocCPUS"] or 0)
    if not whole or given < whole:
        share = f"{given} of {whole} CPUs" if whole else "an unknown share"
        return float(raw), f"of whole nodes, and the job had {share}: other jobs' work may be in it"
    return float(raw), "of whole nodes, which the job had to itself; without GPUs unless the site's plugin has them"


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
    told = slurm.tool("sacct", "--noheader", "--parsable2", f"--jobs={ids}", f"--format={','.join(FIELDS)}")
    if told.returncode != 0:
        return ()
    found = parse_accounting(told.stdout, _node_cpus())
    write_json(folder / FOLDER / FILE, {"jobs": [row.model_dump(mode="json") for row in found]})
    return found


def _node_cpus() -> dict[str, int]:
    told = slurm.tool("sinfo", "--noheader", "--Node", "--format=%N|%c")
    rows = [line.strip().split("|") for line in told.stdout.splitlines() if "|" in line]
    return {name: int(cpus) for name, cpus in rows if cpus.isdigit()}
