"""Attention that separates the documents of a packed row, for any causal model of transformers.

On a CPU, and in full precision, transformers builds a mask from positions that restart at 0. A mask rules out the fast
kernels and computes every pair of tokens of the row. On a GPU in half precision, the document bounds are passed to the
flash kernel instead, which computes only pairs within a document.

The bounds are passed in place of the mask: transformers hands a four-dimensional mask to attention unchanged. Any other
mask is handled as usual, so a model with this attention can still generate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from joulelab.data.chat.packing import NOT_TRAINED, CausalBatch, document_bounds
from joulelab.errors import ConfigError

NAME = "joulelab_packed"
_LARGEST_HEAD = 256  # of the flash kernel
_SAME_SHARE = 1e-3  # of the largest logit: more than rounding, less than the effect of a visible document


@dataclass(frozen=True)
class PackedAttention:
    """How a model is called with a batch of packed rows."""

    by_bounds: bool

    def inputs(self, batch: CausalBatch) -> dict[str, Any]:
        """For model(**inputs). No cache: with one, transformers does not treat restarted positions as documents."""
        inputs: dict[str, Any] = {"input_ids": batch.ids, "position_ids": batch.positions, "use_cache": False}
        if self.by_bounds:
            inputs["attention_mask"] = batch.bounds.view(1, 1, 1, -1)
        return inputs


def use_packed_attention(model: nn.Module) -> PackedAttention:
    """Call with the model on its device, before it is wrapped or compiled.

    A model that does not separate documents is refused: recurrent layers carry state into the next document, and some
    models ignore positions.
    """
    by_bounds = _flash_is_here(model) and _is_plain(model)
    if by_bounds:
        register()
        model.set_attn_implementation(NAME)  # type: ignore[operator]
    attention = PackedAttention(by_bounds)
    if not separates_documents(model, attention):
        raise ConfigError(
            f"{type(model).__name__} does not separate the documents of a packed row",
            "use one document per row",
        )
    return attention


@torch.no_grad()
def separates_documents(model: nn.Module, attention: PackedAttention) -> bool:
    """Checked on six tokens: the logits of the second document must not depend on the first."""
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=attention.by_bounds):
            one, other = (_second_of_two(model, attention, first, device) for first in ([1, 2, 3], [4, 5, 6]))
    finally:
        model.train(was_training)
    return bool((one - other).abs().max() <= _SAME_SHARE * one.abs().max())


def _second_of_two(model: nn.Module, attention: PackedAttention, first: list[int], device: torch.device) -> Tensor:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    batch = CausalBatch(
        ids=torch.tensor([[*first, 1, 2, 3]]),
        labels=torch.full((1, 6), NOT_TRAINED),
        positions=positions,
        documents=torch.tensor([[0, 0, 0, 1, 1, 1]]),
        bounds=document_bounds(positions),
        rows=np.zeros(1, dtype=np.int64),
        tokens=6,
        count=0,
    )
    logits: Tensor = model(**attention.inputs(batch.to(device))).logits
    return logits[:, 3:].float()


def _flash_is_here(model: nn.Module) -> bool:
    device = next(model.parameters()).device
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _is_plain(model: Any) -> bool:
    """Models with capped logits or custom attention keep the mask."""
    caps = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    return bool(getattr(model, "_supports_sdpa", False)) and caps is None


def register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(
    module: Any,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    attended: tuple[Tensor, None]
    if attention_mask is None or attention_mask.dtype != torch.int32:
        attended = sdpa_attention_forward(module, query_BHTD, key_BKTD, value_BKTD, attention_mask, **kwargs)
        return attended
    bounds = attention_mask.flatten()
    query, key, value = (_computed(part) for part in (query_BHTD, key_BKTD, value_BKTD))
    if _flash_takes(query, value):
        attended = _flash(query, key, value, bounds, **kwargs), None
    else:
        mask = _mask(bounds, len(query), query.shape[2], kwargs.get("sliding_window"))
        attended = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    return attended


def _flash_takes(query: Tensor, value: Tensor) -> bool:
    size = query.shape[-1]
    fits = size == value.shape[-1] and size <= _LARGEST_HEAD and size % 8 == 0
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and fits


def _computed(part: Tensor) -> Tensor:
    """In the autocast type: autocast covers torch's own attention, but not this one."""
    kind = part.device.type
    return part.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else part


def _flash(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, **kwargs: Any) -> Tensor:
    """Concatenates the rows: the kernel takes one sequence of tokens and the document starts in it."""
    rows, heads, length, size = query.shape
    flat = [part.transpose(1, 2).reshape(rows * length, part.shape[1], size) for part in (query, key, value)]
    window = kwargs.get("sliding_window")
    limits = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        *flat,
        bounds,
        bounds,
        length,
        length,
        kwargs.get("dropout", 0.0),
        True,
        False,
        scale=kwargs.get("scaling"),
        **limits,
    )[0]
    return attended.view(rows, length, heads, size)


def _mask(bounds: Tensor, rows: int, length: int, window: int | None) -> Tensor:
    """[rows, 1, length, length]: which tokens attend to which, for inputs that the flash kernel does not accept."""
    place = torch.arange(rows * length, device=bounds.device)
    document = torch.searchsorted(bounds, place.to(bounds.dtype), right=True).view(rows, length)
    seen = document[:, :, None] == document[:, None, :]
    distance = torch.arange(length, device=bounds.device)
    distance = distance[:, None] - distance[None, :]
    seen = seen & (distance >= 0)
    if window is not None:
        seen = seen & (distance < window)
    return seen[:, None]
