"""Decoding with a key-value cache that grows by one position per step, for any model of transformers.

Prompts are padded on the left, so that the last column is every row's last token and generated tokens follow directly;
with padding on the right, padding would be between prompt and answer. Padding is masked and has no position.

Shapes: P prompts, R rows (`copies` per prompt), T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PaddedPrompts:
    ids_PT: Tensor
    mask_PT: Tensor

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], device: torch.device) -> PaddedPrompts:
        longest = max(len(prompt) for prompt in prompts)
        ids_PT = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask_PT = torch.zeros_like(ids_PT)
        for row, prompt in enumerate(prompts):
            ids_PT[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask_PT[row, longest - len(prompt) :] = 1
        return cls(ids_PT.to(device), mask_PT.to(device))

    @cached_property
    def positions_PT(self) -> Tensor:
        # The first real token of every row is at position 0, whatever padding precedes it.
        return (self.mask_PT.cumsum(-1) - 1).clamp(min=0)

    @cached_property
    def lengths_P1(self) -> Tensor:
        return self.mask_PT.sum(-1, keepdim=True)

    @cached_property
    def is_full(self) -> bool:
        return bool(self.mask_PT.all())


class CachedDecoder(Protocol):
    """Reads prompts, then one token per row at a time; returns the logits of the next token."""

    def begin(self, prompts: PaddedPrompts, copies: int) -> Tensor: ...

    def step(self, tokens_R: Tensor) -> Tensor: ...

    def keep(self, rows_R: Tensor) -> bool:
        """Continue with these rows only; returns False if the shape is fixed."""


class GrowingCacheDecoder:
    """Each prompt is read once for all its answers; finished rows leave the batch."""

    def __init__(self, model: Any) -> None:
        self._model, self._arguments = model, forward_arguments(model)

    def begin(self, prompts: PaddedPrompts, copies: int) -> Tensor:
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._model.config)
        # Without padding no mask is needed, and attention without a mask is faster.
        self._mask_RT = None if prompts.is_full else prompts.mask_PT
        self._next_R = prompts.mask_PT.sum(-1)
        logits_PV = self._read(prompts.ids_PT, prompts.positions_PT)
        # After the prompt has been read: its keys and values are the same for all of its answers.
        if copies > 1:
            self._cache.batch_repeat_interleave(copies)
            self._next_R = self._next_R.repeat_interleave(copies, 0)
            if self._mask_RT is not None:
                self._mask_RT = self._mask_RT.repeat_interleave(copies, 0)
        return logits_PV.repeat_interleave(copies, 0)

    def step(self, tokens_R: Tensor) -> Tensor:
        if self._mask_RT is not None:
            self._mask_RT = torch.cat([self._mask_RT, self._mask_RT.new_ones(len(tokens_R), 1)], -1)
        logits_RV = self._read(tokens_R[:, None], self._next_R[:, None])
        self._next_R = self._next_R + 1
        return logits_RV

    def keep(self, rows_R: Tensor) -> bool:
        self._cache.batch_select_indices(rows_R)
        self._next_R = self._next_R[rows_R]
        if self._mask_RT is not None:
            self._mask_RT = self._mask_RT[rows_R]
        return True

    def _read(self, ids_RT: Tensor, positions_RT: Tensor) -> Tensor:
        # Logits of the last position only: for a long prompt the others would take more memory than the model.
        given = {"position_ids": positions_RT, "logits_to_keep": 1}
        given = {name: value for name, value in given.items() if name in self._arguments}
        output = self._model(
            input_ids=ids_RT, attention_mask=self._mask_RT, past_key_values=self._cache, use_cache=True, **given
        )
        return output.logits[:, -1]  # type: ignore[no-any-return]


def rewind_cache(cache: Any, place: int) -> None:
    """Continue a static cache from this position. Later entries are hidden by the causal mask until overwritten."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(place)
        if hasattr(layer, "cumulative_length_int"):  # a sliding window also counts on the host
            layer.cumulative_length_int = place


def forward_arguments(model: Any) -> set[str]:
    """Arguments of the model's forward method, looking through wrappers. A wrapper that takes **kwargs names none, and
    omitting the mask for that reason would let rows attend to their padding."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    forwards = [vars(kind)["forward"] for kind in type(inner).__mro__ if "forward" in vars(kind)]
    return {name for forward in forwards for name in inspect.signature(forward).parameters}
