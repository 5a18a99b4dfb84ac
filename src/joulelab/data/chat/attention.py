"""Attention that keeps the documents of a packed row apart, in any causal model of transformers.

On a CPU, and in full precision, transformers makes a mask of it: positions that begin anew tell it where a document
begins. A mask rules the fast kernels out and pays for every pair of tokens of the row. On a GPU in half precision the
documents' bounds go to the flash kernel instead, which looks at no pair that is hidden.

The bounds travel in the place of the mask: transformers hands a mask of four dimensions to attention as it is.
Any other mask is an ordinary one and is treated as such, so a model with this attention still generates.
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
_SAME_SHARE = 1e-3  # of the largest logit: rounding stays below it, and another document in sight does not


@dataclass(frozen=True)
class PackedAttention:
    """How a model is called with a batch of packed rows."""

    by_bounds: bool

    def inputs(self, batch: CausalBatch) -> dict[str, Any]:
        """For model(**inputs). No cache: transformers takes positions that begin anew for documents only without."""
        inputs: dict[str, Any] = {"input_ids": batch.ids, "position_ids": batch.positions, "use_cache": False}
        if self.by_bounds:
            inputs["attention_mask"] = batch.bounds.view(1, 1, 1, -1)
        return inputs


def use_packed_attention(model: nn.Module) -> PackedAttention:
    """To be called with the model on its device, before it is wrapped or compiled.

    A model that does not keep documents apart is refused: recurrent layers carry one into the next, and some models
    take no notice of positions.
    """
    by_bounds = _flash_is_here(model) and _is_plain(model)
    if by_bounds:
        register()
        model.set_attn_implementation(NAME)  # type: ignore[operator]
    attention = PackedAttention(by_bounds)
    if not keeps_documents_apart(model, attention):
        raise ConfigError(
            f"{type(model).__name__} does not keep the documents of a packed row apart",
            "give every document a row of its own",
        )
    return attention


@torch.no_grad()
def keeps_documents_apart(model: nn.Module, attention: PackedAttention) -> bool:
    """Tried on six tokens: what the second document makes of its words must not depend on the first."""
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
    """Models with a cap on the logits, or an attention of their own, keep the mask."""
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
    """In the numbers that autocast asks for: it knows torch's own attention, and not this one."""
    kind = part.device.type
    return part.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else part


def _flash(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, **kwargs: Any) -> Tensor:
    """All rows one after another: the kernel wants one line of tokens, and where each document begins in it."""
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
    """[rows, 1, length, length]: which tokens see which, for what the flash kernel does not take."""
    place = torch.arange(rows * length, device=bounds.device)
    document = torch.searchsorted(bounds, place.to(bounds.dtype), right=True).view(rows, length)
    seen = document[:, :, None] == document[:, None, :]
    apart = torch.arange(length, device=bounds.device)
    apart = apart[:, None] - apart[None, :]
    seen = seen & (apart >= 0)
    if window is not None:
        seen = seen & (apart < window)
    return seen[:, None]
