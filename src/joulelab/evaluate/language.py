"""Quality of a language model: the mean cross-entropy of held-out tokens, and the perplexity it means."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from joulelab.data.batches import BatchSource, TrainingBatch
from joulelab.train.precision import autocast

B = TypeVar("B", bound=TrainingBatch)
_SPREAD = 0.01
"""Share of a guess by frequency that is spread over all words, so that one never seen in training is not impossible."""


@dataclass(frozen=True)
class TokenLoss:
    mean: float
    """Nats for each predicted token."""
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.mean, 700.0))


@torch.no_grad()
def token_loss(
    model: nn.Module,
    batches: BatchSource[B],
    loss_of: Callable[[B], tuple[Tensor, int]],
    device: torch.device,
    precision: str,
    tick: Callable[[B], None],
) -> TokenLoss:
    """Mean over the first epoch of `batches`: the same tokens for whoever is asked. `loss_of` gives sum and count."""
    loss_sum, count = torch.zeros((), dtype=torch.float64), 0
    with _as_it_was(model, device), autocast(precision, device):
        for index in range(batches.batches_per_epoch):
            batch = batches.at(0, index).to(device)
            found, tokens = loss_of(batch)
            loss_sum, count = loss_sum + found.double().cpu(), count + tokens
            tick(batch)
    return TokenLoss(float(loss_sum) / max(1, count), count)


def unigram_loss(
    counts_V: NDArray[np.int64], targets: NDArray[np.int64], asked_V: NDArray[np.float64] | None = None
) -> float:
    """Cross-entropy of guessing every token by how often it was seen in training: what a model must beat to know more
    than frequencies. `asked_V` says how readily a token of each kind is asked for, where that is not alike."""
    expected_V = counts_V.astype(np.float64) if asked_V is None else counts_V * asked_V
    guess_V = (1 - _SPREAD) * expected_V / expected_V.sum() + _SPREAD / len(counts_V)
    return float(-np.log(guess_V[targets]).mean())


def no_better_than_guessing(loss: float, by_frequency: float) -> str | None:
    """In words, where a model knows no more than how often each word comes; both in nats per token."""
    if loss < by_frequency:
        return None
    return (
        f"the student has a held-out loss of {loss:.3f} nats per token, and guessing by word frequency alone has "
        f"{by_frequency:.3f}: it has learnt no more than frequencies; give it more tokens, or another learning rate"
    )


def _as_it_was(model: nn.Module, device: torch.device) -> ExitStack:
    """Dropout off, and afterwards modes and random numbers as before: looking must not change what is trained."""
    stack = ExitStack()
    stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
    stack.callback(model.train, model.training)
    model.eval()
    return stack
