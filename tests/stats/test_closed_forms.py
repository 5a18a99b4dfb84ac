"""Statistics against closed forms, published values and simulation."""

import math

import numpy as np
import pytest

from joulelab.stats import accuracy_difference, mean_t, ratio_paired, t_quantile, wilson


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.30265), (5, 2.57058), (30, 2.04227), (1000, 1.96234)]
)
def test_t_quantiles_match_the_published_table(degrees, quantile):
    assert t_quantile(0.975, degrees) == pytest.approx(quantile, rel=1e-5)


def test_wilson_matches_the_closed_form():
    found = wilson(81, 100)
    z2 = 1.959963985**2
    center = (81 + z2 / 2) / (100 + z2)
    half = 1.959963985 / (100 + z2) * math.sqrt(81 * 19 / 100 + z2 / 4)
    assert (found.low, found.high) == pytest.approx((center - half, center + half))


def test_wilson_stays_inside_0_and_1_and_is_never_empty():
    assert wilson(0, 10).low == pytest.approx(0.0, abs=1e-12)
    assert wilson(0, 10).high > 0.2
    assert wilson(10, 10).high == pytest.approx(1.0)


def test_mcnemar_with_one_seed_is_the_exact_binomial_test():
    a = np.array([[1] * 10 + [0] * 2 + [1] * 50])
    b = np.array([[0] * 10 + [1] * 2 + [1] * 50])
    found = accuracy_difference(a, b)
    exact = 2 * sum(math.comb(12, k) for k in range(3)) / 2**12
    assert found.p_value == pytest.approx(exact)
    assert found.difference.value == pytest.approx(-8 / 62)
    assert found.discordant == 12


def test_mcnemar_stays_exact_for_thousands_of_discordant_items():
    a = np.array([[1] * 700 + [0] * 650])
    assert accuracy_difference(a, 1 - a).p_value == pytest.approx(0.182, abs=0.005)


def test_two_equal_seeds_do_not_make_a_difference_more_certain():
    rng = np.random.default_rng(0)
    a, b = rng.random((1, 400)) < 0.7, rng.random((1, 400)) < 0.75
    once, twice = accuracy_difference(a, b), accuracy_difference(np.repeat(a, 2, 0), np.repeat(b, 2, 0))
    assert twice.difference.high - twice.difference.low == pytest.approx(once.difference.high - once.difference.low)
    assert twice.p_value == pytest.approx(once.p_value, abs=0.03)


def test_mcnemar_refuses_sides_that_do_not_pair():
    with pytest.raises(ValueError, match="same seeds and items"):
        accuracy_difference(np.ones((1, 3)), np.ones((2, 3)))


def test_equal_methods_give_p_1():
    same = np.ones((2, 50))
    assert accuracy_difference(same, same).p_value == 1.0


def test_t_interval_covers_the_truth_95_times_in_100():
    rng = np.random.default_rng(1)
    hits = sum(not mean_t(rng.normal(3.0, 1.0, 3).tolist()).excludes(3.0) for _ in range(2000))
    assert 0.935 < hits / 2000 < 0.965


def test_one_value_has_an_unbounded_interval():
    assert mean_t([5.0]).low == -math.inf


def test_a_paired_ratio_is_exact_for_a_constant_factor():
    found = ratio_paired([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
