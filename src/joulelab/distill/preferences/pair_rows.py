"""Pairs as rows for the model: the prompt once with both answers behind it, or two rows with the prompt in each.

Once is the rule. In `prompt chosen rejected` the rejected answer has the positions it would have directly behind the
prompt and does not see the chosen one, so every token is computed as in a row of its own, and the prompt, often half of
the work, is not computed twice. The first token of each answer is predicted by the prompt's last.

Shapes: B rows, T tokens, P pairs, N answer tokens of all pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joulelab.data.batches import TensorBatch
from joulelab.distill.preferences.pairs import Pair

PROMPT, CHOSEN, REJECTED, PADDING = 0, 1, 2, -1
_ALIGNED = 64
"""Rows are multiples of this: masked attention's fast kernels want aligned masks, and few shapes compile once."""


class PairRows:
    """Makes a batch; the padding token may be any, as nobody sees it."""

    def __init__(self, shared_prompt: bool = True, aligned: int = _ALIGNED) -> None:
        self.shared_prompt, self._aligned = shared_prompt, aligned

    def batch(self, pairs: Sequence[Pair], reference_P2: NDArray[np.float64] | None = None) -> TensorBatch:
        rows = [part for pair in pairs for part in self._rows(pair)]
        length = -(-max(len(ids) for ids, _ in rows) // self._aligned) * self._aligned
        tensors = self._padded(rows, length) | self._answers(pairs, length)
        if reference_P2 is not None:
            tensors["reference"] = torch.from_numpy(reference_P2).float()
        tokens = sum(len(ids) for ids, _ in rows)
        expand = _with_mask if self.shared_prompt else None
        return TensorBatch(tensors, samples=len(pairs), tokens=tokens, count=len(pairs), expand=expand)

    def _rows(self, pair: Pair) -> list[tuple[NDArray[np.int64], NDArray[np.int8]]]:
        parts = {PROMPT: pair.prompt, CHOSEN: pair.chosen, REJECTED: pair.rejected}
        layouts = [(PROMPT, CHOSEN, REJECTED)] if self.shared_prompt else [(PROMPT, CHOSEN), (PROMPT, REJECTED)]
        return [
            (
                np.concatenate([parts[name] for name in layout]),
                np.concatenate([np.full(len(parts[name]), name, np.int8) for name in layout]),
            )
            for layout in layouts
        ]

    def _padded(self, rows: Sequence[tuple[NDArray[np.int64], NDArray[np.int8]]], length: int) -> dict[str, Tensor]:
        ids_BT = np.zeros((len(rows), length), np.int64)
        segments_BT = np.full((len(rows), length), PADDING, np.int8)
        positions_BT = np.zeros((len(rows), length), np.int64)
        for row, (ids, segments) in enumerate(rows):
            ids_BT[row, : len(ids)], segments_BT[row, : len(ids)] = ids, segments
            prompt = int((segments == PROMPT).sum())
            positions_BT[row, : len(ids)] = np.arange(len(ids))
            if self.shared_prompt:
                rejected = int((segments == REJECTED).sum())
                positions_BT[row, len(ids) - rejected : len(ids)] = prompt + np.arange(rejected)
        arrays = {"input_ids": ids_BT, "segments": segments_BT, "position_ids": positions_BT}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _answers(self, pairs: Sequence[Pair], length: int) -> dict[str, Tensor]:
        """Which hidden state predicts which token, flat, and whose sum each belongs to: 2 * pair + (0 or 1)."""
        places, targets, owners = [], [], []
        for number, pair in enumerate(pairs):
            for side, ids in enumerate((pair.chosen, pair.rejected)):
                row = number if self.shared_prompt else 2 * number + side
                first = len(pair.prompt) + (len(pair.chosen) if self.shared_prompt and side else 0)
                before = np.arange(first - 1, first - 1 + len(ids))
                before[0] = len(pair.prompt) - 1
                places.append(row * length + before)
                targets.append(ids)
                owners.append(np.full(len(ids), 2 * number + side))
        lengths_P2 = np.array([[len(pair.chosen), len(pair.rejected)] for pair in pairs], np.float32)
        arrays = {
            "places": np.concatenate(places),
            "targets": np.concatenate(targets),
            "owners": np.concatenate(owners),
            "answer_tokens": lengths_P2,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def visible(segments_BT: Tensor) -> Tensor:
    """[B, 1, T, T], True where the query (third axis) sees the key: what came before in the prompt or its own answer.

    Padding sees the prompt, which does no harm: attention over nothing at all would be NaN.
    """
    length = segments_BT.shape[1]
    before_TT = torch.ones(length, length, dtype=torch.bool, device=segments_BT.device).tril()
    key_B1T, query_BT1 = segments_BT[:, None, :], segments_BT[:, :, None]
    related_BTT = (key_B1T == PROMPT) | ((key_B1T == query_BT1) & (key_B1T != PADDING))
    return (before_TT & related_BTT)[:, None]


def _with_mask(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {**tensors, "attention_mask": visible(tensors["segments"])}
