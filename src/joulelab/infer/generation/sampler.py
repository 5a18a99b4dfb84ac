"""The next token of every row: the likeliest, or drawn from a shaped distribution with a number of the row's own.

Each answer has its own stream of numbers, made from seed, prompt and answer number. A token is where that number falls
in the row's cumulated probabilities: who else is in the batch does not matter.

Shapes: R rows, V vocabulary.
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

# nearly always enough for 95 % of the next word's chances
_TOP_CANDIDATES = 512


def answer_random_numbers(settings: GenerationSettings, prompt_ids: Sequence[int], answer: int) -> NDArray[np.float64]:
    """In [0, 1), one for each token the answer may have."""
    text = f"{settings.seed}:{answer}:{','.join(map(str, prompt_ids))}"
    entropy = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    return np.random.default_rng(entropy).random(settings.max_new_tokens)


def sample_tokens(logits_RV: Tensor, settings: GenerationSettings, numbers_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens, and their log-probabilities by the model itself (temperature 1, nothing filtered)."""
    own_RV = torch.log_softmax(logits_RV.float(), -1)
    tokens_R = own_RV.argmax(-1) if numbers_R is None else _sample(own_RV, settings, numbers_R)
    return tokens_R, own_RV.gather(-1, tokens_R[:, None]).squeeze(-1)


def _sample(own_RV: Tensor, settings: GenerationSettings, numbers_R: Tensor) -> Tensor:
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
    """Tokens, and whether all words would have given the same. Sorting all takes longer than a small model's step."""
    scores_RK, order_RK = scores_RV.topk(_TOP_CANDIDATES, dim=-1)
    # among equals the lower number comes first, as with all words
    order_RK, by_number_RK = order_RK.sort(dim=-1)
    scores_RK, place_RK = scores_RK.gather(-1, by_number_RK).sort(dim=-1, descending=True, stable=True)
    order_RK = order_RK.gather(-1, place_RK)
    inside_RK = _filtered_probabilities(scores_RK, scores_RV.logsumexp(-1), settings)
    # of those that are as likely as the last one some were left out perhaps: none of them may be inside
    is_sure_R = ((inside_RK == 0) | (scores_RK > scores_RK[:, -1:])).all(-1)
    return _inverse_cdf(inside_RK, order_RK, numbers_R), is_sure_R


def _filtered_probabilities(scores_RK: Tensor, total_R: Tensor, settings: GenerationSettings) -> Tensor:
    """Chances of the likeliest words, 0 of those outside top_k and top_p; `total_R`: log of the sum over all words."""
    chances_RK = (scores_RK.double() - total_R[:, None]).exp()
    if settings.top_k:
        chances_RK[:, settings.top_k :] = 0
        chances_RK = chances_RK / chances_RK.sum(-1, keepdim=True)
    # the token that passes the mark is the last one in, so that at least one is
    outside_RK = chances_RK.cumsum(-1) - chances_RK >= settings.top_p
    return chances_RK.masked_fill(outside_RK, 0.0) if settings.top_p < 1 else chances_RK


def _inverse_cdf(inside_RK: Tensor, order_RK: Tensor, numbers_R: Tensor) -> Tensor:
    summed_RK = inside_RK.cumsum(-1)
    mark_R1 = numbers_R[:, None] * summed_RK[:, -1:]
    # a mark rounded up to the whole sum would fall behind the last token that can be drawn
    last_R1 = (summed_RK < summed_RK[:, -1:]).sum(-1, keepdim=True)
    place_R1 = torch.searchsorted(summed_RK, mark_R1, right=True).minimum(last_R1)
    return order_RK.gather(-1, place_R1).squeeze(-1)


# Whether an answer has just come to one of the texts that end it.
#
# Making text of tokens takes some 50 us, and thousands of rows ask after every token: only a token that could
# complete a stop text is worth the look.


# what a tokenizer writes for bytes that are no whole character
_INCOMPLETE_CHARACTER = "\ufffd"


class StopTexts:
    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        # a stop text has at most four tokens (of a byte each) for every character
        self._tail = 4 * max((len(text) for text in texts), default=0)
        self._last_characters = {text[-1] for text in texts}
        # of a space nobody can say which token brings it: decoders put them between words
        self._always = " " in self._last_characters
        self._completing: dict[int, bool] = {}

    def reached(self, ids: Sequence[int]) -> bool:
        """By the last of these tokens; an answer that reached one earlier has ended there."""
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
