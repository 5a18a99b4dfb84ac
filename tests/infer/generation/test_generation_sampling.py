"""Draws follow the shaped distribution, and only tokens inside it are drawn."""

import numpy as np
import pytest
import torch

from joulelab.infer.generation import sampler
from joulelab.infer.generation.sampler import answer_random_numbers, sample_tokens
from joulelab.infer.generation.settings import GenerationSettings

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 0.5])


def shares_of(logits, settings, draws=20_000):
    numbers = torch.from_numpy((np.arange(draws) + 0.5) / draws)
    tokens, _ = sample_tokens(logits.expand(draws, -1), settings, numbers)
    return np.bincount(tokens.numpy(), minlength=len(logits)) / draws


def shares(settings):
    return shares_of(LOGITS, settings)


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


def test_every_answer_has_its_own_random_numbers():
    settings = GenerationSettings(do_sample=True, n=2, max_new_tokens=8)
    one, other = answer_random_numbers(settings, [5, 6], 0), answer_random_numbers(settings, [5, 6], 1)
    assert not np.array_equal(one, other)
    assert np.array_equal(one, answer_random_numbers(settings, [5, 6], 0))
    assert not np.array_equal(one, answer_random_numbers(settings, [56], 0))


CUTS = [{}, {"top_p": 0.8}, {"top_p": 0.3}, {"top_k": 5}, {"top_k": 9, "top_p": 0.6}]


def sample_by_sorting(logits, settings, numbers):
    """Reference: the nucleus from a full sort in float64, and a cumulative sum in the order of the vocabulary."""
    chances = torch.softmax(logits.double() / settings.temperature, -1)
    if settings.top_k:
        chances = chances * (logits >= logits.topk(settings.top_k, -1).values[:, -1:])
        chances = chances / chances.sum(-1, keepdim=True)
    ordered = chances.sort(-1, descending=True).values
    kept = (ordered.cumsum(-1) - ordered < settings.top_p).sum(-1, keepdim=True)
    chances = chances * (chances >= ordered.gather(-1, kept - 1))
    summed = chances.cumsum(-1)
    return torch.searchsorted(summed, numbers[:, None] * summed[:, -1:], right=True).squeeze(-1)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("size", [60, 1000])
def test_tokens_equal_those_of_a_full_sort(monkeypatch, cut, size):
    """With distinct logits; few candidates, so that some rows need the whole vocabulary."""
    monkeypatch.setattr(sampler, "_TOP_CANDIDATES", 8)
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(400, size, generator=generator)
    numbers = torch.rand(400, dtype=torch.float64, generator=generator)
    settings = GenerationSettings(do_sample=True, temperature=0.8, **cut)
    found, _ = sample_tokens(logits, settings, numbers)
    assert torch.equal(found, sample_by_sorting(logits, settings, numbers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_bisection_finds_the_cut_of_the_sort(dtype, scale):
    """Also for bfloat16, where many tokens have the same logit, and for a nearly flat distribution."""
    settings = GenerationSettings(do_sample=True, temperature=0.8, top_p=0.9)
    logits = (scale * torch.randn(64, 700, generator=torch.Generator().manual_seed(1))).to(dtype)
    top = logits.amax(-1, keepdim=True).float()
    weights = sampler._weights(logits.float(), top, settings)
    needed = 0.9 * sampler._block_sums(weights).sum(-1)
    by_bisection = sampler._cut_by_bisection(logits, weights, top, needed, settings)
    assert torch.equal(by_bisection, sampler._cut_by_sorting(weights, needed))
    kept = weights * (weights >= by_bisection)
    assert (kept.double().sum(-1) >= needed * (1 - 1e-6)).all()


def test_all_tokens_as_likely_as_the_last_one_are_kept():
    found = shares_of(torch.tensor([1.0, 1.0, 1.0, -9.0]), GenerationSettings(do_sample=True, top_p=0.5))
    assert np.allclose(found, [1 / 3, 1 / 3, 1 / 3, 0], atol=1e-3)


def test_samples_have_the_distribution_of_transformers():
    """Chi-square of 40,000 samples against the filters of transformers."""
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 2 * torch.randn(1, 300, generator=torch.Generator().manual_seed(2))
    numbers = torch.rand(40_000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    tokens, _ = sample_tokens(
        logits.expand(40_000, -1), GenerationSettings(do_sample=True, temperature=0.7, top_k=50, top_p=0.9), numbers
    )
    expected = logits
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(50), TopPLogitsWarper(0.9)):
        expected = warper(None, expected)
    chances = torch.softmax(expected[0].double(), -1).numpy()
    counts = np.bincount(tokens.numpy(), minlength=300)
    assert counts[chances == 0].sum() == 0
    expected_counts = 40_000 * chances[chances > 0]
    statistic = ((counts[chances > 0] - expected_counts) ** 2 / expected_counts).sum()
    freedom = len(expected_counts) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # mean and four standard deviations of chi-square
