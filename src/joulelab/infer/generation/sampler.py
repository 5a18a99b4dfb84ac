"""The next token of every row, greedy or sampled, and the check for stop texts.

Each answer has its own stream of uniform random numbers, derived from seed, prompt and answer number. A token is
sampled by inverting the cumulative distribution at that number, in the order of the vocabulary, so the rest of the
batch does not affect it.

The smallest set of tokens with probability top_p is {token: weight >= cut}; tokens as likely as the last one are all
kept. On a GPU nothing is sorted: the cut is found by bisection over the bit patterns of the logits' type, in 16
reductions for bfloat16 and 32 for float32, exact in both. Sorting 49,152 logits of each row takes longer than a
decoding step of a small model, and a flat distribution has no short list of candidates. There is no data-dependent
shape and no transfer to the host, so the whole function can be part of a CUDA graph. On a CPU, 32 passes over the
vocabulary take longer than selecting candidates, so the most likely tokens are tried first.

Sums over the vocabulary go through blocks of 256: a block is summed in float32 by one thread group, whatever the number
of rows, and the blocks in float64. A single float32 sum over 150,000 tokens loses the tail, and its order of summation
may depend on the batch.

Shapes: R rows, V vocabulary, B blocks of W tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from joulelab.infer.generation.settings import GenerationSettings

SAMPLING = 2
"""Version of the mapping from random numbers to tokens; 1 inverted the distribution in the order of probability."""
_BLOCK = 256
# Almost always enough for top_p = 0.95.
_TOP_CANDIDATES = 512
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def answer_random_numbers(settings: GenerationSettings, prompt_ids: Sequence[int], answer: int) -> NDArray[np.float64]:
    """Uniform in [0, 1), one per token of the answer."""
    text = f"{settings.seed}:{answer}:{','.join(map(str, prompt_ids))}"
    # 128 bits of a hash seed PCG64 through numpy's SeedSequence, so that neighboring prompts and
    # answers have independent streams. Python's own hash differs between processes.
    entropy = int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")
    return np.random.default_rng(entropy).random(settings.max_new_tokens)


def sample_tokens(logits_RV: Tensor, settings: GenerationSettings, numbers_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens, and their log-probabilities under the model (temperature 1, no filter)."""
    top_R1 = logits_RV.amax(-1, keepdim=True).float()
    tokens_R = logits_RV.argmax(-1) if numbers_R is None else _sample(logits_RV, top_R1, settings, numbers_R)
    # Log-sum-exp with the maximum subtracted: no exponential overflows, and the largest term is exactly 1.
    total_R = _block_sums((logits_RV.float() - top_R1).exp()).sum(-1)
    # In float64, because log-probabilities of thousands of tokens are summed for judges and for DPO.
    own_R = logits_RV.gather(-1, tokens_R[:, None]).squeeze(-1).double() - top_R1.squeeze(-1).double()
    return tokens_R, (own_R - total_R.log()).float()


def _sample(logits_RV: Tensor, top_R1: Tensor, settings: GenerationSettings, numbers_R: Tensor) -> Tensor:
    weights_RV = _weights(logits_RV.float(), top_R1, settings)
    if settings.top_k and settings.top_k < logits_RV.shape[-1]:
        # Tokens that tie with the k-th are all kept: which of them comes first depends on the device, and results
        # must not.
        least_R1 = logits_RV.topk(settings.top_k, dim=-1).values[:, -1:]
        weights_RV = weights_RV * (logits_RV >= least_R1)
    if settings.top_p < 1:
        # Relative to what top-k has left, as in transformers: the two filters are applied one after the other.
        needed_R = settings.top_p * _block_sums(weights_RV).sum(-1)
        # A GPU sorts 50,000 words per row slowly and cannot wait for the host to learn which rows need it; a CPU
        # takes the few largest almost for free. Both ways find the same cut.
        if logits_RV.is_cpu:
            cut_R1 = _cut_by_sorting(weights_RV, needed_R)
        else:
            cut_R1 = _cut_by_bisection(logits_RV, weights_RV, top_R1, needed_R, settings)
        weights_RV = weights_RV * (weights_RV >= cut_R1)
    return _inverse_cdf(weights_RV, numbers_R)


