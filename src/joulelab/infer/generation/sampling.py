"""The next token of every row: the likeliest, or drawn from a shaped distribution with a number of the row's own.

Each answer has its own stream of numbers, made from seed, prompt and answer number. A token is where that number falls
in the row's cumulated probabilities: who else is in the batch does not matter.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joulelab.infer.generation.settings import GenerationSettings


def own_numbers(settings: GenerationSettings, prompt_ids: Sequence[int], answer: int) -> NDArray[np.float64]:
    """In [0, 1), one for each token the answer may have."""
    text = f"{settings.seed}:{answer}:{','.join(map(str, prompt_ids))}"
    entropy = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    return np.random.default_rng(entropy).random(settings.max_new_tokens)


def choose(logits_RV: Tensor, settings: GenerationSettings, numbers_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens, and their log-probabilities by the model itself (temperature 1, nothing filtered)."""
    own_RV = torch.log_softmax(logits_RV.float(), -1)
    tokens_R = own_RV.argmax(-1) if numbers_R is None else _draw(own_RV, settings, numbers_R)
    return tokens_R, own_RV.gather(-1, tokens_R[:, None]).squeeze(-1)


def _draw(own_RV: Tensor, settings: GenerationSettings, numbers_R: Tensor) -> Tensor:
    scores_RV, order_RV = (own_RV / settings.temperature).sort(dim=-1, descending=True, stable=True)
    if settings.top_k:
        scores_RV = scores_RV[:, : settings.top_k]
    chances_RV = torch.softmax(scores_RV.double(), -1)
    summed_RV = chances_RV.cumsum(-1)
    if settings.top_p < 1:
        # the token that passes the mark is the last one in, so that at least one is
        outside_RV = summed_RV - chances_RV >= settings.top_p
        summed_RV = chances_RV.masked_fill(outside_RV, 0.0).cumsum(-1)
    mark_R1 = numbers_R[:, None] * summed_RV[:, -1:]
    # a mark rounded up to the whole sum would fall behind the last token that can be drawn
    last_R1 = (summed_RV < summed_RV[:, -1:]).sum(-1, keepdim=True)
    place_R1 = torch.searchsorted(summed_RV, mark_R1, right=True).minimum(last_R1)
    return order_RV.gather(-1, place_R1).squeeze(-1)
