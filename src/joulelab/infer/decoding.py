"""Generation taken apart: reading the prompt (prefill), and one token after the other (decode), each on its own.

Both work on a key-value cache of fixed size, so that a decoding step has the same shape every time and can be compiled
or launched as one CUDA graph; the step also picks the likeliest token and writes it where the next step reads it, so
the host has nothing to do between two tokens. After a response the cache is set back to the end of the prompt, which
still lies in it: decoding can then be repeated for as long as a measurement wants without reading the prompt again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from joulelab.errors import ConfigError, JoulelabError
from joulelab.infer.capture import captured
from joulelab.infer.generation.key_values import set_back
from joulelab.zoo.pretrained import import_transformers

_BLOCK = 64
_CHECKED_STEPS = 4


class Decoder:
    """A causal language model with prompts of one length; every response has the same number of tokens."""

    def __init__(self, model: Any, prompts_BT: Tensor, new_tokens: int) -> None:
        self._model = model
        self._prompts_BT = prompts_BT
        rows, self.prompt_tokens = prompts_BT.shape
        self.new_tokens = new_tokens
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit is not None and self.prompt_tokens + new_tokens > limit:
            raise ConfigError(
                f"{self.prompt_tokens} prompt tokens and {new_tokens} new ones do not fit into {limit} positions",
                "ask for fewer with --prompt-tokens and --new-tokens",
            )
        size = -(-(self.prompt_tokens + new_tokens) // _BLOCK) * _BLOCK
        device = prompts_BT.device
        self._cache = import_transformers().StaticCache(config=model.config, max_cache_len=size)
        # what is still to come counts as there: causality hides it, and the mask need never change
        self._mask_BT = torch.ones(rows, size, dtype=torch.long, device=device)
        self._prompt_places_BT = torch.arange(self.prompt_tokens, device=device).expand(rows, -1)
        self._token_B1 = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._place_B1 = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._one_step: Callable[[], Any] = self._step
        for written in (self._token_B1, self._place_B1, self._mask_BT):
            torch._dynamo.mark_static_address(written)  # a compiled step may then write to it from a CUDA graph
        self.prefill()

    def prefill(self) -> None:
        """Read the prompts and choose the first token of each response."""
        set_back(self._cache, 0)
        self._read(self._prompts_BT, self._prompt_places_BT)
        self._place_B1.fill_(self.prompt_tokens)

    def begin_again(self) -> None:
        """Back to the end of the prompt, with some token to go on from: which one makes no difference to the work."""
        set_back(self._cache, self.prompt_tokens)
        self._place_B1.fill_(self.prompt_tokens)

    def decode(self) -> None:
        """All tokens of a response but the first, which prefill gave."""
        for _ in range(self.new_tokens - 1):
            self._one_step()

    def response(self) -> None:
        self.prefill()
        self.decode()

    def prepare(self, mode: str) -> None:
        """`compiled` and `cuda-graph` change the step; reading the prompt stays as it is."""
        if mode == "eager":
            return
        expected = self._tokens(_CHECKED_STEPS)
        self._one_step = self._compiled() if mode == "compiled" else self._graphed()
        if self._tokens(_CHECKED_STEPS) != expected:
            raise JoulelabError(
                f"decoding by {mode} gives other tokens than eager decoding",
                "this model or this version of transformers keeps its place outside the GPU; use --mode eager",
            )

    def _compiled(self) -> Callable[[], Any]:
        mode = "reduce-overhead" if self._token_B1.is_cuda else None
        step: Callable[[], Any] = torch.compile(self._step, mode=mode, dynamic=False)
        return step

    def _graphed(self) -> Callable[[], Any]:
        self.begin_again()
        return captured(self._step)

    def _tokens(self, steps: int) -> list[int]:
        """What a few steps after the prompt say."""
        self.prefill()
        found = []
        for _ in range(steps):
            self._one_step()
            found += self._token_B1.flatten().tolist()
        return found

    def _step(self) -> None:
        self._read(self._token_B1, self._place_B1)
        self._place_B1.add_(1)

    def _read(self, ids_BT: Tensor, places_BT: Tensor) -> None:
        logits_BV = self._model(
            input_ids=ids_BT,
            attention_mask=self._mask_BT,
            position_ids=places_BT,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        self._token_B1.copy_(logits_BV.argmax(-1, keepdim=True))
