"""What makes a policy prefer the better answer, as pure functions over log-probabilities that return sums over pairs.

How much more likely than under the reference has the chosen answer become, and how much more the rejected one? The
difference is the margin. Where policy and reference are the same model it is 0, and the loss is ln 2 (DPO) or
1 / (4 beta^2) (IPO), whatever the answers are.

Shapes: P pairs; the last axis of `_P2` is (chosen, rejected).
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

PreferenceLoss = Literal["dpo", "ipo", "ipo-sum", "length-normalised"]
_OVER_MEANS = ("ipo", "length-normalised")


def margins(policy_P2: Tensor, reference_P2: Tensor) -> Tensor:
    gains_P2 = policy_P2 - reference_P2
    return gains_P2[:, 0] - gains_P2[:, 1]


def dpo_loss(margins_P: Tensor, beta: float) -> Tensor:
    return -F.logsigmoid(beta * margins_P).sum()


def ipo_loss(margins_P: Tensor, beta: float) -> Tensor:
    """Draws the margin to 1 / (2 beta) and no further, where DPO would go on for ever (Azar et al. 2023)."""
    return (margins_P - 1 / (2 * beta)).square().sum()


def preference_loss(
    kind: PreferenceLoss, beta: float, policy_P2: Tensor, reference_P2: Tensor, tokens_P2: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss summed over pairs, and the margins it was made of.

    Log-probabilities are sums over an answer's tokens. `length-normalised` is DPO over means per token: a sum lets a
    policy gain by length alone. `ipo` takes means per token too, as TRL does; `ipo-sum` is the paper's sum.
    """
    if kind in _OVER_MEANS:
        policy_P2, reference_P2 = policy_P2 / tokens_P2, reference_P2 / tokens_P2
    margins_P = margins(policy_P2, reference_P2)
    loss = ipo_loss if kind in ("ipo", "ipo-sum") else dpo_loss
    return loss(margins_P, beta), margins_P
