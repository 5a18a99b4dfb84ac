"""Quality of a language model: cross-entropy and perplexity of held-out tokens, and its most likely tokens.

The most likely token at each position is saved, so that two models can be compared position by position without running
either again.

Shapes: B rows, T tokens, N predicted positions, C positions of a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from joulelab.data.batches import BatchSource, TrainingBatch
from joulelab.data.chat.packing import NOT_TRAINED, CausalBatch, PackedRows, RowsInOrder
from joulelab.errors import ConfigError
from joulelab.train.optim import autocast

B = TypeVar("B", bound=TrainingBatch)
_SMOOTHING = 0.01
"""Probability mass spread evenly over the vocabulary, so that a token that never occurs in training is not
impossible."""


@dataclass(frozen=True)
class TokenLoss:
    mean: float
    """Nats per predicted token."""
    tokens: int

    @property
    def perplexity(self) -> float:
        # exp(710) overflows a float64; a diverged model must not end the run.
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
    """Mean loss over the first epoch of `batches`, the same tokens for every model. `loss_of` returns sum and count."""
    # Added up on the host in float64: a float32 sum over millions of tokens would lose the last
    # digits of every batch.
    loss_sum, count = torch.zeros((), dtype=torch.float64), 0
    with _evaluation_mode(model, device), autocast(precision, device):
        for index in range(batches.batches_per_epoch):
            batch = batches.at(0, index).to(device)
            found, tokens = loss_of(batch)
            loss_sum, count = loss_sum + found.double().cpu(), count + tokens
            tick(batch)
    return TokenLoss(float(loss_sum) / max(1, count), count)


def unigram_loss(
    counts_V: NDArray[np.int64], targets: NDArray[np.int64], target_weights_V: NDArray[np.float64] | None = None
) -> float:
    """Cross-entropy of a unigram model with the token frequencies of the training data: the baseline that any useful
    model must beat. `target_weights_V`: relative probability that each token is a target, if it is not uniform."""
    expected_V = counts_V.astype(np.float64) if target_weights_V is None else counts_V * target_weights_V
    # Interpolation with the uniform distribution (Jelinek and Mercer, 1980); add-one smoothing
    # would be dominated by the unused part of a vocabulary of 150,000.
    guess_V = (1 - _SMOOTHING) * expected_V / expected_V.sum() + _SMOOTHING / len(counts_V)
    return float(-np.log(guess_V[targets]).mean())


def no_better_than_guessing(loss: float, by_frequency: float) -> str | None:
    """A warning if the loss is not below the unigram baseline, else None; both in nats per token."""
    if loss < by_frequency:
        return None
    return (
        f"the student's held-out loss is {loss:.3f} nats per token, not below the unigram baseline of "
        f"{by_frequency:.3f}: it has learned no more than token frequencies; train on more tokens or change the "
        "learning rate"
    )


def _evaluation_mode(model: nn.Module, device: torch.device) -> ExitStack:
    """Evaluation mode. Module mode and random state are restored, so that evaluation does not change the training."""
    stack = ExitStack()
    stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
    stack.callback(model.train, model.training)
    model.eval()
    return stack


FIGURES, PREDICTED = "held_out.json", "written.npy"


@dataclass(frozen=True, eq=False)
class HeldOutPredictions:
    """Loss of a causal model on held-out tokens, and its most likely token at each position."""

    loss: float
    """Nats per token."""
    tokens: int
    """Number of predicted positions."""
    predicted: NDArray[np.int64]
    """Most likely token at each position, in the order of the rows."""
    right: int
    """Number of positions where it is the true token."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def agreement(self, other: HeldOutPredictions) -> float:
        """Fraction of positions with the same most likely token."""
        if len(self.predicted) != len(other.predicted):
            raise ConfigError("the two models were evaluated on different tokens, so agreement is undefined")
        return float((self.predicted == other.predicted).mean())

    def save(self, folder: Path) -> None:
        figures = {"loss": self.loss, "tokens": self.tokens, "right": self.right}
        (folder / FIGURES).write_text(json.dumps(figures) + "\n", encoding="utf-8")
        np.save(folder / PREDICTED, self.predicted.astype(np.int32))

    @classmethod
    def load(cls, folder: Path) -> HeldOutPredictions:
        figures = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
        predicted = np.load(folder / PREDICTED, allow_pickle=False).astype(np.int64)
        return cls(predicted=predicted, **figures)


def held_out_tokens(
    model: nn.Module,
    hidden_of: Callable[[CausalBatch], Tensor],
    head_VD: Tensor,
    packed: PackedRows,
    *,
    batch_size: int,
    chunk: int,
    device: torch.device,
    precision: str,
    words: int,
    tick: Callable[[Any], None] = lambda batch: None,
) -> HeldOutPredictions:
    """`hidden_of` returns hidden_BTD of a batch. Logits are computed in chunks to bound memory; vocabulary rows beyond
    `words` are padding."""
    predicted: list[NDArray[np.int64]] = []
    right = 0

    def loss_of(batch: CausalBatch) -> tuple[Tensor, int]:
        nonlocal right
        # Position t predicts token t + 1; the last position of a row predicts nothing.
        targets_BT = F.pad(batch.labels[:, 1:], (0, 1), value=NOT_TRAINED)
        # Selected before the projection to the vocabulary, which is the expensive part.
        positions_N = (targets_BT.flatten() != NOT_TRAINED).nonzero().squeeze(1)
        hidden_ND = hidden_of(batch).flatten(0, 1)[positions_N]
        targets_N = targets_BT.flatten()[positions_N]
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for start in range(0, len(positions_N), chunk):
            logits_CV = F.linear(hidden_ND[start : start + chunk], head_VD[:words].to(hidden_ND.dtype)).float()
            targets_C = targets_N[start : start + chunk]
            loss = loss + F.cross_entropy(logits_CV, targets_C, reduction="sum").double()
            predicted_C = logits_CV.argmax(-1)
            right += int((predicted_C == targets_C).sum())
            predicted.append(predicted_C.cpu().numpy())
        return loss, len(positions_N)

    found = token_loss(model, RowsInOrder(packed, batch_size), loss_of, device, precision, tick)
    return HeldOutPredictions(found.mean, found.tokens, np.concatenate(predicted), right)
