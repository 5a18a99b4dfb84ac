"""Intervals over repeats: what they cover, and how many repeats a difference would need."""

import math

import numpy as np
import pytest

from joulelab.stats import (
    Interval,
    accuracy_difference,
    difference_of_means,
    mean_bootstrap,
    mean_interval,
    mean_t,
    ratio_paired,
    ratio_unpaired,
    repeats_for,
    repeats_needed,
    widened_ratio,
)
from joulelab.stats.intervals import Z95, _density, t_cdf, t_quantile, wilson


def coverage(interval_of, trials=1500, seed=5):
    rng = np.random.default_rng(seed)
    return sum(not interval_of(rng).excludes(0.0) for _ in range(trials)) / trials


def test_welchs_interval_covers_95_of_100_with_unequal_spreads():
    share = coverage(lambda rng: difference_of_means(rng.normal(0, 1, 3).tolist(), rng.normal(0, 4, 5).tolist()))
    assert 0.935 < share < 0.97


def test_the_bootstrap_of_20_covers_95_of_100_also_where_values_are_skewed():
    assert 0.925 < coverage(lambda rng: mean_bootstrap(rng.normal(0, 1, 20).tolist()), 600) < 0.975
    assert 0.92 < coverage(lambda rng: mean_bootstrap((rng.exponential(1, 20) - 1).tolist()), 600) < 0.975


def test_a_bootstrap_of_a_few_values_is_refused_and_t_is_taken():
    with pytest.raises(ValueError, match="does not cover"):
        mean_bootstrap([1.0, 2.0, 3.0])
    assert mean_interval([1.0, 2.0, 4.0]) == mean_t([1.0, 2.0, 4.0])


def test_a_bootstrap_gives_the_same_interval_every_time():
    values = np.random.default_rng(0).normal(size=25).tolist()
    assert mean_bootstrap(values) == mean_bootstrap(values) == mean_interval(values)
    assert mean_bootstrap([2.0] * 20) == Interval(2.0, 2.0, 2.0)


def test_pairing_takes_out_what_seeds_have_in_common():
    ours, theirs = [10.0, 20.0, 40.0], [5.1, 9.9, 20.2]
    paired, unpaired = ratio_paired(ours, theirs), ratio_unpaired(ours, theirs)
    assert paired.value == pytest.approx(unpaired.value)
    assert paired.excludes(1.0) and not unpaired.excludes(1.0)


def test_scale_errors_of_two_cards_join_in_quadrature_and_those_of_one_card_cancel():
    ratio = Interval(2.0, 2.0 * math.exp(-0.03), 2.0 * math.exp(0.03))
    assert widened_ratio(ratio) == ratio
    half = math.sqrt(0.03**2 + math.log1p(0.04) ** 2)
    assert widened_ratio(ratio, 0.04).high == pytest.approx(2 * math.exp(half))


def test_repeats_needed_are_those_of_the_power_formula():
    # difference of one standard deviation, 80 % power, two-sided 5 %: 10 pairs (t, not z)
    assert repeats_for(1.0, 1.0) == 10
    assert repeats_needed([1.0]) is None and repeats_for(0.001, 1.0) is None
    rng = np.random.default_rng(2)
    seen = sum(mean_t(rng.normal(1.0, 1.0, 10).tolist()).excludes(0.0) for _ in range(1000)) / 1000
    assert 0.77 < seen < 0.87


def test_items_pair_also_where_seeds_do_not():
    rng = np.random.default_rng(4)
    items = rng.random(2000)
    a = np.array([items < 0.7 + 0.05 * rng.normal(size=2000) for _ in range(2)])
    b = np.array([items < 0.78 + 0.05 * rng.normal(size=2000) for _ in range(3)])
    found = accuracy_difference(a, b, paired=False)
    assert found.difference.value == pytest.approx(0.08, abs=0.02) and found.runs == 2
    assert accuracy_difference(a, a, paired=False).p_value == 1.0


@pytest.mark.parametrize(("difference", "needed"), [(2.0, 5), (1.0, 10), (4.0, 3)])
def test_the_number_of_repeats_follows_from_tables_of_students_t(difference, needed):
    """By hand for difference 2 and deviation 1: 4 repeats need (3.182 + 0.978) / 2 = 2.08, 5 need
    (2.776 + 0.941) / sqrt(5) = 1.66; for difference 1: 9 need 1.07, 10 need 0.995; for 4: 2 need 9.96, 3 need 3.10."""
    assert repeats_for(difference, 1.0) == needed


def test_the_density_of_t_is_cauchys_for_one_degree_and_known_for_two():
    """1 / (pi (1 + t^2)), and (2 + t^2)^-1.5."""
    for t in (0.0, 1.0, 2.5):
        assert _density(t, 1) == pytest.approx(1 / (math.pi * (1 + t * t)))
        assert _density(t, 2) == pytest.approx((2 + t * t) ** -1.5)
        assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi)
        assert t_cdf(-t, 2) == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)))


def test_welchs_interval_by_hand():
    """Variances of the means 2/2 and 13/3; degrees (1 + 13/3)^2 / (1 / 1 + (13/3)^2 / 2)."""
    found = difference_of_means([1.0, 3.0], [2.0, 4.0, 9.0])
    degrees = (1 + 13 / 3) ** 2 / (1 + (13 / 3) ** 2 / 2)
    half = t_quantile(0.975, degrees) * math.sqrt(1 + 13 / 3)
    assert (found.value, found.low, found.high) == pytest.approx((-3.0, -3.0 - half, -3.0 + half))
    two = difference_of_means([2.0, 4.0, 9.0], [1.0, 3.0])
    assert (two.low, two.high) == pytest.approx((-found.high, -found.low))
    for ours, theirs in ([1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0]):
        found = difference_of_means(ours, theirs)
        assert (found.low, found.high) == (-math.inf, math.inf)


def test_the_bootstrap_is_studentized_by_each_resample():
    values = np.random.default_rng(3).exponential(size=22)
    draws = np.random.default_rng(0).choice(values, size=(2000, 22))
    mean, root = values.mean(), math.sqrt(22)
    ratios = [(draw.mean() - mean) / (math.sqrt(((draw - draw.mean()) ** 2).sum() / 21) / root) for draw in draws]
    error = math.sqrt(((values - mean) ** 2).sum() / 21) / root
    low, high = np.quantile(ratios, [0.025, 0.975])
    found = mean_bootstrap(values.tolist())
    assert (found.low, found.high) == pytest.approx((mean - high * error, mean - low * error))


def test_a_mean_difference_of_1_needs_a_number_of_repeats_and_of_0_none():
    assert repeats_needed([0.5, 1.5]) == repeats_for(1.0, math.sqrt(0.5))
    assert repeats_needed([-1.0, 1.0]) is None
    assert wilson(1, 1).low == pytest.approx(1 / (1 + Z95**2))
    assert widened_ratio(Interval(2.0, 0.0, 3.0), 0.1) == Interval(2.0, 0.0, 3.0)