def _weights(logits: Tensor, top_R1: Tensor, settings: GenerationSettings) -> Tensor:
    """Probabilities up to a factor per row; the most likely token has 1."""
    return ((logits - top_R1) / settings.temperature).exp()


def _cut_by_sorting(weights_RV: Tensor, needed_R: Tensor) -> Tensor:
    """Weight of the least likely token that is needed for a total of `needed_R`."""
    # Partial sort: on a CPU the likeliest 512 of 49,152 take a tenth of the time of a full sort.
    candidates_RK = weights_RV.topk(min(_TOP_CANDIDATES, weights_RV.shape[-1]), dim=-1).values
    short_U = (candidates_RK.double().sum(-1) < needed_R).nonzero().squeeze(-1)
    cut_R1 = _cut_of_sorted(candidates_RK, needed_R)
    # Flat distributions only; their rows are sorted as a whole.
    if len(short_U):
        sorted_UV = weights_RV[short_U].sort(dim=-1, descending=True).values
        cut_R1[short_U] = _cut_of_sorted(sorted_UV, needed_R[short_U])
    return cut_R1


def _cut_of_sorted(sorted_RK: Tensor, needed_R: Tensor) -> Tensor:
    # The token that crosses top_p is included, so that at least one remains (Holtzman et al., 2020).
    place_R1 = (sorted_RK.cumsum(-1, dtype=torch.float64) < needed_R[:, None]).sum(-1, keepdim=True)
    return sorted_RK.gather(-1, place_R1.clamp(max=sorted_RK.shape[-1] - 1))


def _cut_by_bisection(
    logits_RV: Tensor, weights_RV: Tensor, top_R1: Tensor, needed_R: Tensor, settings: GenerationSettings
) -> Tensor:
    """The same cut: the largest one that leaves a total of `needed_R`."""
    low_R1 = _to_key(torch.full_like(logits_RV[:, :1], -torch.inf))
    high_R1 = _to_key(logits_RV.amax(-1, keepdim=True))
    # One bit of the logits per iteration: 16 iterations are exact for bf16, because between two neighboring values
    # there is no other cut. The loop has a fixed length, so it can be part of a CUDA graph.
    for _ in range(8 * logits_RV.element_size()):
        middle_R1 = low_R1 + (high_R1 - low_R1 + 1) // 2
        cut_R1 = _weights(_from_key(middle_R1, logits_RV.dtype).float(), top_R1, settings)
        # The remaining sum falls as the cut rises, so the condition is monotonic and bisection applies.
        enough_R1 = (_block_sums(weights_RV * (weights_RV >= cut_R1)).sum(-1) >= needed_R)[:, None]
        low_R1 = torch.where(enough_R1, middle_R1, low_R1)
        high_R1 = torch.where(enough_R1, high_R1, middle_R1 - 1)
    return _weights(_from_key(low_R1, logits_RV.dtype).float(), top_R1, settings)


def _to_key(values: Tensor) -> Tensor:
    """Integers in the order of the floating-point values: IEEE 754 numbers are sign and magnitude."""
    kind = _INTEGERS[values.element_size()]
    bits = values.contiguous().view(kind).long()
    # Negative values have the sign bit set and grow in magnitude, so their order is reversed.
    return torch.where(bits >= 0, bits, torch.iinfo(kind).min - bits)


def _from_key(keys: Tensor, dtype: torch.dtype) -> Tensor:
    kind = _INTEGERS[dtype.itemsize]
    return torch.where(keys >= 0, keys, torch.iinfo(kind).min - keys).to(kind).view(dtype)


