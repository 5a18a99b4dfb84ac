"""What the reference says about every pair, computed once. The reference is the student as it starts: another model
there would pull the policy towards itself, and the first margins would not be 0.

One line a pair, by content, appended as they come: a killed pass goes on, and a shuffle cannot misalign it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from joulelab.distill.preferences.pair_batches import Pairs
from joulelab.distill.preferences.pair_rows import PairRows
from joulelab.distill.preferences.pairs import Pair
from joulelab.distill.preferences.policy import answer_log_probabilities, require_shared_prompt
from joulelab.distill.preferences.target_log_probabilities import Projecting
from joulelab.errors import JoulelabError
from joulelab.meter.trace import LineFile, read_lines
from joulelab.runs.sharding import ALL, Shard
from joulelab.train.optim import autocast, float32_matmul_precision


class ReferenceLogs:
    """Called with pairs, gives their [pairs, 2] log-probabilities (chosen, rejected), summed over tokens."""

    def __init__(self, logs: dict[str, tuple[float, float]]) -> None:
        self._logs = logs

    @classmethod
    def open(cls, file: Path, identity: str) -> ReferenceLogs:
        """`identity` says which weights spoke; lines of others are not looked at."""
        lines = read_lines(file) if file.exists() else iter(())
        found = ((line["key"], line["chosen"], line["rejected"]) for line in lines if line.get("model") == identity)
        return cls({key: (chosen, rejected) for key, chosen, rejected in found})

    def __len__(self) -> int:
        return len(self._logs)

    def __contains__(self, pair: Pair) -> bool:
        return pair.key in self._logs

    def __call__(self, pairs: Sequence[Pair]) -> NDArray[np.float64]:
        absent = [pair.key for pair in pairs if pair.key not in self._logs]
        if absent:
            raise JoulelabError(
                f"the reference has said nothing about {len(absent)} of {len(pairs)} pairs ({absent[0]}, ...)",
                "compute its log-probabilities over these very pairs first (write_reference)",
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
    how: Projecting,
    precision: str = "fp32",
    rows: PairRows | None = None,
    called: nn.Module | None = None,
    tick: Callable[[int, int], None] = lambda pairs, tokens: None,
    share: Shard = ALL,
) -> ReferenceLogs:
    """One pass over the pairs of our share that are not there yet; `tick` gets pairs and tokens so far, earlier
    attempts included.

    Batches are cut before it is known what is there, and one that lacks a pair is computed again as a whole: the last
    bits of a figure depend on its neighbours, and a pass that was killed or split is to say the same.

    `precision` is the training's, so that policy and reference round alike. The model is opened for losses, on its
    device; its dropout is off here and as it was afterwards. `called` is what was wrapped around it, compiled say.
    """
    known, layout, device = ReferenceLogs.open(file, identity), rows or PairRows(), next(model.parameters()).device
    done, tokens = 0, 0
    if layout.shared_prompt:
        require_shared_prompt(model)
    was_training, lines = model.training, LineFile(file)
    model.eval()
    try:
        for some in _batches(pairs, batch_size, share):
            batch = layout.batch(some)
            if any(one not in known for one in some):
                with float32_matmul_precision(precision), autocast(precision, device):
                    asked = model if called is None else called
                    logs_P2 = answer_log_probabilities(asked, model, batch.to(device), how).tolist()
                said = [(one, *logs) for one, logs in zip(some, logs_P2, strict=True) if one not in known]
                lines.append(*({"key": one.key, "model": identity, "chosen": a, "rejected": b} for one, a, b in said))
            done, tokens = done + len(some), tokens + batch.tokens
            tick(done, tokens)
        lines.sync()
    finally:
        lines.close()
        model.train(was_training)
    return ReferenceLogs.open(file, identity)


def _batches(pairs: Pairs, batch_size: int, share: Shard) -> Iterator[list[Pair]]:
    """Of our share; pairs of like length together."""
    order = np.argsort(pairs.lengths.sum(1), kind="stable").tolist()
    cut = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    for place in share.units([pairs.pair(batch[0]).key for batch in cut]):
        yield [pairs.pair(at) for at in cut[place]]
