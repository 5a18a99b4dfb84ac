"""The run that does a share of a teacher's work; importable without torch, so that a login node can make it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from joulelab.distill.causal.config import CausalSpec
from joulelab.distill.causal.splitting import TEACHER_STEPS, teacher_share, teacher_work, why_not_split
from joulelab.errors import UsageError
from joulelab.runs.sharding import Shard
from joulelab.runs.spec import RunSpec, check


def share_spec(spec: RunSpec, share: Shard) -> RunSpec:
    """Checked settings; a pipeline whose teacher's work cannot be split is refused with the reason."""
    why_not = _why_not(spec)
    if why_not is not None or not isinstance(spec, CausalSpec):
        raise UsageError(f"{spec.name} cannot be split into shares: {why_not}", f"{_these()} have such work")
    return check(teacher_share(spec, share))


def split_works(specs: Sequence[RunSpec], shards: int) -> list[list[RunSpec]]:
    """For each piece of teacher's work that these runs need, once however many need it, the runs that do its shares."""
    found: dict[str, RunSpec] = {}
    for spec in specs:
        if isinstance(spec, CausalSpec) and why_not_split(spec) is None:
            found.setdefault(json.dumps(teacher_work(spec), sort_keys=True), spec)
    chosen = list(found.values()) or [specs[0]]  # which then says why it is none
    return [[share_spec(spec, Shard(number, shards)) for number in range(shards)] for spec in chosen]


def _why_not(spec: RunSpec) -> str | None:
    if isinstance(spec, CausalSpec):
        return why_not_split(spec)
    return f"the pipeline '{spec.pipeline}' does its teacher's work in one go"


def _these() -> str:
    return ", ".join(TEACHER_STEPS)
