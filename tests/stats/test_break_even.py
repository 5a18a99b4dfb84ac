"""Fieller's interval and break-even counts, against closed forms and by simulation."""

import math

import numpy as np
import pytest

from joulelab.stats import Estimate, break_even_students, break_even_tokens, fieller_interval
from joulelab.stats.break_even import _quadratic, _quantile, _upper_branch, break_even
from joulelab.stats.intervals import Z95, t_quantile

EXACT = 1e-12


def test_with_an_exact_denominator_fieller_is_the_plain_interval():
    found = fieller_interval(Estimate(10.0, 1.0), Estimate(2.0, EXACT))
    assert (found.value, found.low, found.high) == pytest.approx((5.0, 5 - 1.96 / 2, 5 + 1.96 / 2), rel=1e-4)


@pytest.mark.parametrize("unit", [1.0, 0.25])
def test_fieller_matches_its_textbook_form_in_any_unit(unit):
    """r/(1-g) +- t/(b (1-g)) sqrt(va (1-g) + r^2 vb) with g = t^2 vb / b^2, uncorrelated."""
    a, b, t = Estimate(8.0 * unit, 0.5 * unit), Estimate(4.0 * unit, 0.4 * unit), 1.959964
    g, ratio = (t * 0.4 / 4) ** 2, 2.0
    half = t / 4 / (1 - g) * math.sqrt(0.25 * (1 - g) + ratio**2 * 0.16)
    found = fieller_interval(a, b)
    assert (found.low, found.high) == pytest.approx((ratio / (1 - g) - half, ratio / (1 - g) + half), rel=1e-5)


def test_the_published_example_breaks_even_after_ten_students():
    spent, base, distilled = (Estimate(value, 0.01) for value in (11.0, 6.30, 5.20))
    found = break_even_students(spent, base, distilled)
    assert found.breaks_even and found.count == pytest.approx(10.0)
    assert 9.6 < found.low < 10 < found.high < 10.4


def test_tokens_recover_what_a_student_costs_more():
    extra_j = Estimate(3.6e6, 1e3)
    found = break_even_tokens(extra_j, Estimate(0.50, 0.001), Estimate(0.26, 0.001))
    assert found.count == pytest.approx(3.6e6 / 0.24)


def test_a_saving_that_is_not_resolved_does_not_break_even_but_states_from_where_on_it_could():
    found = break_even_students(Estimate(11.0, 0.01), Estimate(6.3, 0.5), Estimate(6.1, 0.5))
    assert not found.breaks_even and found.high == math.inf
    assert found.low == pytest.approx(11 / (0.2 + 1.96 * math.hypot(0.5, 0.5)), rel=0.01)
    assert "not significantly above 0" in found.reason


def test_a_student_that_costs_more_never_breaks_even():
    found = break_even_students(Estimate(11.0, 0.01), Estimate(5.0, 0.1), Estimate(6.0, 0.1))
    assert not found.breaks_even and found.low == math.inf and "uses more energy" in found.reason


def test_one_repeat_resolves_nothing():
    found = break_even_students(Estimate(11.0, 0.01), Estimate.of_repeats([6.3]), Estimate.of_repeats([5.2, 5.1]))
    assert not found.breaks_even and "one repeat" in found.reason


def test_where_nothing_extra_was_spent_it_has_paid_already():
    assert break_even_tokens(Estimate(-5.0, 1.0), Estimate(0.5, 0.01), Estimate(0.3, 0.01)).count == 0.0
    unsure = break_even_tokens(Estimate(-5.0, 10.0), Estimate(0.5, 0.01), Estimate(0.3, 0.01))
    assert unsure.count == 0.0 and unsure.high > 0 and unsure.reason


@pytest.mark.parametrize(("saving", "spread"), [(1.0, 0.1), (1.0, 0.5), (0.2, 0.5), (-0.5, 0.5)])
def test_fiellers_set_covers_the_true_ratio_95_times_in_100(saving, spread):
    """Also where the saving drowns in noise: the set is unbounded then, and still holds the truth as often."""
    rng = np.random.default_rng(3)
    truth, hits, trials = 11.0 / saving, 0, 1000
    for _ in range(trials):
        base = Estimate.of_repeats(rng.normal(5 + saving, spread, 4))
        saved = base - Estimate.of_repeats(rng.normal(5.0, spread, 4))
        found = fieller_interval(Estimate.of_half_width(rng.normal(11.0, 0.1), 0.196), saved)
        inside = found.low <= truth <= found.high
        # an unbounded set also has a part below 0; only what `low` cuts off above 0 is outside
        hits += inside or (math.isinf(found.high) and truth < 0)
    assert 0.935 < hits / trials <= 0.985


def test_nothing_spent_and_nothing_saved_with_one_repeat_is_inconclusive():
    """One run per method, the same teacher: it read `breaks even at once` next to a saving of -37.6 J."""
    found = break_even_students(Estimate(0.0, 0.0), Estimate(100.0, math.inf), Estimate(137.6, math.inf))
    assert (found.count, found.breaks_even) == (None, False)


