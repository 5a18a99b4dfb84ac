"""How likely a model finds given tokens, a token.

By the mean: a sum falls with every further token, so that a judge by sums prefers whatever is short.

Shapes: B rows padded on the right, T tokens, N tokens asked about.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from joulelab.distill.causal.heads import head_of, open_for_loss
from joulelab.distill.preferences.target_log_probabilities import Projecting
from joulelab.errors import ConfigError


def log_probability_sums(
    model: nn.Module, ids_BT: Tensor, trained_BT: Tensor, how: Projecting | None = None
) -> tuple[Tensor, Tensor]:
    """Over the trained tokens of each row, and how many those are. A row's first token is predicted by nothing.

    Padding stands on the right, where no real token sees it, so no mask is needed.
    """
    asked_BT = trained_BT.bool().clone()
    asked_BT[:, 0] = False
    hidden_BTD = open_for_loss(model)(input_ids=ids_BT, hidden_only=True)
    rows_N, at_N = asked_BT.nonzero(as_tuple=True)
    logs_N = (how or Projecting())(hidden_BTD[rows_N, at_N - 1], head_of(model), ids_BT[rows_N, at_N])
    sums_B = logs_N.new_zeros(len(ids_BT)).index_add(0, rows_N, logs_N)
    return sums_B, asked_BT.sum(-1)


def mean_log_probability(model: nn.Module, ids_BT: Tensor, trained_BT: Tensor, how: Projecting | None = None) -> Tensor:
    """[B], nats a token."""
    sums_B, tokens_B = log_probability_sums(model, ids_BT, trained_BT, how)
    if bool((tokens_B == 0).any()):
        raise ConfigError(
            f"row {int((tokens_B == 0).nonzero()[0])} has no token to judge", "an answer needs at least one token"
        )
    return sums_B / tokens_B


def padded(rows: Sequence[tuple[list[int], list[int]]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(prompt, answer) pairs as ids_BT and trained_BT, padded on the right; the answers are what is asked about."""
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
    trained_BT = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids_BT[row, :end] = torch.tensor([*prompt, *answer])
        trained_BT[row, len(prompt) : end] = True
    return ids_BT.to(device), trained_BT.to(device)
