"""Three ways to say how far a student's distribution is from its teacher's, each with its slope.

Each takes log-probabilities and gives the divergence at every position and its derivative by the student's logits, in
closed form. With logits z / T and the divergence times T^2, as distillation has it, the derivative by z is T times the
slope. Where the two are equal, bit by bit, all three are exactly 0.

Shapes: C positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
LOWEST_LOG = -1e4
"""In place of the log-probability -inf: its exponential is 0 as well, and 0 times it is 0 and not NaN."""


def teacher_log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Finite, also where a teacher rules a word out with a logit of -inf; without gradients."""
    return F.log_softmax(logits.detach().float() / temperature, -1).clamp_(min=LOWEST_LOG)


def forward_kl(own_log_CV: Tensor, said_log_CV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || student): the student covers all that the teacher might say."""
    said_CV = said_log_CV.exp()
    return (said_CV * (said_log_CV - own_log_CV)).sum(-1), own_log_CV.exp() - said_CV


def reverse_kl(own_log_CV: Tensor, said_log_CV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(student || teacher): the student says nothing that the teacher would not. A word that the teacher rules out
    counts with `LOWEST_LOG`, because the true divergence would be infinite."""
    own_CV, apart_CV = own_log_CV.exp(), own_log_CV - said_log_CV
    divergence_C = (own_CV * apart_CV).sum(-1)
    return divergence_C, own_CV * (apart_CV - divergence_C[:, None])


def jensen_shannon(own_log_CV: Tensor, said_log_CV: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of both distributions' KL to their middle: symmetric, and never above ln 2."""
    apart_CV = own_log_CV - said_log_CV
    # log(own / middle) = log 2 - log(1 + said / own), without a sum that would round
    own_apart_CV, said_apart_CV = (math.log(2.0) - F.softplus(sign * apart_CV) for sign in (-1, 1))
    own_CV, said_CV = own_log_CV.exp(), said_log_CV.exp()
    own_C = (own_CV * own_apart_CV).sum(-1)
    divergence_C = 0.5 * (own_C + (said_CV * said_apart_CV).sum(-1))
    return divergence_C, 0.5 * own_CV * (own_apart_CV - own_C[:, None])


DIVERGENCES: dict[str, Divergence] = {"forward": forward_kl, "reverse": reverse_kl, "jsd": jensen_shannon}