def test_a_covariance_of_the_two_lowers_the_middle_term():
    """(6 - 3 r)^2 = 4 (1 - 2 x 0.2 r + 0.25 r^2)."""
    assert _quadratic(Estimate(6.0, 1.0), Estimate(3.0, 0.5), 0.2, 2.0) == pytest.approx((8.0, 17.2, 32.0))


def test_counts_below_1_and_savings_below_1_are_numbers_too():
    small = break_even(Estimate(1.0, 0.01), Estimate(100.0, 0.1), "a student")
    assert small.count == pytest.approx(0.01) and 0.009 < small.low < 0.01 < small.high < 0.011
    less = break_even(Estimate(-10.0, 1.0), Estimate(0.5, 0.1), "a student")
    assert (less.count, less.reason) == (0.0, "no extra energy was spent")
    unclear = break_even(Estimate(-0.1, 1.0), Estimate(10.0, 0.1), "a student")
    assert (unclear.count, unclear.low) == (0.0, 0.0) and 0.1 < unclear.high < 0.3
    assert break_even(Estimate(-10.0, 1.0), Estimate(-5.0, 0.1), "a student").count is None


def test_estimates_add_and_subtract_with_their_errors():
    a, b = Estimate(5.0, 3.0, 4), Estimate(2.0, 4.0, 8)
    assert (a + b) == Estimate(7.0, 5.0, pytest.approx(25**2 / (81 / 4 + 256 / 8)))
    assert ((a - b).value, (a - b).standard_error, a.spread) == (3.0, 5.0, (9.0, 4))
    assert Estimate.of_repeats([3.0]).degrees == (a + Estimate.of_repeats([3.0])).degrees == 1
    assert Estimate.of_half_width(7.0, Z95).standard_error == pytest.approx(1.0)
    assert Estimate(5.0, 2.0, 3).interval.high == pytest.approx(5 + 2 * 3.182446)


def test_degrees_of_freedom_are_those_of_the_ratio_that_is_tested():
    """At the ratio 6 the variances are 4 and 36 x 0.25."""
    assert _quantile(Estimate(1.0, 2.0, 4), Estimate(1.0, 0.5, 5), 6.0) == t_quantile(0.975, 169 / (16 / 4 + 81 / 5))


def test_an_unbounded_set_begins_at_the_larger_root():
    """(10 - r)^2 = z^2 (1 + r^2): over a negative square of 1 - z^2 the larger root."""
    square, cross, constant = 1 - Z95**2, 10.0, 100 - Z95**2
    root = (cross - math.sqrt(cross**2 - square * constant)) / square
    for unit in (1.0, 0.01):
        assert _upper_branch(Estimate(10 * unit, unit), Estimate(unit, unit), 0.0) == pytest.approx(root)
    assert _upper_branch(Estimate(10.0, math.inf), Estimate(1.0, 1.0), 0.0) == 0.0
    assert _upper_branch(Estimate(10.0, 1.0), Estimate(1.0, math.inf), 0.0) == 0.0
    assert _upper_branch(Estimate(0.1, 1.0), Estimate(1.0, 1.0), 0.0) == 0.0
    assert fieller_interval(Estimate(0.1, 1.0), Estimate(1.0, 1.0)).low == 0.0
    assert fieller_interval(Estimate(1.0, math.inf), Estimate(1.0, 0.1)).low == 0.0


def test_an_unbounded_set_without_a_gap_begins_at_0():
    """A square of 0, a square above 0 at the degrees of freedom of the numerator, and two equal roots (both at 1)."""
    normal = t_quantile(0.975, math.inf)
    assert _upper_branch(Estimate(10.0, 1.0), Estimate(normal, 1.0), 0.0) == 0.0
    assert _upper_branch(Estimate(10.0, 1.0), Estimate(2.1, 1.0, 3), 0.0) == 0.0
    assert _upper_branch(Estimate(0.0, 1.0), Estimate(0.0, 1.0), 1.0) == 0.0


def test_a_saving_whose_interval_ends_at_0_may_still_break_even():
    found = break_even(Estimate(5.0, 1.0), Estimate(-t_quantile(0.975, math.inf), 1.0), "a student")
    assert found.low == 0.0 and "not significantly above 0" in found.reason


def test_a_break_even_that_is_not_significant_begins_at_0():
    assert break_even(Estimate(0.1, 1.0), Estimate(1.0, 1.0), "a student").low == 0.0
    assert break_even(Estimate(5.0, 1.0), Estimate(1.0, math.inf), "a student").low == 0.0
    assert break_even(Estimate(0.5, 0.1), Estimate(0.0, 1.0), "a student").count is None
    assert break_even(Estimate(0.0, 0.0), Estimate(0.0, 0.0), "a student").count == 0.0
    assert break_even(Estimate(0.5, 0.01), Estimate(1.0, 0.01), "a student").count == pytest.approx(0.5)
    zero = break_even(Estimate(0.0, 1.0), Estimate(10.0, 0.1), "a student")
    assert (zero.count, zero.reason) == (0.0, "no extra energy was measurably spent")
