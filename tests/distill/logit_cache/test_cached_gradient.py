"""Training on part of a distribution: unbiased where it should be, and a KL divergence where it claims to be."""

import math

import numpy as np
import pytest
import torch
from cached_positions import against, cached, evenly_spread, make_manifest

from joulelab.distill.logit_cache.codecs import get_codec, record_bytes
from joulelab.distill.logit_cache.target_encoding import (
    DocumentSpan,
    draw_records,
    sampling_offsets,
    systematic_sample,
)
from joulelab.distill.losses import response_kl_sum
from joulelab.errors import ConfigError

WORDS, MANY = 64, 2000
EVERY = ["rs50", "hybrid32", "topk20-renorm", "topk20-ghost", "topk20-gold"]


def two_models():
    torch.manual_seed(0)
    return torch.randn(WORDS), torch.randn(WORDS)


def dense_gradient(student_V, teacher_V, temperature):
    student_V = student_V.clone().requires_grad_()
    kl = response_kl_sum(student_V[None], teacher_V[None], temperature)
    kl.backward()
    return float(kl.detach()), student_V.grad


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("codec", ["rs50", "hybrid32"])
def test_the_mean_gradient_of_samples_is_the_dense_gradient(tmp_path, codec, temperature):
    """The random start of the draws takes every value; what is left of the difference is bounded, not guessed."""
    student_V, teacher_V = two_models()
    targets = cached(tmp_path, make_manifest(codec, temperature, WORDS), teacher_V.expand(MANY, -1))
    labels = torch.zeros(MANY, dtype=torch.long)
    sums, gradient = against(targets, student_V.expand(MANY, -1), labels, temperature=temperature)
    kl, expected = dense_gradient(student_V, teacher_V, temperature)
    # a word's draws over all starts are an evenly spaced grid: its count is off by 1 at most
    bound = temperature / (get_codec(codec).draws * MANY) + 1e-6
    assert float((gradient.mean(0) - expected).abs().max()) < bound
    assert float(gradient[0].sub(expected).abs().max()) > 100 * bound, "one position alone is not the mean"
    assert float(sums.kl) / MANY == pytest.approx(kl, abs=0.02), "with the entropy kept the value is right on average"

    same, gradient = against(targets, teacher_V.expand(MANY, -1), labels, temperature=temperature)
    assert float(gradient.mean(0).abs().max()) < bound
    assert float(same.kl) / MANY == pytest.approx(0, abs=0.01)


def test_systematic_sampling_is_unbiased_over_blocks_and_never_draws_probability_0():
    torch.manual_seed(1)
    weights = torch.rand(1000) ** 8
    weights[300:700] = 0
    share = weights / weights.sum()
    drawn = systematic_sample(share.expand(MANY, -1), 50, evenly_spread(MANY))
    found = torch.bincount(drawn.flatten(), minlength=1000).double() / drawn.numel()
    assert float((found - share.double()).abs().max()) < 1.01 / (50 * MANY)
    assert (drawn.diff(dim=1) >= 0).all()
    assert (systematic_sample(torch.zeros(2, 9), 4, torch.tensor([0.0, 0.9])) == -1).all()


def test_the_offsets_are_those_of_a_new_generator_for_each_document():
    """As in caches that exist: numpy rounds keys from 2^63 on to a float."""
    spans = [DocumentSpan(bytes([first]) * 16, 0, 0, 9, 8) for first in (0, 5, 127, 128, 201)]
    for seed in (0, 7):
        expected = [
            np.random.Generator(np.random.Philox(key=[seed, int.from_bytes(span.key[:8], "little")])).random(8)
            for span in spans
        ]
        assert np.array_equal(sampling_offsets(spans, seed), np.concatenate(expected))


@pytest.mark.parametrize(("size", "bits"), [(3, 18), (4, 26)])
def test_records_hold_the_differences_of_ids_and_their_counts(size, bits):
    drawn = torch.tensor([[0, 0, 4, 9, 9], [7, 7, 7, 7, 7], [-1, -1, -1, -1, -1], [1, 2, 3, 4, 2**bits - 1]])
    found = [
        [(one & (2**bits - 1), one >> bits) for one in row if one != 2**32 - 1]
        for row in (draw_records(drawn, size).long() & (2**32 - 1)).tolist()
    ]
    assert found == [[(0, 2), (4, 1), (5, 2)], [(7, 5)], [], [(1, 1), (1, 1), (1, 1), (1, 1), (2**bits - 5, 1)]]


def test_sampling_offsets_depend_on_the_text_and_not_on_its_position():
    pieces = [DocumentSpan(bytes([number]) * 16, 0, 0, 0, 500) for number in range(8)]
    forth, back = sampling_offsets(pieces, 0).reshape(8, -1), sampling_offsets(pieces[::-1], 0).reshape(8, -1)
    assert np.array_equal(forth, back[::-1])
    assert not np.array_equal(forth, sampling_offsets(pieces, 1).reshape(8, -1))
    # a mean of 4,000 uniform numbers: 5 of its standard deviations
    assert abs(forth.mean() - 0.5) < 5 * math.sqrt(1 / 12 / 4000)
    assert len(np.unique(forth)) == 4000


