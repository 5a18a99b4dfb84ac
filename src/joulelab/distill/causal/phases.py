"""Data scripts: one step of an experiment by itself (`joulelab run EXPERIMENT --data-script NAME`), as settings.

What a script makes lies in a run of its own with its bill, and the experiment finds it there. Data only, so that a
login node can check it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from joulelab import lookup
from joulelab.data.chat.datasets import PRESETS
from joulelab.distill.causal.config import TEACHER_PHASES, CausalSpec, teacher_shard, teacher_work, why_not_sharded
from joulelab.errors import UsageError
from joulelab.runs.sharding import Shard
from joulelab.runs.spec import RunSpec, check

LANGUAGE_PIPELINES = ("sft", "kd", "synthetic", "dpo", "self")
PRERUN = "prerun"
"""The rehearsal of the machine; a verb of its own, which takes of the experiment only what it says about the meter."""


def _published(name: str) -> tuple[str, ...]:
    data = PRESETS[name]
    switches = (
        f"data.strip_think_blocks={str(data.strip_think_blocks).lower()}",
        f"data.code_only={str(data.code_only).lower()}",
    )
    return ("until=data", f"data.source={data.source}", f"data.subset={data.subset}", *switches)


DATA_SCRIPTS: dict[str, tuple[str, ...]] = {
    "preprocess_dataset": ("until=data",),
    "tulu_preprocess_dataset": _published("tulu-3"),
    "codeforces_preprocess_dataset": _published("codeforces-cots"),
    "openr1_math_preprocess_dataset": _published("openr1-math"),
    "logit_caching": ("until=logits",),
    "synthetic_generation": ("until=generation",),
    "preference_dataset": ("until=preferences",),
    PRERUN: (),
}


def data_script_settings(
    script: str, experiment: str, overrides: Sequence[str] = (), pipeline: str = LANGUAGE_PIPELINES[0]
) -> list[str]:
    """What the script changes in the experiment, as `key.path=value`; the user's `overrides` come after it and win.

    A local copy of a published set has no subsets: with `data.source=FILE` the one of the hub is not asked for.
    """
    if script not in DATA_SCRIPTS:
        raise lookup.unknown("data script", script, DATA_SCRIPTS)
    if pipeline not in LANGUAGE_PIPELINES:
        raise UsageError(
            f"{script} is a step of experiments with language models ({', '.join(LANGUAGE_PIPELINES)}), and "
            f"{experiment} has the pipeline {pipeline}",
            "name one of those, kd-tiny for example; `joulelab experiments` lists them",
        )
    own = DATA_SCRIPTS[script]
    given = dict(setting.split("=", 1) for setting in overrides if "=" in setting)
    if "data.source" in given and Path(given["data.source"]).exists():
        own = (*(setting for setting in own if not setting.startswith("data.subset=")), "data.subset=all")
    return [f"name={experiment}-{script}"[:85], *own]


# The run that does a share of a teacher's work; importable without torch, so that a login node can make it.


def shard_spec(spec: RunSpec, share: Shard) -> RunSpec:
    """Checked settings; a pipeline whose teacher's work cannot be split is refused with the reason."""
    why_not = _reason_against_sharding(spec)
    if why_not is not None or not isinstance(spec, CausalSpec):
        raise UsageError(f"{spec.name} cannot be split into shares: {why_not}", f"{_these()} have such work")
    return check(teacher_shard(spec, share))


def shard_specs(specs: Sequence[RunSpec], shards: int) -> list[list[RunSpec]]:
    """For each piece of teacher's work that these runs need, once however many need it, the runs that do its shares."""
    found: dict[str, RunSpec] = {}
    for spec in specs:
        if isinstance(spec, CausalSpec) and why_not_sharded(spec) is None:
            found.setdefault(json.dumps(teacher_work(spec), sort_keys=True), spec)
    chosen = list(found.values()) or [specs[0]]  # which then says why it is none
    return [[shard_spec(spec, Shard(number, shards)) for number in range(shards)] for spec in chosen]


def _reason_against_sharding(spec: RunSpec) -> str | None:
    if isinstance(spec, CausalSpec):
        return why_not_sharded(spec)
    return f"the pipeline '{spec.pipeline}' does its teacher's work in one go"


def _these() -> str:
    return ", ".join(TEACHER_PHASES)
