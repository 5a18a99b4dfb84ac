"""Whether this job has the node to itself. RAPL meters the whole node, so its joules are the job's only then.

Slurm tells how many CPUs of the node a job was given, not whether it is exclusive. Fewer CPUs than the node has means
that others may be there. Where Slurm counts cores and the kernel hardware threads, a whole node looks like half of one:
the joules are then left out of the total rather than claimed, and `energy.node_shared=no` puts them back.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping


def why_shared(setting: str, environ: Mapping[str, str], node_cpus: int | None = None) -> str | None:
    """The reason why RAPL's joules are not this job's alone; None where they are."""
    if setting == "no":
        return None
    if setting == "yes":
        return "energy.node_shared=yes: the node-wide joules of RAPL include other jobs' work"
    if "SLURM_JOB_ID" not in environ:
        return None
    node_cpus = node_cpus or os.cpu_count() or 0
    given = _cpus_of_job(environ)
    if given is None:
        return "Slurm does not say how much of this node the job has; energy.node_shared=no if it is all of it"
    if given < node_cpus:
        return (
            f"the Slurm job has {given} of this node's {node_cpus} CPUs, so RAPL's joules include other jobs' work; "
            "energy.node_shared=no if the job is exclusive"
        )
    return None


def _cpus_of_job(environ: Mapping[str, str]) -> int | None:
    """CPUs of this job on this node. A step may hold fewer than its job, so the job's own count goes first."""
    per_node = _per_node(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    node = environ.get("SLURM_NODEID", "")
    if len(set(per_node)) == 1:
        return per_node[0]
    if per_node and node.isdigit() and int(node) < len(per_node):
        return per_node[int(node)]
    on_node = environ.get("SLURM_CPUS_ON_NODE", "")
    return int(on_node) if on_node.isdigit() else min(per_node, default=None)


def _per_node(text: str) -> list[int]:
    """Slurm's short form: '72(x2),36' is 72, 72, 36."""
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(times or 1)
    return counts
