"""What the teacher says about every training text, computed once for all epochs and students.

Answers are found by the text's content id, never by position or iteration: a shuffle cannot misalign them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from joulelab.data.batches import iterate_in_order
from joulelab.data.tokenised import TokenisedSet
from joulelab.distill.pooling import pool
from joulelab.errors import JoulelabError

LOGITS, FEATURES, IDS = "logits.npy", "features.npy", "ids.npy"


@torch.inference_mode()
def write_cache(
    folder: Path,
    teacher: nn.Module,
    dataset: TokenisedSet,
    *,
    layer: int,
    how: str,
    batch_size: int,
    device: torch.device,
    tick: Callable[[int, int], None],
) -> None:
    """Logits and pooled hidden states of one layer, in float32: the students' targets are exactly the teacher's."""
    teacher.eval()
    logits, features = [], []
    order: list[NDArray[np.int64]] = []
    samples, tokens = 0, 0
    for batch in iterate_in_order(dataset, batch_size):
        there = batch.to(device)
        output = teacher(input_ids=there.input_ids, attention_mask=there.attention_mask, output_hidden_states=True)
        logits.append(output.logits.float().cpu().numpy())
        features.append(pool(output.hidden_states[layer], there.attention_mask, how).float().cpu().numpy())
        order.append(batch.rows)
        samples, tokens = samples + batch.samples, tokens + batch.tokens
        tick(samples, tokens)
    by_row = np.argsort(np.concatenate(order))
    np.save(folder / LOGITS, np.concatenate(logits)[by_row])
    np.save(folder / FEATURES, np.concatenate(features)[by_row])
    np.save(folder / IDS, np.array(dataset.ids))


@dataclass(frozen=True, eq=False)
class TeacherCache:
    """The teacher's answers in the order of a data set's rows."""

    logits_NC: NDArray[np.float32]
    features_NH: NDArray[np.float32]

    def logits(self, rows: NDArray[np.int64], device: torch.device) -> Tensor:
        return torch.from_numpy(self.logits_NC[rows]).to(device)

    def features(self, rows: NDArray[np.int64], device: torch.device) -> Tensor:
        return torch.from_numpy(self.features_NH[rows]).to(device)

    @property
    def width(self) -> int:
        return int(self.features_NH.shape[1])


def open_cache(folder: Path, dataset: TokenisedSet) -> TeacherCache:
    """The cache laid out for this data set; a text the teacher has not seen is an error, not a guess."""
    place = {str(identity): number for number, identity in enumerate(np.load(folder / IDS))}
    unseen = [identity for identity in dataset.ids if identity not in place]
    if unseen:
        raise JoulelabError(
            f"{len(unseen)} of {len(dataset.ids)} training texts are not in the teacher's cache {folder}",
            "make the cache from the same data, or set reuse_artifacts=false",
        )
    rows = np.array([place[identity] for identity in dataset.ids], dtype=np.int64)
    return TeacherCache(np.load(folder / LOGITS)[rows], np.load(folder / FEATURES)[rows])
