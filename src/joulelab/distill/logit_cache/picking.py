"""From a teacher's logits to what a codec keeps of them, on the device where the logits are.

Shapes: C positions, V vocabulary, K words kept, n draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from joulelab.distill.logit_cache.codecs import Codec
from joulelab.distill.logit_cache.draws import spaced_draws
from joulelab.distill.logit_cache.keys import Piece

Weigh = Callable[[Tensor, int, float, bool], tuple[Tensor, Tensor | None]]
Picked = dict[str, Tensor]
"""By name: `entropy` [C], `drawn` [C, n], `rest` [C], `top` [C, K] and `share` [C, K]; of these what the codec has."""

_LOWEST_LOGIT = -1e30


def weigh(logits_CV: Tensor, vocabulary: int, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Probabilities [C, V] and their entropy [C]. Logits of rows that only pad the teacher's head take no part."""
    warm_CV = logits_CV[:, :vocabulary].float()
    warm_CV = warm_CV if temperature == 1 else warm_CV / temperature
    share_CV = warm_CV.softmax(-1)
    if not entropy:
        return share_CV, None
    # with p = exp(z - norm) the entropy is norm - sum p z, and the norm is known from the likeliest word
    norm_C = warm_CV.amax(-1) - share_CV.amax(-1).log()
    # a word that the teacher rules out (-inf) adds nothing: 0 times a finite number
    return share_CV, norm_C - (share_CV * warm_CV.clamp(min=_LOWEST_LOGIT)).sum(-1)


def pick(
    codec: Codec, logits_CV: Tensor, vocabulary: int, temperature: float, starts_C: Tensor, weigh: Weigh = weigh
) -> Picked:
    """`weigh` may be a compiled one: it is what passes over all words."""
    share_CV, entropy_C = weigh(logits_CV, vocabulary, temperature, codec.draws > 0)
    picked: Picked = {} if entropy_C is None else {"entropy": entropy_C}
    if codec.top:
        share_CK, top_CK = share_CV.topk(min(codec.top, vocabulary), -1)
        share_CV = share_CV.scatter(1, top_CK, 0.0)
        picked |= {"rest": share_CV.sum(-1), "top": top_CK, "share": share_CK}
    if codec.draws:
        picked["drawn"] = spaced_draws(share_CV, codec.draws, starts_C)
    return picked


def starts_of(pieces: Sequence[Piece], seed: int) -> NDArray[np.float64]:
    """The random number of every target, from the piece's key: the same in any order and on any number of writers."""
    draws = [
        np.random.Generator(np.random.Philox(key=[seed, int.from_bytes(piece.key[:8], "little")])).random(piece.targets)
        for piece in pieces
    ]
    return np.concatenate(draws) if draws else np.empty(0)
