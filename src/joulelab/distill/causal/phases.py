"""Parts of an experiment as runs of their own: data scripts, and shards of the teacher's work.

A data script (`joulelab run EXPERIMENT --data-script NAME`) is a name for an `until` setting, with the source of a
published dataset for some. Its run makes an artifact with its energy bill, and the experiment finds it in the store.

Importable without torch, so that a login node can check the settings.
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
"""Checks the machine through a separate command; uses only the meter settings of the experiment."""


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
    """The script's changes to the experiment, as `key.path=value`; the user's `overrides` come later and win.

    A local copy of a published dataset has no subsets, so with `data.source=FILE` the hub's subset is not used.
    """
    if script not in DATA_SCRIPTS:
        raise lookup.unknown("data script", script, DATA_SCRIPTS)
    if pipeline not in LANGUAGE_PIPELINES:
        raise UsageError(
            f"{script} is for experiments with language models ({', '.join(LANGUAGE_PIPELINES)}), and "
            f"{experiment} has the pipeline {pipeline}",
            "use one of those, for example kd-tiny; `joulelab experiments` lists them",
        )
    own = DATA_SCRIPTS[script]
    given = dict(setting.split("=", 1) for setting in overrides if "=" in setting)
    if "data.source" in given and Path(given["data.source"]).exists():
        own = (*(setting for setting in own if not setting.startswith("data.subset=")), "data.subset=all")
    return [f"name={experiment}-{script}"[:85], *own]


def shard_spec(spec: RunSpec, shard: Shard) -> RunSpec:
    """Checked settings of the run that does this shard of the teacher's work."""
    reason = _why_not_sharded(spec)
    if reason is not None or not isinstance(spec, CausalSpec):
        raise UsageError(
            f"{spec.name} cannot be sharded: {reason}",
            f"pipelines whose teacher's work can be sharded: {', '.join(TEACHER_PHASES)}",
        )
    return check(teacher_shard(spec, shard))


def shard_specs(specs: Sequence[RunSpec], shards: int) -> list[list[RunSpec]]:
    """The runs of all shards, for each teacher's work that these runs need; work that several need is listed once."""
    works: dict[str, RunSpec] = {}
    for spec in specs:
        if isinstance(spec, CausalSpec) and why_not_sharded(spec) is None:
            works.setdefault(json.dumps(teacher_work(spec), sort_keys=True), spec)
    chosen = list(works.values()) or [specs[0]]  # which then raises with the reason
    return [[shard_spec(spec, Shard(number, shards)) for number in range(shards)] for spec in chosen]


def _why_not_sharded(spec: RunSpec) -> str | None:
    if isinstance(spec, CausalSpec):
        return why_not_sharded(spec)
    return f"the pipeline '{spec.pipeline}' has no teacher's work that can be divided"
