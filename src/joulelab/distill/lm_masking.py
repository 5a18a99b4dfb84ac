"""Dynamic masking on the host: a fixed share of every row, rare tokens more often, drawn anew when it comes again.

How many tokens of a row are masked follows from its length alone. So the share of masked tokens is a constant of the
data, and a sum over masked positions divided by it is a mean over them, however rows meet in batches.

Shapes: B rows, T tokens, K masked positions over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MaskRecipe:
    share: float
    """Of a row's tokens, to be predicted."""
    shown_as_mask: float
    shown_as_random: float
    """Of those; the rest are shown as they are."""
    mask_id: int
    weights_V: NDArray[np.float64]
    """How readily a token is chosen, 0 for one that never is."""


@dataclass(frozen=True, eq=False)
class MaskedRows:
    input_ids_BT: Ids
    positions_K: Ids
    """Flat, in order."""
    targets_K: Ids
    """What stood there."""


def masked_per_row(lengths_B: Ids, share: float) -> Ids:
    return np.maximum(1, np.round(share * lengths_B)).astype(np.int64)


def mask_rows(ids_BT: Ids, lengths_B: Ids, recipe: MaskRecipe, random: np.random.Generator) -> MaskedRows:
    """Rows are padded on the right to T; padding is never chosen."""
    chosen_BT = _choose(ids_BT, lengths_B, recipe, random)
    positions_K = np.flatnonzero(chosen_BT).astype(np.int64)
    targets_K = ids_BT.reshape(-1)[positions_K]
    fate_K = random.random(len(positions_K))
    another_K = random.integers(0, len(recipe.weights_V), size=len(positions_K))
    shown_K = np.where(fate_K < recipe.shown_as_mask + recipe.shown_as_random, another_K, targets_K)
    shown_K = np.where(fate_K < recipe.shown_as_mask, recipe.mask_id, shown_K)
    input_ids_BT = ids_BT.copy()
    input_ids_BT.reshape(-1)[positions_K] = shown_K
    return MaskedRows(input_ids_BT, positions_K, targets_K)


def _choose(ids_BT: Ids, lengths_B: Ids, recipe: MaskRecipe, random: np.random.Generator) -> NDArray[np.bool_]:
    """Draws without replacement in proportion to the weights: the smallest of Exp(1) / weight in each row."""
    weights_BT = recipe.weights_V[ids_BT] * (np.arange(ids_BT.shape[1]) < lengths_B[:, None])
    with np.errstate(divide="ignore"):
        lots_BT = random.exponential(size=ids_BT.shape) / weights_BT
    ranks_BT = lots_BT.argsort(axis=1).argsort(axis=1)
    return (ranks_BT < masked_per_row(lengths_B, recipe.share)[:, None]) & (weights_BT > 0)