def test_every_tail_completes_the_top_k_to_a_distribution(tmp_path):
    """p = (.5, .2) against q = (.6, .3): a sum over those two alone is -0.172, and no KL is negative."""
    teacher, student = torch.tensor([[0.5, 0.2, 0.18, 0.12]]).log(), torch.tensor([[0.6, 0.3, 0.06, 0.04]]).log()
    alone = sum(p * math.log(p / q) for p, q in ((0.5, 0.6), (0.2, 0.3)))
    assert alone == pytest.approx(-0.172, abs=5e-4)
    expected = {
        "renorm": 5 / 7 * math.log(5 / 7 / 0.6) + 2 / 7 * math.log(2 / 7 / 0.3),
        "ghost": alone + 0.3 * math.log(0.3 / 0.1),
        "gold": 0.8 * math.log(0.8 / 0.6) + 0.2 * math.log(0.2 / 0.3),
    }
    for tail, kl in expected.items():
        targets = cached(tmp_path / tail, make_manifest(f"topk2-{tail}", vocabulary=4), teacher)
        sums, _ = against(targets, student, torch.tensor([0]))
        assert float(sums.kl) == pytest.approx(kl, abs=1e-6), tail
        assert kl > 0


def plain_loss(reported, student_NV, labels_N, alpha, temperature):
    """The same from full tensors, differentiated by torch."""
    log_q = torch.log_softmax(student_NV / temperature, -1)
    target = torch.zeros_like(log_q).scatter_add(1, reported.ids_NK, reported.weights_NK)
    if reported.gold_N is not None:
        target = target.scatter_add(1, labels_N[:, None], reported.gold_N[:, None])
    cross = -(target * log_q).sum()
    if reported.ghost_N is not None:
        named = torch.zeros_like(log_q).scatter(1, reported.ids_NK, 1.0).bool()
        cross = cross - (reported.ghost_N * log_q.masked_fill(named, -torch.inf).logsumexp(-1)).sum()
    ce = torch.nn.functional.cross_entropy(student_NV, labels_N, reduction="sum")
    return alpha * ce + (1 - alpha) * temperature**2 * cross


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("codec", EVERY)
def test_every_codec_has_the_gradient_of_its_loss_with_listed_and_unlisted_labels(tmp_path, codec, temperature):
    torch.manual_seed(2)
    teacher, student = 2 * torch.randn(30, WORDS), 2 * torch.randn(30, WORDS)
    labels = torch.where(torch.arange(30) < 15, teacher.argmax(1), teacher.argmin(1))
    targets = cached(tmp_path, make_manifest(codec, temperature, WORDS), teacher)
    sums, gradient = against(targets, student, labels, alpha=0.3, temperature=temperature, chunk=7)
    leaf = student.clone().requires_grad_()
    plain_loss(targets.decoded(), leaf, labels, 0.3, temperature).backward()
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-5, atol=1e-6)
    assert float(sums.loss.detach()) == pytest.approx(0.3 * float(sums.ce) + 0.7 * float(sums.kl), rel=1e-5)


@pytest.mark.parametrize("codec", EVERY)
def test_one_hot_teachers_and_students_give_finite_numbers(tmp_path, codec):
    sure = torch.full((4, WORDS), -1e4)
    sure[torch.arange(4), torch.arange(4)] = 1e4
    targets = cached(tmp_path, make_manifest(codec, vocabulary=WORDS), sure)
    for student in (sure, sure.flip(1), torch.zeros(4, WORDS)):
        sums, gradient = against(targets, student, torch.arange(4), alpha=0.5)
        assert torch.isfinite(gradient).all() and torch.isfinite(sums.loss)
    same, gradient = against(targets, sure, torch.arange(4))
    assert float(same.kl) == pytest.approx(0, abs=1e-2) and float(gradient.abs().max()) < 1e-6


@pytest.mark.parametrize("codec", [name.replace("20", "80") for name in EVERY])
def test_a_vocabulary_smaller_than_k_gives_finite_numbers_also_with_a_padded_head(tmp_path, codec):
    _, teacher_V = two_models()
    targets = cached(tmp_path, make_manifest(codec, vocabulary=WORDS), teacher_V.expand(2, -1))
    _, gradient = against(targets, torch.randn(2, WORDS + 8), torch.arange(2), alpha=0.3)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(("words", "size"), [(2**18, 3), (2**18 + 1, 4), (400_000, 4)])
def test_ids_of_more_than_18_bits_have_a_wider_record(tmp_path, words, size):
    assert record_bytes(words) == size
    teacher = torch.full((2, words), -30.0)
    teacher[0, words - 1], teacher[1, 7] = 5.0, 5.0
    for codec in ("rs50", "hybrid32"):
        reported = cached(tmp_path / codec, make_manifest(codec, vocabulary=words), teacher).decoded()
        assert int(reported.ids_NK[0, reported.weights_NK[0].argmax()]) == words - 1
        assert int(reported.ids_NK[1, reported.weights_NK[1].argmax()]) == 7
        assert int(reported.ids_NK.max()) < words


def test_unknown_codecs_and_impossible_counts_are_refused():
    for name in ("rs", "rs64", "rs0", "topk50", "topk0-ghost", "hybrid0", "logits"):
        with pytest.raises(ConfigError):
            get_codec(name)
    with pytest.raises(ConfigError, match="67108865"):
        record_bytes(2**26 + 1)


@pytest.mark.parametrize("codec", EVERY)
def test_tokens_with_logit_minus_infinity_leave_a_finite_loss(tmp_path, codec):
    student_V, teacher_V = two_models()
    teacher_V[::3] = -torch.inf
    targets = cached(tmp_path, make_manifest(codec, 1.0, WORDS), teacher_V.expand(20, -1))
    sums, gradient = against(targets, student_V.expand(20, -1), torch.zeros(20, dtype=torch.long), alpha=0.5)
    assert sums.loss.isfinite() and sums.kl.isfinite() and gradient.isfinite().all()
