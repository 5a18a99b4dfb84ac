"""Batches of masked or causal sequences, and which of their positions enter the losses.

Everything is decided on the host: asking a GPU how many tokens are masked would make the host wait.

How many tokens of a row are masked follows from its length alone. So the share of masked tokens is a constant of the
data, and a sum over masked positions divided by it is a mean over them, however rows are batched.

Shapes: B rows, T tokens, K masked positions over all rows, N positions that are projected to the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joulelab.data.batches import TensorBatch, batch_order, padded_share
from joulelab.data.masking import mask_weights
from joulelab.distill.chunked import Positions
from joulelab.distill.distilbert.config import LmData, LmDistillation
from joulelab.distill.distilbert.data import Corpus, Sequences, sequences_of
from joulelab.distill.losses import NO_TARGET
from joulelab.errors import ConfigError

VALIDATION_SEED = 0
"""Held-out tokens are masked in the same way in all runs, so that all models have the same task."""

Ids = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]


# masking


@dataclass(frozen=True, eq=False)
class MaskRecipe:
    share: float
    """Share of a row's tokens that is predicted."""
    shown_as_mask: float
    shown_as_random: float
    """Of those; the rest are shown unchanged."""
    mask_id: int
    weights_V: NDArray[np.float64]
    """Sampling weight of each token, 0 for one that is never masked."""


@dataclass(frozen=True, eq=False)
class MaskedRows:
    input_ids_BT: Ids
    positions_K: Ids
    """Flat, in order."""
    targets_K: Ids
    """The original tokens."""


def masked_per_row(lengths_B: Ids, share: float) -> Ids:
    return np.maximum(1, np.round(share * lengths_B)).astype(np.int64)


def mask_rows(ids_BT: Ids, lengths_B: Ids, recipe: MaskRecipe, random: np.random.Generator) -> MaskedRows:
    """Rows are padded on the right to T; padding is never masked."""
    chosen_BT = _choose(ids_BT, lengths_B, recipe, random)
    positions_K = np.flatnonzero(chosen_BT).astype(np.int64)
    targets_K = ids_BT.reshape(-1)[positions_K]
    uniform_K = random.random(len(positions_K))
    random_K = random.integers(0, len(recipe.weights_V), size=len(positions_K))
    shown_K = np.where(uniform_K < recipe.shown_as_mask + recipe.shown_as_random, random_K, targets_K)
    shown_K = np.where(uniform_K < recipe.shown_as_mask, recipe.mask_id, shown_K)
    input_ids_BT = ids_BT.copy()
    input_ids_BT.reshape(-1)[positions_K] = shown_K
    return MaskedRows(input_ids_BT, positions_K, targets_K)


def _choose(ids_BT: Ids, lengths_B: Ids, recipe: MaskRecipe, random: np.random.Generator) -> NDArray[np.bool_]:
    """Weighted sampling without replacement: the smallest values of Exp(1) / weight in each row (Efraimidis and
    Spirakis, 2006)."""
    weights_BT = recipe.weights_V[ids_BT] * (np.arange(ids_BT.shape[1]) < lengths_B[:, None])
    with np.errstate(divide="ignore"):
        keys_BT = random.exponential(size=ids_BT.shape) / weights_BT
    ranks_BT = keys_BT.argsort(axis=1).argsort(axis=1)
    return (ranks_BT < masked_per_row(lengths_B, recipe.share)[:, None]) & (weights_BT > 0)


# batches


@dataclass(frozen=True, eq=False)
class LmBatch(TensorBatch):
    """`count` is all tokens without padding; terms at fewer positions are scaled up by their constant share of them."""

    positions_used: int = field(default=0, kw_only=True)
    """How many positions enter the losses, the first ones in processing order."""
    positions_targeted: int = field(default=0, kw_only=True)
    """How many positions, the first ones, may have a target."""
    predicted: int = field(default=0, kw_only=True)
    """Positions with a target."""

    def to(self, device: torch.device) -> LmBatch:
        return cast(LmBatch, super().to(device))

    @property
    def positions(self) -> Positions:
        order_N = self.tensors.get("order")
        return Positions(self["targets"], self["weights"], self.positions_used, self.positions_targeted, order_N)

    @property
    def rows(self) -> Tensor | None:
        """Flat positions whose features are needed; None: all of them."""
        return self.tensors.get("rows")

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {name: self[name] for name in ("input_ids", "attention_mask") if name in self.tensors}


