"""The reference model's log-probabilities of both answers of every pair, computed once.

The reference is the student before preference training: any other model would pull the policy towards itself, and the
first margins would not be 0. One line per pair, by content, appended as computed: an interrupted pass resumes, and a
shuffle cannot misalign it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from joulelab.distill.preferences.pairs import Pair, PairLayout, Pairs
from joulelab.distill.preferences.preference_loss import (
    TargetLogProbabilities,
    answer_log_probabilities,
    require_shared_prompt,
)
from joulelab.errors import JoulelabError
from joulelab.meter.trace import LineFile, read_lines
from joulelab.runs.sharding import ALL, Shard
from joulelab.train.optim import autocast, float32_matmul_precision


class ReferenceLogProbabilities:
    """Called with pairs, returns their [pairs, 2] log-probabilities (chosen, rejected), summed over tokens."""

    def __init__(self, logs: dict[str, tuple[float, float]]) -> None:
        self._logs = logs

    @classmethod
    def open(cls, file: Path, identity: str) -> ReferenceLogProbabilities:
        """`identity` names the weights; lines of other models are ignored."""
        lines = read_lines(file) if file.exists() else iter(())
        own = ((line["key"], line["chosen"], line["rejected"]) for line in lines if line.get("model") == identity)
        return cls({key: (chosen, rejected) for key, chosen, rejected in own})

    def __len__(self) -> int:
        return len(self._logs)

    def __contains__(self, pair: Pair) -> bool:
        return pair.key in self._logs

    def __call__(self, pairs: Sequence[Pair]) -> NDArray[np.float64]:
        missing = [pair.key for pair in pairs if pair.key not in self._logs]
        if missing:
            raise JoulelabError(
                f"the reference has no log-probabilities for {len(missing)} of {len(pairs)} pairs ({missing[0]}, ...)",
                "compute them for these pairs first (write_reference)",
            )
        return np.array([self._logs[pair.key] for pair in pairs], dtype=np.float64)


@torch.no_grad()
def write_reference(
    file: Path,
    identity: str,
    model: nn.Module,
    pairs: Pairs,
    *,
    batch_size: int,
    log_probabilities: TargetLogProbabilities,
    precision: str = "fp32",
    layout: PairLayout | None = None,
    called: nn.Module | None = None,
    tick: Callable[[int, int], None] = lambda pairs, tokens: None,
    shard: Shard = ALL,
) -> ReferenceLogProbabilities:
    """One pass over the pairs of this shard that the file lacks; `tick` gets pairs and tokens so far, earlier attempts
    included.

    Batches are cut before it is known what is stored, and a batch that lacks one pair is computed as a whole: the last
    bits of a number depend on the other rows of its batch, and an interrupted or sharded pass must give the same.

    `precision` is the training's, so that policy and reference round alike. The model has `hidden_only` and is on its
    device; it is in eval mode here, and restored afterwards. `called` is a wrapper around it, such as a compiled one.
    """
    layout, device = layout or PairLayout(), next(model.parameters()).device
    known = ReferenceLogProbabilities.open(file, identity)
    done, tokens = 0, 0
    if layout.shared_prompt:
        require_shared_prompt(model)
    was_training, lines = model.training, LineFile(file)
    model.eval()
    try:
        for some in _shard_batches(pairs, batch_size, shard):
            batch = layout.batch(some)
            if any(pair not in known for pair in some):
                with float32_matmul_precision(precision), autocast(precision, device):
                    logs_P2 = answer_log_probabilities(
                        model if called is None else called, model, batch.to(device), log_probabilities
                    ).tolist()
                new = [(pair, *logs) for pair, logs in zip(some, logs_P2, strict=True) if pair not in known]
                lines.append(*({"key": pair.key, "model": identity, "chosen": a, "rejected": b} for pair, a, b in new))
            done, tokens = done + len(some), tokens + batch.tokens
            tick(done, tokens)
        lines.sync()
    finally:
        lines.close()
        model.train(was_training)
    return ReferenceLogProbabilities.open(file, identity)


def _shard_batches(pairs: Pairs, batch_size: int, shard: Shard) -> Iterator[list[Pair]]:
    """The batches of this shard, of pairs of similar length."""
    order = np.argsort(pairs.lengths.sum(1), kind="stable").tolist()
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    for index in shard.units([pairs.pair(batch[0]).key for batch in batches]):
        yield [pairs.pair(at) for at in batches[index]]
