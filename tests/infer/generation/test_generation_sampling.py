"""Draws follow the shaped distribution, and only tokens inside it are drawn."""

import numpy as np
import pytest
import torch

from joulelab.infer.generation import sampler
from joulelab.infer.generation.sampler import answer_random_numbers, sample_tokens
from joulelab.infer.generation.settings import GenerationSettings

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 0.5])


def shares(settings, draws=20_000):
    numbers = torch.from_numpy((np.arange(draws) + 0.5) / draws)
    tokens, _ = sample_tokens(LOGITS.expand(draws, -1), settings, numbers)
    return np.bincount(tokens.numpy(), minlength=5) / draws


def test_draws_have_the_probabilities_of_the_temperature():
    expected = torch.softmax(LOGITS / 0.7, -1).numpy()
    found = shares(GenerationSettings(do_sample=True, temperature=0.7))
    assert np.abs(found - expected).max() < 1e-3


@pytest.mark.parametrize(
    ("shape", "inside"), [({"top_k": 2}, {1, 2}), ({"top_p": 0.5}, {1}), ({"top_p": 0.75}, {1, 2})]
)
def test_only_the_likeliest_are_drawn_in_their_proportions(shape, inside):
    found = shares(GenerationSettings(do_sample=True, **shape))
    assert set(np.flatnonzero(found)) == inside
    chances = torch.softmax(LOGITS, -1).numpy()[sorted(inside)]
    assert np.abs(found[sorted(inside)] - chances / chances.sum()).max() < 1e-3


def test_the_last_number_before_one_draws_a_token_that_may_be_drawn():
    edge = torch.tensor([np.nextafter(1.0, 0.0)], dtype=torch.float64)
    token, log = sample_tokens(LOGITS[None], GenerationSettings(do_sample=True, top_k=2), edge)
    assert token.item() == 2
    assert log.item() == pytest.approx(float(torch.log_softmax(LOGITS, -1)[2]))


def test_every_answer_has_numbers_of_its_own_whatever_stands_beside_it():
    settings = GenerationSettings(do_sample=True, n=2, max_new_tokens=8)
    one, other = answer_random_numbers(settings, [5, 6], 0), answer_random_numbers(settings, [5, 6], 1)
    assert not np.array_equal(one, other)
    assert np.array_equal(one, answer_random_numbers(settings, [5, 6], 0))
    assert not np.array_equal(one, answer_random_numbers(settings, [56], 0))


@pytest.mark.parametrize(
    "cut", [{"top_p": 0.8}, {"top_p": 0.3}, {"top_k": 5}, {"top_k": 12}, {"top_k": 9, "top_p": 0.6}]
)
def test_looking_at_the_likeliest_words_first_draws_the_same(monkeypatch, cut):
    """Logits of few digits, so that many words are equally likely, also at the edge of those that are looked at."""
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(400, 60, generator=generator)).round() / 2
    numbers = torch.rand(400, dtype=torch.float64, generator=generator)
    settings = GenerationSettings(do_sample=True, temperature=0.8, **cut)
    whole, _ = sample_tokens(logits, settings, numbers)
    from_all, sorted_rows = sampler._sample_from_all, []
    monkeypatch.setattr(sampler, "_TOP_CANDIDATES", 8)
    monkeypatch.setattr(
        sampler, "_sample_from_all", lambda scores, *rest: sorted_rows.append(len(scores)) or from_all(scores, *rest)
    )
    found, _ = sample_tokens(logits, settings, numbers)
    assert torch.equal(found, whole)
    assert sum(sorted_rows) < 400 or cut.get("top_k", 0) > 8
