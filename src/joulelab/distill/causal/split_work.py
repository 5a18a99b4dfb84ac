"""Sharded work of the language-model pipelines: `Runner.make_sharded` for a `Bench`."""

from __future__ import annotations

from joulelab.distill.causal.bench import Bench
from joulelab.distill.causal.config import CausalSpec
from joulelab.distill.runner import Runner, ShardedWork
from joulelab.runs.artifacts import Artifact


def worked(bench: Bench, work: ShardedWork) -> Artifact:
    """The whole, or the shard that this run is to do."""
    runner: Runner[CausalSpec] = Runner(bench.run, bench.ranks)
    return runner.make_sharded(work)
