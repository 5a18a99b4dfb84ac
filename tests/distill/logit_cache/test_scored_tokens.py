"""A divergence from the teacher's top-k and the sampled token: right on average, in value and gradient."""

import pytest
import torch

from joulelab.distill.logit_cache.kd_loss import DenseTargets, KdLoss, TeacherHead
from joulelab.distill.logit_cache.scored_tokens import ScoredTargets
from joulelab.errors import ConfigError

WORDS, WIDTH = 11, 6


def on_average(divergence, listed, stale):
    """The expectation over the sampled token by enumeration: each token once, weighted by its probability of sampling.

    `stale`: sampled with other weights than those that are trained.
    """
    torch.manual_seed(0)
    hidden, head = torch.randn(1, 2, WIDTH), torch.randn(WORDS, WIDTH)
    teacher, teacher_head = torch.randn(1, WIDTH), torch.randn(WORDS, WIDTH)
    log_p = torch.log_softmax(teacher @ teacher_head.T, -1)[0]
    sampling = head + 0.3 * torch.randn_like(head) if stale else head
    log_mu = torch.log_softmax(hidden[0, 0] @ sampling.T, -1)
    top = log_p.topk(listed)
    loss, sums = KdLoss(0.0, 1.0, divergence, chunk=4, beta=0.3), torch.zeros(())
    own = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    for token in range(WORDS):
        targets = ScoredTargets.of(
            top.indices[None], top.values[None], torch.tensor([token]), log_p[token][None], log_mu[token][None], WORDS
        )
        found = loss(own[0], own[1], targets, torch.tensor([[-100, token]]))
        sums = sums + log_mu[token].exp() * found.loss
    exact = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
    dense = DenseTargets(teacher, TeacherHead(teacher_head), WORDS)
    expected = loss(exact[0], exact[1], dense, torch.tensor([[-100, 0]])).loss
    return (sums, *torch.autograd.grad(sums, own)), (expected, *torch.autograd.grad(expected, exact))


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("listed", [0, 3, WORDS])
@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_the_missing_mass_is_estimated_without_bias(divergence, listed, stale):
    for found, expected in zip(*on_average(divergence, listed, stale), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_padding_and_short_lists_have_no_weight_and_temperatures_are_refused():
    ids, log_p = torch.tensor([[4, 0], [5, 6]]), torch.tensor([[-0.1, -torch.inf], [-0.2, -2.0]])
    targets = ScoredTargets.of(
        ids, log_p, torch.tensor([0, 5]), torch.tensor([-3.0, -0.2]), torch.log(torch.tensor([0.5, 0.5])), 9
    )
    assert targets.weights_NK.tolist() == [[1.0, 0.0, 2.0], [1.0, 1.0, 0.0]]  # token 0 fills the first list
    assert targets.padded(4).weights_NK[2:].sum() == 0
    with pytest.raises(ConfigError, match="temperature 2 needs the teacher's full distribution"):
        targets.require(2.0, "forward")
