"""Losses against closed forms."""

import math

import pytest
import torch

from joulelab.distill.losses import (
    DIVERGENCES,
    cosine_distance_sum,
    cross_entropy_sum,
    feature_mse_sum,
    forward_kl,
    jensen_shannon,
    logit_difference,
    logit_mse_sum,
    pool,
    soft_target_kl_sum,
)


def test_kl_matches_the_closed_form_and_carries_t_squared():
    student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0) * 2, 0.0]])
    kl = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert float(soft_target_kl_sum(student, teacher, 2.0)) == pytest.approx(4 * kl, rel=1e-6)


def test_kl_is_zero_for_student_equal_teacher_and_never_negative():
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    assert float(soft_target_kl_sum(logits, logits, 3.0)) == pytest.approx(0.0, abs=1e-5)
    assert float(soft_target_kl_sum(logits, logits.flip(0), 3.0)) > 0


def test_sharp_teachers_give_no_nan():
    student, teacher = torch.zeros(1, 3), torch.tensor([[1e4, -1e4, 0.0]])
    assert math.isfinite(float(soft_target_kl_sum(student, teacher, 1.0)))


def test_losses_are_sums_over_samples():
    logits, labels = torch.zeros(5, 2), torch.zeros(5, dtype=torch.long)
    assert float(cross_entropy_sum(logits, labels)) == pytest.approx(5 * math.log(2))
    assert float(feature_mse_sum(torch.zeros(5, 4), torch.full((5, 4), 2.0))) == pytest.approx(20.0)


def test_pooling_leaves_padding_out():
    hidden = torch.tensor([[[1.0], [3.0], [99.0]]])
    mask = torch.tensor([[1, 1, 0]])
    assert float(pool(hidden, mask, "mean")) == 2.0
    assert float(pool(hidden, mask, "cls")) == 1.0


def test_distances_of_features_by_hand():
    student, teacher = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[4.0, 6.0], [0.0, 2.0]])
    assert float(feature_mse_sum(student, teacher)) == pytest.approx((9 + 16) / 2 + 4 / 2)
    across, along = torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([[0.0, 3.0], [5.0, 0.0]])
    assert float(cosine_distance_sum(across, along)) == pytest.approx(1.0)
    assert float(cosine_distance_sum(across, along, torch.tensor([0.25, 9.0]))) == pytest.approx(0.25)


def test_directions_of_features_are_compared_per_sample():
    """(3, 4) has the direction (0.6, 0.8); maps are flattened per sample, and the mean is over two numbers."""
    student, teacher = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 7.0]])
    assert float(feature_mse_sum(student, teacher, normalize=True)) == pytest.approx((0.4**2 + 0.8**2) / 2)
    maps = student.reshape(2, 1, 1, 2), teacher.reshape(2, 1, 1, 2)
    assert float(feature_mse_sum(*maps)) == pytest.approx((4 + 16) / 2 + 25 / 2)


def test_a_logit_that_the_teacher_excludes_has_no_difference():
    student, teacher = torch.tensor([[1.0, 5.0, 2.0]]), torch.tensor([[4.0, -math.inf, 1.0]])
    assert logit_difference(student, teacher).tolist() == [[-3.0, 0.0, 1.0]]
    assert float(logit_mse_sum(student, teacher)) == 10.0


def test_forward_kl_by_hand():
    divergence, gradient = forward_kl(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log())
    assert divergence.tolist() == pytest.approx([0.75 * math.log(1.5) + 0.25 * math.log(0.5)])
    assert gradient[0].tolist() == pytest.approx([-0.25, 0.25])


def _definition(name, student, teacher, beta):
    q, p = student.softmax(-1), teacher.softmax(-1)
    mixture = {"forward": q, "reverse": p, "jsd": beta * p + (1 - beta) * q}[name]
    forward, reverse = (p * (p / mixture).log()).sum(-1), (q * (q / mixture).log()).sum(-1)
    return {"forward": forward, "reverse": reverse, "jsd": beta * forward + (1 - beta) * reverse}[name]


@pytest.mark.parametrize(("name", "beta"), [("forward", 0.5), ("reverse", 0.5), ("jsd", 0.5), ("jsd", 0.2)])
def test_divergences_and_their_gradients_follow_from_the_definition(name, beta):
    drawn = torch.Generator().manual_seed(1)
    student, teacher = (torch.randn(4, 6, generator=drawn, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    expected = _definition(name, student, teacher, beta)
    expected.sum().backward()
    logs = student.detach().log_softmax(-1), teacher.log_softmax(-1)
    found, gradient = jensen_shannon(*logs, beta) if name == "jsd" else DIVERGENCES[name](*logs)
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(gradient, student.grad)
