"""The loss that all language tasks share, and what they ask of a model's input length.

Shapes: B rows, T positions with a target, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from joulelab.zoo.request import WorkloadRequest


def summed_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """In float32 whatever the logits are: a sum of thousands of bf16 terms would be rounded to three digits."""
    return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum")


def require_room(request: WorkloadRequest, config: Any, tokens: int) -> None:
    """A position that was never embedded would be an index error deep inside the model, or on a GPU a dead context."""
    request.require_positions(getattr(config, "max_position_embeddings", None), tokens)
