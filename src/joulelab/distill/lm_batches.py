"""Batches for a language objective: tokens, and which positions enter its losses, all decided on the host.

A GPU that is asked how many tokens are masked makes the host wait; so the host, which drew them, says it beforehand.

Shapes: B rows, T tokens, N positions that are projected to the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joulelab.data.batches import TensorBatch, batch_order, padded_share
from joulelab.distill.chunked_vocabulary import Positions
from joulelab.distill.lm_masking import MaskRecipe, mask_rows, masked_per_row
from joulelab.distill.lm_rows import Sequences
from joulelab.distill.vocabulary_losses import NO_TARGET

Ids = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class LmBatch(TensorBatch):
    """`count` is all real tokens; terms at fewer positions are scaled up by their constant share of them."""

    entering: int = field(default=0, kw_only=True)
    targeted: int = field(default=0, kw_only=True)
    predicted: int = field(default=0, kw_only=True)
    """Positions with a target."""

    def to(self, device: torch.device) -> LmBatch:
        return cast(LmBatch, super().to(device))

    @property
    def positions(self) -> Positions:
        order_N = self.tensors.get("order")
        return Positions(self["targets"], self["counted"], self.entering, self.targeted, order_N)

    @property
    def rows(self) -> Tensor | None:
        """Flat positions whose features are wanted; nothing: all of them."""
        return self.tensors.get("rows")

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {name: self[name] for name in ("input_ids", "attention_mask") if name in self.tensors}


@dataclass(frozen=True, eq=False)
class LmTask:
    """What is made of a batch of sequences."""

    recipe: MaskRecipe | None
    """Nothing: every token is predicted from those before it."""
    everywhere: bool
    """All tokens are projected to the vocabulary; else the masked ones alone."""
    pad_id: int

    def targets_share(self, lengths: Ids) -> float:
        """How many of the tokens are predicted: a constant of the data, whatever is drawn."""
        if self.recipe is None:
            return float((lengths - 1).sum() / lengths.sum())
        return float(masked_per_row(lengths, self.recipe.share).sum() / lengths.sum())

    def batch(self, sequences: list[Ids], random: np.random.Generator) -> LmBatch:
        ids_BT, lengths_B = padded(sequences, self.pad_id)
        if self.recipe is None:
            return _causal(ids_BT, lengths_B)
        return _masked(ids_BT, lengths_B, self.recipe, self.everywhere, random)


class LmBatches:
    """Batches by (epoch, index): order and masks are pure functions of the seed and these two."""

    def __init__(
        self, sequences: Sequences, task: LmTask, batch_size: int, seed: int, group_by_size: bool = True
    ) -> None:
        self._sequences, self.task, self._seed = sequences, task, seed
        self._size, self._grouped = batch_size, group_by_size
        self.lengths = sequences.lengths
        self._same_length = int(self.lengths.min()) == int(self.lengths.max())
        self._epoch: int | None = None
        self._order: list[Ids] = []

    @property
    def batches_per_epoch(self) -> int:
        """Of rows of one length a last, smaller batch is left out: its odd shape would be compiled apart."""
        if self._same_length:
            return max(1, len(self.lengths) // self._size)
        return -(-len(self.lengths) // self._size)

    @property
    def padded_share(self) -> float:
        return padded_share(self.lengths, self._ordered(0))

    def at(self, epoch: int, index: int) -> LmBatch:
        if not 0 <= index < self.batches_per_epoch:
            raise IndexError(f"batch {index} of an epoch of {self.batches_per_epoch}")
        rows = self._ordered(epoch)[index]
        random = np.random.default_rng([self._seed, epoch, index, 1])
        return self.task.batch([self._sequences.at(int(row)) for row in rows], random)

    def _ordered(self, epoch: int) -> list[Ids]:
        if epoch != self._epoch:
            grouped = self._grouped and not self._same_length
            self._order = batch_order(self.lengths, self._size, self._seed, epoch, grouped)
            self._epoch = epoch
        return self._order


def padded(sequences: list[Ids], pad_id: int) -> tuple[Ids, Ids]:
    lengths_B = np.array([len(ids) for ids in sequences], dtype=np.int64)
    ids_BT = np.full((len(sequences), int(lengths_B.max())), pad_id, dtype=np.int64)
    for row, ids in enumerate(sequences):
        ids_BT[row, : len(ids)] = ids
    return ids_BT, lengths_B


def _masked(ids_BT: Ids, lengths_B: Ids, recipe: MaskRecipe, everywhere: bool, random: np.random.Generator) -> LmBatch:
    masked = mask_rows(ids_BT, lengths_B, recipe, random)
    count = len(masked.positions_K)
    if not everywhere:
        asked: Arrays = {"rows": masked.positions_K, "targets": masked.targets_K, "counted": np.ones(count, np.float32)}
        return _batch(masked.input_ids_BT, lengths_B, asked, entering=count, targeted=count)
    real_BT = _real(ids_BT, lengths_B)
    is_masked_BT = np.zeros(ids_BT.shape, dtype=bool)
    is_masked_BT.reshape(-1)[masked.positions_K] = True
    # masked, other tokens, padding: a chunk without masked ones needs no cross-entropy, one of padding nothing
    order_N = np.argsort(np.where(is_masked_BT, 0, np.where(real_BT, 1, 2)).reshape(-1), kind="stable")
    targets_N = np.full(ids_BT.size, NO_TARGET, dtype=np.int64)
    targets_N[:count] = masked.targets_K
    asked = {"order": order_N, "targets": targets_N, "counted": real_BT.reshape(-1)[order_N].astype(np.float32)}
    return _batch(masked.input_ids_BT, lengths_B, asked, entering=int(lengths_B.sum()), targeted=count)


def _causal(ids_BT: Ids, lengths_B: Ids) -> LmBatch:
    """Shifted: a position's target is the next token of its row; the last token of a row has none."""
    targets_BT = np.full(ids_BT.shape, NO_TARGET, dtype=np.int64)
    targets_BT[:, :-1] = np.where(_real(ids_BT, lengths_B)[:, 1:], ids_BT[:, 1:], NO_TARGET)
    asked: Arrays = {
        "targets": targets_BT.reshape(-1),
        "counted": _real(ids_BT, lengths_B).reshape(-1).astype(np.float32),
    }
    return _batch(ids_BT, lengths_B, asked, entering=ids_BT.size, targeted=ids_BT.size)


def _batch(ids_BT: Ids, lengths_B: Ids, asked: Arrays, entering: int, targeted: int) -> LmBatch:
    predicted = int((asked["targets"] != NO_TARGET).sum())
    tensors = {"input_ids": ids_BT, **asked}
    if int(lengths_B.min()) < ids_BT.shape[1]:  # a mask that hides nothing would rule the fast attention out
        tensors["attention_mask"] = _real(ids_BT, lengths_B).astype(np.int64)
    tokens = int(lengths_B.sum())
    held = {name: torch.from_numpy(value) for name, value in tensors.items()}
    return LmBatch(
        held, len(lengths_B), tokens, count=tokens, entering=entering, targeted=targeted, predicted=predicted
    )


def _real(ids_BT: Ids, lengths_B: Ids) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.arange(ids_BT.shape[1]) < lengths_B[:, None]
    return found
