"""Longformer's masked language modelling, with its sliding window in fused kernels.

transformers cuts the window out of skewed matrices by copying; at 4,096 tokens that is most of a step. Here a block of
queries, as long as half a window, meets three blocks of keys in one call of torch's own attention, under a mask of the
window's shape. A test holds the two against each other.

Shapes: B rows, H heads, T tokens in N blocks of W tokens, D features of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from joulelab.zoo.request import WorkloadRequest
from joulelab.zoo.tasks import masked_lm
from joulelab.zoo.workload import Workload


def prepare(request: WorkloadRequest) -> Workload:
    workload = masked_lm.prepare(request)
    fuse_attention(workload.model, request.shape["tokens"])
    return workload


def fuse_attention(model: nn.Module, tokens: int) -> None:
    """Where the length is one of whole windows; at others transformers pads, and keeps its own attention."""
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    fused = type("FusedWindowAttention", (FusedWindow, LongformerSelfAttention), {})
    for module in model.modules():
        if isinstance(module, LongformerSelfAttention) and tokens % (2 * module.one_sided_attn_window_size) == 0:
            window = module.one_sided_attn_window_size
            module.register_buffer("visible", _visible(tokens // window, window), persistent=False)
            module.__class__ = fused
            module.tokens = tokens


class FusedWindow(nn.Module):
    """Mixed into Longformer's attention, for rows of one length without padding."""

    tokens: int
    visible: Tensor
    """[N, 1, W, 3 W]: which keys of its three blocks a query sees."""
    one_sided_attn_window_size: int
    num_heads: int
    dropout: float

    def forward(self, hidden_states: Tensor, *args: Any, is_global_attn: Any = None, **kwargs: Any) -> Any:
        if hidden_states.shape[1] != self.tokens or is_global_attn or args or kwargs.get("output_attentions"):
            return super().forward(hidden_states, *args, is_global_attn=is_global_attn, **kwargs)
        modules: Any = (self.query, self.key, self.value)
        query, key, value = (self._blocks(project(hidden_states)) for project in modules)
        rows = len(query)
        context = functional.scaled_dot_product_attention(
            query.flatten(0, 1),
            _with_neighbours(key).flatten(0, 1),
            _with_neighbours(value).flatten(0, 1),
            attn_mask=self.visible.expand(rows, *self.visible.shape).flatten(0, 1),
            dropout_p=self.dropout if self.training else 0.0,
        )
        return (context.view(query.shape).transpose(2, 3).flatten(3).flatten(1, 2),)

    def _blocks(self, features: Tensor) -> Tensor:
        """[B, T, H * D] as [B, N, H, W, D]."""
        rows, tokens, width = features.shape
        window = self.one_sided_attn_window_size
        split = features.view(rows, tokens // window, window, self.num_heads, width // self.num_heads)
        return split.transpose(2, 3)


def _with_neighbours(blocks_BNHWD: Tensor) -> Tensor:
    """Each block between the one before and the one after, [B, N, H, 3 W, D]; zeros stand beyond the ends."""
    padded = functional.pad(blocks_BNHWD, (0, 0, 0, 0, 0, 0, 1, 1))
    return torch.cat([padded[:, :-2], blocks_BNHWD, padded[:, 2:]], dim=3)


def _visible(blocks: int, window: int) -> Tensor:
    distance = torch.arange(3 * window) - window - torch.arange(window)[:, None]
    place = torch.arange(blocks)[:, None] * window + torch.arange(3 * window) - window  # of a key in the whole text
    inside = (place >= 0) & (place < blocks * window)
    return ((distance.abs() <= window) & inside[:, None, :]).unsqueeze(1)
