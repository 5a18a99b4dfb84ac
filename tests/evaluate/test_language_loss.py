"""A language model's quality: a mean over tokens however batches are cut, and the bar that frequencies set."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from joulelab.evaluate.language import TokenLoss, no_better_than_guessing, token_loss, unigram_loss


class Numbers:
    """Batches of losses, to be added up as they are."""

    def __init__(self, *batches):
        self.batches = batches
        self.batches_per_epoch = len(batches)

    def at(self, epoch, index):
        batch = SimpleNamespace(values=self.batches[index])
        batch.to = lambda device: batch
        return batch


def test_every_token_weighs_the_same_and_the_model_is_as_it_was():
    model, seen = nn.Dropout().train(), []
    before = torch.get_rng_state()

    def loss_of(batch):
        assert not model.training
        torch.rand(3)
        return torch.tensor(float(sum(batch.values))), len(batch.values)

    found = token_loss(model, Numbers([1, 2, 3], [10]), loss_of, torch.device("cpu"), "fp32", seen.append)
    assert found == TokenLoss(4.0, 4)
    assert found.perplexity == pytest.approx(math.exp(4))
    assert model.training and len(seen) == 2 and torch.equal(before, torch.get_rng_state())


def test_frequencies_alone_lose_the_entropy_of_what_is_asked():
    counts = np.array([300, 100])
    targets = np.array([0, 0, 0, 1])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert unigram_loss(counts, targets) == pytest.approx(entropy, abs=1e-3)
    # asked three times as readily for the rarer one, both come alike
    assert unigram_loss(counts, np.array([0, 1]), np.array([1.0, 3.0])) == pytest.approx(math.log(2))
    assert math.isfinite(unigram_loss(np.array([5, 0]), np.array([1])))


def test_who_does_no_better_than_frequencies_is_named_with_both_numbers():
    assert no_better_than_guessing(2.9, 3.0) is None
    assert "3.000 nats per token" in no_better_than_guessing(3.0, 3.0)
    assert "unigram baseline of 3.000" in no_better_than_guessing(math.nan, 3.0)
