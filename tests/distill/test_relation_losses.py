"""Relation losses against closed forms, and what sets them apart from sums over samples."""

import pytest
import torch

from joulelab.distill.losses import angle_relation_sum, distance_relation_sum


def points(*rows):
    return torch.tensor([[float(value) for value in row] for row in rows])


def test_distances_are_compared_relative_to_their_mean_under_huber():
    # student distances 1, 1, 2 over 4/3; teacher 1, 2, 3 over 2: two pairs differ by 1/4, one agrees
    loss = distance_relation_sum(points([0], [1], [2]), points([0], [1], [3]))
    assert float(loss) == pytest.approx(3 * (2 * 0.5 * 0.25**2) / 3, rel=1e-5)


def test_angles_are_compared_at_every_corner_under_huber():
    # cosines of the teacher's right triangle: 0, 1/sqrt 2, 1/sqrt 2; of the student's line: 1, -1, 1
    root = 0.5**0.5
    loss = angle_relation_sum(points([0, 0], [1, 0], [2, 0]), points([0, 0], [1, 0], [0, 1]))
    assert float(loss) == pytest.approx(0.5 + (1 + root - 0.5) + 0.5 * (1 - root) ** 2, rel=1e-5)


@pytest.mark.parametrize("loss", [distance_relation_sum, angle_relation_sum])
def test_turning_scaling_moving_and_widening_change_no_relation(loss):
    features = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    turned = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(1)))[0]
    moved = 7 * torch.cat([features, torch.zeros(6, 2)], dim=1) @ turned + 3
    assert float(loss(moved, features)) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("loss", [distance_relation_sum, angle_relation_sum])
def test_relations_depend_on_which_samples_meet(loss):
    """The named exception to the rule that every split into micro-batches gives the same gradient."""
    student, teacher = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))
    halves = loss(student[:4], teacher[:4]) + loss(student[4:], teacher[4:])
    assert float(loss(student, teacher)) != pytest.approx(float(halves), rel=1e-3)


@pytest.mark.parametrize("loss", [distance_relation_sum, angle_relation_sum])
def test_equal_samples_and_lonely_ones_give_finite_gradients(loss):
    for rows in (1, 2, 4):
        student = torch.ones(rows, 3, requires_grad=True)
        loss(student, torch.randn(rows, 3)).backward()
        assert torch.isfinite(student.grad).all()
