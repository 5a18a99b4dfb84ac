"""The next token of every row, greedy or sampled, and the check for stop texts.

Each answer has its own stream of uniform random numbers, derived from seed, prompt and answer number. Tokens are
sampled by inverting the cumulative distribution at that number, so the rest of the batch does not affect them. Sampling
from top_p or top_k first tries the most likely tokens only, because sorting the whole vocabulary takes longer than a
decoding step of a small model; rows where that could give a different token are repeated on the whole vocabulary.
Probabilities are accumulated in float64: in float32 a cumulative sum over 150,000 tokens loses the tail.

Shapes: R rows, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joulelab.infer.generation.settings import GenerationSettings

# Almost always enough for top_p = 0.95.
_TOP_CANDIDATES = 512


def answer_random_numbers(settings: GenerationSettings, prompt_ids: Sequence[int], answer: int) -> NDArray[np.float64]:
    """Uniform in [0, 1), one per token of the answer."""
    text = f"{settings.seed}:{answer}:{','.join(map(str, prompt_ids))}"
    # 128 bits of a hash seed PCG64 through numpy's SeedSequence, so that neighboring prompts and
    # answers have independent streams. Python's own hash differs between processes.
    entropy = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    return np.random.default_rng(entropy).random(settings.max_new_tokens)


def sample_tokens(logits_RV: Tensor, settings: GenerationSettings, numbers_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens, and their log-probabilities under the model (temperature 1, no filter)."""
    own_RV = torch.log_softmax(logits_RV.float(), -1)
    tokens_R = own_RV.argmax(-1) if numbers_R is None else _sample(own_RV, settings, numbers_R)
    return tokens_R, own_RV.gather(-1, tokens_R[:, None]).squeeze(-1)


def _sample(own_RV: Tensor, settings: GenerationSettings, numbers_R: Tensor) -> Tensor:
    # log p / T differs from logits / T by a constant per row, which the softmax removes.
    scores_RV = own_RV / settings.temperature
    few_will_do = settings.top_k <= _TOP_CANDIDATES if settings.top_k else settings.top_p < 1
    if not few_will_do or scores_RV.shape[-1] <= _TOP_CANDIDATES:
        return _sample_from_all(scores_RV, settings, numbers_R)
    tokens_R, is_sure_R = _sample_from_top(scores_RV, settings, numbers_R)
    unsure_U = (~is_sure_R).nonzero().squeeze(-1)
    if len(unsure_U):
        tokens_R[unsure_U] = _sample_from_all(scores_RV[unsure_U], settings, numbers_R[unsure_U])
    return tokens_R


def _sample_from_all(scores_RV: Tensor, settings: GenerationSettings, numbers_R: Tensor) -> Tensor:
    sorted_RV, order_RV = scores_RV.sort(dim=-1, descending=True, stable=True)
    return _inverse_cdf(_filtered_probabilities(sorted_RV, scores_RV.logsumexp(-1), settings), order_RV, numbers_R)


def _sample_from_top(scores_RV: Tensor, settings: GenerationSettings, numbers_R: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, and whether the whole vocabulary would have given the same ones."""
    scores_RK, order_RK = scores_RV.topk(_TOP_CANDIDATES, dim=-1)
    # Ties are ordered by token id, as in the stable sort of the whole vocabulary.
    order_RK, by_number_RK = order_RK.sort(dim=-1)
    scores_RK, place_RK = scores_RK.gather(-1, by_number_RK).sort(dim=-1, descending=True, stable=True)
    order_RK = order_RK.gather(-1, place_RK)
    inside_RK = _filtered_probabilities(scores_RK, scores_RV.logsumexp(-1), settings)
    # Tokens as likely as the last candidate may have been left out, so none of these may have probability.
    is_sure_R = ((inside_RK == 0) | (scores_RK > scores_RK[:, -1:])).all(-1)
    return _inverse_cdf(inside_RK, order_RK, numbers_R), is_sure_R


def _filtered_probabilities(scores_RK: Tensor, total_R: Tensor, settings: GenerationSettings) -> Tensor:
    """Probabilities of sorted tokens, 0 outside top_k and top_p. `total_R`: log-sum-exp over the vocabulary."""
    chances_RK = (scores_RK.double() - total_R[:, None]).exp()
    if settings.top_k:
        chances_RK[:, settings.top_k :] = 0
        chances_RK = chances_RK / chances_RK.sum(-1, keepdim=True)
    # The token that crosses top_p is included, so that at least one remains (Holtzman et al., 2020).
    # Cumulative probability before the token itself.
    outside_RK = chances_RK.cumsum(-1) - chances_RK >= settings.top_p
    return chances_RK.masked_fill(outside_RK, 0.0) if settings.top_p < 1 else chances_RK


def _inverse_cdf(inside_RK: Tensor, order_RK: Tensor, numbers_R: Tensor) -> Tensor:
    summed_RK = inside_RK.cumsum(-1)
    # Times the remaining mass instead of renormalizing all probabilities: the same token, one pass
    # less.
    mark_R1 = numbers_R[:, None] * summed_RK[:, -1:]
    # If rounding puts the mark at the total, searchsorted would return an index after the last possible token.
    last_R1 = (summed_RK < summed_RK[:, -1:]).sum(-1, keepdim=True)
    place_R1 = torch.searchsorted(summed_RK, mark_R1, right=True).minimum(last_R1)
    return order_RK.gather(-1, place_R1).squeeze(-1)


# What a tokenizer decodes for bytes that are not a complete character.
_INCOMPLETE_CHARACTER = "\ufffd"


class StopTexts:
    """Checks whether an answer has reached a stop text.

    Decoding takes about 50 us, and thousands of rows ask after every token, so only tokens that could complete a stop
    text are decoded.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        # A character has at most four bytes, hence at most four tokens.
        self._tail = 4 * max((len(text) for text in texts), default=0)
        self._last_characters = {text[-1] for text in texts}
        # Decoders insert spaces between tokens, so any token may produce one.
        self._always = " " in self._last_characters
        self._completing: dict[int, bool] = {}

    def reached(self, ids: Sequence[int]) -> bool:
        """Whether the last token completes a stop text; an earlier one would have ended the answer."""
        if not self._texts or not self._could_complete(ids[-1]):
            return False
        text = self._text(ids[-self._tail :])
        return any(stop in text for stop in self._texts)

    def _could_complete(self, token: int) -> bool:
        if self._always:
            return True
        known = self._completing.get(token)
        if known is None:
            text = self._text([token])
            known = _INCOMPLETE_CHARACTER in text or not self._last_characters.isdisjoint(text)
            self._completing[token] = known
        return known

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