def _block_sums(values_RV: Tensor) -> Tensor:
    """[R, B] in float64."""
    rows, width = values_RV.shape
    # float32 within a block and float64 across blocks: sums of 256 values err by a few units of the last digit, while a
    # running float32 sum over a vocabulary would lose the tail of the distribution.
    padded = F.pad(values_RV, (0, -width % _BLOCK))
    return padded.view(rows, -1, _BLOCK).sum(-1).double()


def _inverse_cdf(weights_RV: Tensor, numbers_R: Tensor) -> Tensor:
    """First the block in which the cumulative weight passes the number, then the token within the block."""
    # Two levels, because a cumulative sum over the whole vocabulary is slow on a GPU.
    upto_RB = _block_sums(weights_RV).cumsum(-1)
    # Scaling the number instead of the weights saves a division of the whole vocabulary.
    mark_R1 = numbers_R[:, None] * upto_RB[:, -1:]
    # If rounding puts the mark at the total, the count would be an index after the last token with a weight.
    block_R1 = (upto_RB <= mark_R1).sum(-1, keepdim=True).minimum((upto_RB < upto_RB[:, -1:]).sum(-1, keepdim=True))
    before_R1 = F.pad(upto_RB, (1, 0)).gather(-1, block_R1)
    places_RW = block_R1 * _BLOCK + torch.arange(_BLOCK, device=weights_RV.device)
    inside_RW = places_RW < weights_RV.shape[-1]
    chosen_RW = weights_RV.gather(-1, places_RW.clamp(max=weights_RV.shape[-1] - 1)).double() * inside_RW
    # The same guard as for blocks: never the place behind the last token with a weight.
    summed_RW = chosen_RW.cumsum(-1)
    last_R1 = (summed_RW < summed_RW[:, -1:]).sum(-1, keepdim=True)
    place_R1 = (before_R1 + summed_RW <= mark_R1).sum(-1, keepdim=True).minimum(last_R1)
    return (block_R1 * _BLOCK + place_R1).squeeze(-1)


_UNKNOWN = -1
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
        if not self._texts or not self.could_complete(ids[-1]):
            return False
        text = self._text(ids[-self._tail :])
        return any(stop in text for stop in self._texts)

    def could_complete(self, token: int) -> bool:
        if self._always or not self._texts:
            return self._always
        known = self._completing.get(token)
        if known is None:
            text = self._text([token])
            known = _INCOMPLETE_CHARACTER in text or not self._last_characters.isdisjoint(text)
            self._completing[token] = known
        return known

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class AnswerEnds:
    """Where answers end: at an end token, or with a stop text."""

    def __init__(self, end_ids: Sequence[int], stops: StopTexts | None) -> None:
        self._end_ids, self._stops = frozenset(end_ids), stops
        self._may_end = np.zeros(0, dtype=np.int8)
        """By token; unknown until the token occurs."""

    def may_end(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tokens that end an answer or could complete a stop text; one lookup for all rows."""
        largest = int(tokens.max(initial=0))
        if largest >= len(self._may_end):
            self._may_end = np.append(self._may_end, np.full(largest + 1 - len(self._may_end), _UNKNOWN, dtype=np.int8))
        for token in np.unique(tokens[self._may_end[tokens] == _UNKNOWN]).tolist():
            self._may_end[token] = token in self._end_ids or (
                self._stops is not None and self._stops.could_complete(token)
            )
        found: NDArray[np.bool_] = self._may_end[tokens] == 1
        return found

    def first(self, tokens: NDArray[np.int64], begin: int, end: int) -> int | None:
        """Index of the token in [begin, end) that ends the answer; None: it continues."""
        for place in range(begin, end):
            token = int(tokens[place])
            if token in self._end_ids:
                return place
            could_stop = self._stops is not None and self._stops.could_complete(token)
            if could_stop and self._stops.reached(tokens[: place + 1].tolist()):  # type: ignore[union-attr]
                return place
        return None
