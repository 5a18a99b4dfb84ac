"""A teacher may rule words out with a logit of -inf: every loss and gradient stays finite, and equals the one without
these words where that is defined."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from joulelab.distill.chunked import TermWeights, chunk_terms
from joulelab.distill.logit_cache.codecs import get_codec
from joulelab.distill.logit_cache.kd_loss import DenseTargets, KdLoss, TeacherHead
from joulelab.distill.logit_cache.target_encoding import select_targets, teacher_probabilities
from joulelab.distill.losses import DIVERGENCES, logit_mse_sum, response_kl_sum, soft_target_kl_sum, teacher_log_softmax
from joulelab.distill.squad.objective import span_kl_sum

ROWS, WORDS, RULED_OUT = 4, 9, [2, 7]
KEPT = [word for word in range(WORDS) if word not in RULED_OUT]


def both():
    torch.manual_seed(0)
    student, teacher = torch.randn(ROWS, WORDS, requires_grad=True), torch.randn(ROWS, WORDS)
    teacher[:, RULED_OUT] = -torch.inf
    return student, teacher


def forward_kl_by_hand(student, teacher, temperature):
    p = F.softmax(teacher[:, KEPT] / temperature, -1)
    log_q = F.log_softmax(student / temperature, -1)[:, KEPT]
    return temperature**2 * (p * (p.log() - log_q)).sum()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("loss", [soft_target_kl_sum, response_kl_sum])
def test_soft_targets(loss, temperature):
    student, teacher = both()
    found, expected = loss(student, teacher, temperature), forward_kl_by_hand(student, teacher, temperature)
    torch.testing.assert_close(found, expected)
    for one in (found, expected):
        assert torch.autograd.grad(one, student, retain_graph=True)[0].isfinite().all()
    ruled_out_on_both_sides = torch.where(teacher.isneginf(), teacher, student.detach()).requires_grad_()
    loss(ruled_out_on_both_sides, teacher, temperature).backward()
    assert ruled_out_on_both_sides.grad.isfinite().all()


def test_spans_of_answers():
    student, teacher = both()
    answerable = torch.ones(ROWS, WORDS, dtype=torch.bool)
    answerable[:, 0] = False
    found = span_kl_sum((student, student), (teacher, teacher), answerable, 2.0)
    found.backward()
    assert found.isfinite() and student.grad.isfinite().all()


def test_distance_of_logits_leaves_ruled_out_words_out():
    student, teacher = both()
    found = logit_mse_sum(student, teacher)
    torch.testing.assert_close(found, (student[:, KEPT] - teacher[:, KEPT]).square().sum())
    assert torch.autograd.grad(found, student)[0].isfinite().all()


def test_chunks_of_a_vocabulary():
    student, teacher = both()
    weights = TermWeights(kl=1.5, mse=0.5, ce=1.0, temperature=2.0)
    sums, gradient = chunk_terms(
        student.detach(), teacher, torch.zeros(ROWS, dtype=torch.long), torch.ones(ROWS), weights
    )
    assert sums.isfinite().all() and gradient.isfinite().all()
    torch.testing.assert_close(sums[0], forward_kl_by_hand(student, teacher, 2.0).detach())
    plain = 1.5 * response_kl_sum(student, teacher, 2.0) + 0.5 * logit_mse_sum(student, teacher)
    plain = plain + F.cross_entropy(student, torch.zeros(ROWS, dtype=torch.long), reduction="sum")
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, student)[0])


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_divergences(divergence):
    student, teacher = both()
    value, slope = DIVERGENCES[divergence](F.log_softmax(student, -1), teacher_log_softmax(teacher, 1.0))
    assert value.isfinite().all() and slope.isfinite().all()
    torch.testing.assert_close(slope, torch.autograd.grad(value.sum(), student)[0])


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_hidden_states_and_a_head_whose_bias_rules_words_out(divergence):
    torch.manual_seed(0)
    hidden, head = torch.randn(1, ROWS + 1, 8, requires_grad=True), torch.randn(WORDS, 8)
    bias = torch.zeros(WORDS)
    bias[RULED_OUT] = -torch.inf
    labels = torch.zeros(1, ROWS + 1, dtype=torch.long)
    targets = DenseTargets(torch.randn(ROWS, 8), TeacherHead(head, bias), WORDS)
    sums = KdLoss(0.3, 2.0, divergence, chunk=3)(hidden, head, targets, labels)
    sums.loss.backward()
    assert sums.loss.isfinite() and hidden.grad.isfinite().all()


@pytest.mark.parametrize("codec", ["rs50", "hybrid4", "topk8-renorm", "topk8-ghost", "topk8-gold"])
def test_what_a_cache_keeps(codec):
    """`topk8` keeps more words than the seven that are left."""
    _, teacher = both()
    picked = select_targets(get_codec(codec), teacher, WORDS, 1.0, torch.rand(ROWS))
    assert all(kept.isfinite().all() for kept in picked.values())
    if "records" in picked:
        gaps = torch.where(picked["records"] == -1, 0, picked["records"] & (2**18 - 1))
        assert not set(gaps.cumsum(1).flatten().tolist()) & set(RULED_OUT)
    _, entropy = teacher_probabilities(teacher, WORDS, 1.0, True)
    p = F.softmax(teacher[:, KEPT], -1)
    torch.testing.assert_close(entropy, -(p * p.log()).sum(-1))