@dataclass(frozen=True, eq=False)
class LmTask:
    """How a batch is made from sequences."""

    recipe: MaskRecipe | None
    """None: every token is predicted from those before it."""
    everywhere: bool
    """All tokens are projected to the vocabulary; else only the masked ones."""
    pad_id: int

    def targets_share(self, lengths: Ids) -> float:
        """Share of the tokens that is predicted: a constant of the data, whatever is sampled."""
        if self.recipe is None:
            return float((lengths - 1).sum() / lengths.sum())
        return float(masked_per_row(lengths, self.recipe.share).sum() / lengths.sum())

    def batch(self, sequences: list[Ids], random: np.random.Generator) -> LmBatch:
        ids_BT, lengths_B = padded(sequences, self.pad_id)
        if self.recipe is None:
            return _causal(ids_BT, lengths_B)
        return _masked(ids_BT, lengths_B, self.recipe, self.everywhere, random)


def make_task(corpus: Corpus, config: LmDistillation, everywhere: bool) -> LmTask:
    special = corpus.store.specials
    pad_id = special.get("pad", special.get("eos", 0))
    if not config.mlm:
        return LmTask(None, True, pad_id)
    if "mask" not in special:
        raise ConfigError(
            f"the tokenizer {corpus.store.tokenizer} has no mask token", "use the tokenizer of a masked model"
        )
    recipe = MaskRecipe(
        share=config.mlm_mask_prop,
        shown_as_mask=config.word_mask,
        shown_as_random=config.word_rand,
        mask_id=special["mask"],
        weights_V=mask_weights(corpus.counts_V, config.mlm_smoothing, special),
    )
    return LmTask(recipe, everywhere, pad_id)


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
        """Of rows of one length a last, smaller batch is dropped: its shape would be compiled separately."""
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


def held_out_batches(corpus: Corpus, data: LmData, config: LmDistillation, batch_size: int) -> LmBatches:
    sequences = sequences_of(corpus, corpus.held_out, data)
    return LmBatches(sequences, make_task(corpus, config, everywhere=False), batch_size, VALIDATION_SEED)


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
        loss: Arrays = {"rows": masked.positions_K, "targets": masked.targets_K, "weights": np.ones(count, np.float32)}
        return _batch(masked.input_ids_BT, lengths_B, loss, used=count, targeted=count)
    real_BT = _real(ids_BT, lengths_B)
    is_masked_BT = np.zeros(ids_BT.shape, dtype=bool)
    is_masked_BT.reshape(-1)[masked.positions_K] = True
    # masked, other tokens, padding: a chunk without masked ones needs no cross-entropy, one of padding nothing
    order_N = np.argsort(np.where(is_masked_BT, 0, np.where(real_BT, 1, 2)).reshape(-1), kind="stable")
    targets_N = np.full(ids_BT.size, NO_TARGET, dtype=np.int64)
    targets_N[:count] = masked.targets_K
    loss = {"order": order_N, "targets": targets_N, "weights": real_BT.reshape(-1)[order_N].astype(np.float32)}
    return _batch(masked.input_ids_BT, lengths_B, loss, used=int(lengths_B.sum()), targeted=count)


def _causal(ids_BT: Ids, lengths_B: Ids) -> LmBatch:
    """Shifted: a position's target is the next token of its row; the last token of a row has none."""
    targets_BT = np.full(ids_BT.shape, NO_TARGET, dtype=np.int64)
    targets_BT[:, :-1] = np.where(_real(ids_BT, lengths_B)[:, 1:], ids_BT[:, 1:], NO_TARGET)
    loss: Arrays = {
        "targets": targets_BT.reshape(-1),
        "weights": _real(ids_BT, lengths_B).reshape(-1).astype(np.float32),
    }
    return _batch(ids_BT, lengths_B, loss, used=ids_BT.size, targeted=ids_BT.size)


def _batch(ids_BT: Ids, lengths_B: Ids, loss: Arrays, used: int, targeted: int) -> LmBatch:
    predicted = int((loss["targets"] != NO_TARGET).sum())
    arrays = {"input_ids": ids_BT, **loss}
    if int(lengths_B.min()) < ids_BT.shape[1]:  # a mask that masks nothing would rule the fast attention out
        arrays["attention_mask"] = _real(ids_BT, lengths_B).astype(np.int64)
    tokens = int(lengths_B.sum())
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
    return LmBatch(
        tensors, len(lengths_B), tokens,
        count=tokens, positions_used=used, positions_targeted=targeted, predicted=predicted,
    )  # fmt: skip


def _real(ids_BT: Ids, lengths_B: Ids) -> NDArray[np.bool_]:
    real_BT: NDArray[np.bool_] = np.arange(ids_BT.shape[1]) < lengths_B[:, None]
    return real_BT
