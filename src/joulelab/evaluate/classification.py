"""Predictions of a classifier on a held-out set, item by item, so that two models can be compared in pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from joulelab.data.batches import iterate_in_order
from joulelab.data.tokenised import TokenisedSet
from joulelab.runs.record import Result

PREDICTIONS = "predictions.npz"


@dataclass(frozen=True, eq=False)
class Predictions:
    ids: NDArray[np.str_]
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]

    def accuracy(self) -> Result:
        right = int((self.labels == self.predicted).sum())
        return Result(value=right / len(self.labels), trials=len(self.labels), successes=right)

    def save(self, folder: Path) -> None:
        np.savez(folder / PREDICTIONS, ids=self.ids, labels=self.labels, predicted=self.predicted)


def load_predictions(folder: Path) -> Predictions:
    with np.load(folder / PREDICTIONS, allow_pickle=False) as arrays:
        return Predictions(arrays["ids"], arrays["labels"], arrays["predicted"])


@torch.inference_mode()
def predict(
    model: nn.Module, dataset: TokenisedSet, batch_size: int, device: torch.device, tick: Callable[[int, int], None]
) -> Predictions:
    """Run the whole set; `tick(samples, tokens)` is told how far it is and may end it."""
    model.eval()
    predicted = np.empty(len(dataset), dtype=np.int64)
    samples, tokens = 0, 0
    for batch in iterate_in_order(dataset, batch_size):
        on_device = batch.to(device)
        logits = model(input_ids=on_device.input_ids, attention_mask=on_device.attention_mask).logits
        predicted[batch.rows] = logits.argmax(dim=-1).cpu().numpy()
        samples, tokens = samples + batch.samples, tokens + batch.tokens
        tick(samples, tokens)
    return Predictions(np.array(dataset.ids), np.asarray(dataset.labels, dtype=np.int64), predicted)
