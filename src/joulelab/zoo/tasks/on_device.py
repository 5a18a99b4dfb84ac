"""What becomes of a batch on its device, step after step: images are made or decoded there, then cut, then masked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from joulelab.data.batches import TensorBatch

Tensors = Mapping[str, Tensor]


def then(batch: TensorBatch, more: Callable[[Tensors], Tensors]) -> TensorBatch:
    """The batch, with one more step after what it already becomes."""
    first = batch.expand
    return replace(batch, expand=more if first is None else lambda tensors: more(first(tensors)))
