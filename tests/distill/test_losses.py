"""Losses against closed forms."""

import math

import pytest
import torch

from joulelab.distill.losses import cross_entropy_sum, feature_mse_sum, pool, soft_target_kl_sum


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
