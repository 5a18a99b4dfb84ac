"""An image classifier's predictions on held-out images, item by item. Shapes: B batch, N images, C classes."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import nn

from joulelab.data.batches import Rows, TensorBatch
from joulelab.evaluate.classification import Predictions

_HELD_OUT_DRAW = 0  # synthetic images are drawn; held-out ones are the same at every look


class HeldOut(Protocol):
    @property
    def rows(self) -> Rows: ...

    def batch(self, rows: Rows, draw: int) -> TensorBatch: ...


@torch.inference_mode()
def predict_images(model: nn.Module, images: HeldOut, device: torch.device, batch_size: int = 128) -> Predictions:
    model.eval()
    labels, probabilities = [], []
    for start in range(0, len(images.rows), batch_size):
        rows = images.rows[start : start + batch_size]
        batch = images.batch(rows, _HELD_OUT_DRAW + start).to(device)
        logits_BC = model(pixel_values=batch["pixels"]).logits
        labels.append(batch["labels"].cpu().numpy())
        probabilities.append(logits_BC.float().softmax(dim=-1).cpu().numpy())
    probabilities_NC = np.concatenate(probabilities)
    ids = np.array([str(row) for row in images.rows])
    return Predictions(ids, np.concatenate(labels), probabilities_NC.argmax(axis=1), probabilities_NC)
