"""Energy curves: numbers by hand on curves of a few cells, and recorded figures of a curve with everything in it.

A change of the statistics changes the recorded figures: look at the differences, then write them again with
`python tests/meter/test_curve.py`.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from joulelab.clock import NS
from joulelab.meter.alignment import Alignment, Lag
from joulelab.meter.curve import (
    AMBIGUOUS,
    FEW_ANCHORS,
    LAG_SCENARIOS,
    SCALE,
    SCALE_SD,
    WALK_REL_PER_SQRT_S,
    Z95,
    Anchors,
    Cells,
    EnergyCurve,
    Readings,
    _between_known,
    _convolve,
    _correlated_j2,
    _interval_of,
    _nearby,
    _pinned_s,
    _power_around,
    _SampleNoise,
    _smooth,
    _walk_of_unknown_shape,
    _with_steps,
    counter_curve,
    fluctuation_w,
    joined_curve,
    polled_curve,
    sample_cells,
    sample_curve,
    stated_curve,
)

RECORDED = Path(__file__).parent / "recorded" / "curve-figures.json"


def ns(*seconds):
    return (np.array(seconds) * NS).astype(np.int64)


def errors_of(curve, *windows):
    _, errors, _ = curve.energy([tuple(ns(*window).tolist()) for window in windows])
    # less than this is rounding, and the walk that keeps a curve ascending
    return {one.name: one.joules for one in errors if max(map(abs, one.joules)) > 1e-5}


def curve_of(cell_j, edges=None, **fields):
    count = len(cell_j)
    edges = np.arange(count + 1.0) if edges is None else np.array(edges, dtype=float)
    plain = {"walk_j2": np.zeros(count), "sampled": np.zeros(count, dtype=bool), "shape_j": np.zeros(count)}
    fields = {"known": np.ones(count, dtype=bool), "origin_ns": 0, **plain, **fields}
    return EnergyCurve(edges, np.array(cell_j, dtype=float), **fields)


def test_unknown_time_has_the_error_of_the_highest_power():
    curve = curve_of([10, 0, 10], known=np.array([True, False, True]), limit_w=7.0)
    energy_j, errors, covered_s = curve.energy([tuple(ns(0.5, 2.5).tolist())])
    assert (energy_j, covered_s) == (10.0, 1.0)
    assert [(one.joules, one.shared) for one in errors if one.name == "missing time"] == [((7.0,), True)]
    assert errors_of(curve, (0, 1)) == {}
    assert errors_of(curve_of([10, 0, 10], known=np.array([True, False, True])), (0, 3)) == {}


def test_unknown_time_of_1_ns_is_rounding():
    curve = curve_of([0], known=np.array([False]), limit_w=7.0)
    for end_ns, missing_j in ((1, []), (2, [(pytest.approx(14e-9),)])):
        assert [one.joules for one in curve.energy([(0, end_ns)])[1] if one.name == "missing time"] == missing_j


def test_the_scale_has_an_error_only_outside_the_anchors():
    curve = curve_of([10, 20, 40], scale_sd_rel=0.1, pinned_s=(0.5, 2.0))
    assert errors_of(curve, (0, 3))["scale"] == pytest.approx((Z95 * 0.1 * (5 + 40),))
    assert errors_of(curve, (0.5, 2)) == {}


def test_an_edge_inside_a_cell_has_the_error_of_its_shape():
    """Full from a quarter into the cell, in proportion before; an edge that two windows share splits nothing."""
    curve = curve_of([10, 10, 10], edges=[0, 1, 3, 4], shape_j=np.array([1.0, 3.0, 8.0]))
    assert errors_of(curve, (0, 2))["shape"] == pytest.approx((3.0,))
    assert errors_of(curve, (0, 1.25))["shape"] == pytest.approx((1.5,))
    assert errors_of(curve, (0, 2.75))["shape"] == pytest.approx((1.5,))
    assert errors_of(curve, (0.5, 2))["shape"] == pytest.approx((math.sqrt(1 + 9),))
    assert errors_of(curve, (0.5, 2), (2, 3.5))["shape"] == pytest.approx((math.sqrt(1 + 64),))
    assert errors_of(curve, (0, 1)) == {}


def test_a_lag_moves_windows():
    """10 W before 1 s and 30 W after it: a window from 1 s on loses 20 J for each second that it is moved back."""
    curve = curve_of([10, 30, 30, 30], lag_error_s=0.3)
    found = errors_of(curve, (1, 2))["sample lag"]
    assert found == pytest.approx([min(0.0, 20 * 0.3 * one) for one in LAG_SCENARIOS])
    assert errors_of(curve, (2, 3)) == {}


def test_noise_of_samples_is_no_error_of_the_lag():
    """A cell of 1 s with a walk of w J^2: moved by 0.3 s, two edges exchange 0.3 s, more than a sample of 20 ms."""
    walk = np.array([1.0, 2.0, 1.0, 1.0])
    curve = curve_of([10, 30, 30, 30], lag_error_s=0.3, walk_j2=walk, sampled=np.ones(4, dtype=bool))
    found = dict(zip(LAG_SCENARIOS, errors_of(curve, (1, 2))["sample lag"], strict=True))
    assert found[-1.0] == pytest.approx(-math.sqrt(6.0**2 - Z95**2 * 3 * 0.3))
    assert found[1.0] == 0.0
    small = dict(zip(LAG_SCENARIOS, errors_of(curve_of([10, 30, 30, 30], lag_error_s=0.012, walk_j2=walk / 100,
                     sampled=np.ones(4, dtype=bool)), (1, 2))["sample lag"], strict=True))  # fmt: skip
    assert small[-1.0] == pytest.approx(-math.sqrt(0.24**2 - Z95**2 * 0.03 * 0.012 * 0.012 / 0.02))


def test_without_anchors_the_walk_of_the_windows_adds_up():
    curve = curve_of([10, 10, 10], walk_j2=np.array([1.0, 4.0, 2.0]))
    assert errors_of(curve, (0, 2))["scale"] == pytest.approx((Z95 * math.sqrt(5),))
    assert errors_of(curve, (0, 1), (2, 3))["scale"] == pytest.approx((Z95 * math.sqrt(3),))


def test_a_part_of_a_sample_has_its_square_of_the_variance():
    curve = curve_of([10, 10, 10], walk_j2=np.array([1.0, 4.0, 2.0]), sampled=np.array([True, True, True]))
    assert errors_of(curve, (0, 1.5))["scale"] == pytest.approx((Z95 * math.sqrt(1 + 4 / 4),))
    assert errors_of(curve, (0.25, 2))["scale"] == pytest.approx((Z95 * math.sqrt(0.75**2 + 4),))
    assert errors_of(curve, (0, 2.5))["scale"] == pytest.approx((Z95 * math.sqrt(1 + 4 + 2 / 4),))
    in_turn = pytest.approx((Z95 * math.sqrt(0.5**2 + 4 * 0.25**2),))
    assert errors_of(curve, (0, 0.5), (1, 1.25))["scale"] == errors_of(curve, (1, 1.25), (0, 0.5))["scale"] == in_turn


def anchored(correlation=0.0, broken=(False, False), common=(0.0, 0.0, 0.0), read=(0.0, 0.0, 0.0), walk_j2=2.0):
    anchors = Anchors(
        np.array([0.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]), np.array(read), correlation, np.array(common),
        np.array(broken),
    )  # fmt: skip
    return curve_of([10, 10, 10, 10], walk_j2=np.full(4, walk_j2), anchors=anchors, pinned_s=(0.0, 4.0))


def test_anchors_pin_the_walk_and_add_their_own_error():
    """Half of a bridge of variance 4 has 4 / 4; the anchors at its ends count by half each."""
    assert errors_of(anchored(), (0, 4)) == {"counter latch": pytest.approx((Z95 * math.sqrt(1 + 9),))}
    half = errors_of(anchored(), (0, 1))
    assert half["scale"] == pytest.approx((Z95,))
    assert half["counter latch"] == pytest.approx((Z95 * math.hypot(0.5, 1.0),))
    assert errors_of(anchored(walk_j2=0.0), (0, 1)) == {"counter latch": half["counter latch"]}
    quarter = errors_of(anchored(), (2, 2.5))
    assert quarter["scale"] == pytest.approx((Z95 * math.sqrt(4 * 0.25 * 0.75),))
    assert quarter["counter latch"] == pytest.approx((Z95 * math.hypot(0.5, 0.75),))
    read = errors_of(anchored(read=(3.0, 100.0, 4.0)), (0, 4))
    assert read["read time"] == pytest.approx((Z95 * 5,))


def test_two_anchors_are_enough_to_pin():
    anchors = Anchors(
        np.array([0.0, 2.0]), np.array([1.0, 2.0]), np.zeros(2), 0.0, np.zeros(2), np.array([False])
    )  # fmt: skip
    curve = curve_of([10, 10], walk_j2=np.full(2, 2.0), anchors=anchors, pinned_s=(0.0, 2.0))
    assert errors_of(curve, (0, 2)) == {"counter latch": pytest.approx((Z95 * math.sqrt(5),))}


def test_the_noise_of_samples_is_relative_to_their_power():
    watts = 300 + 20 * np.sin(np.arange(120) * 1.3)
    assert fluctuation_w(watts / 1000) == pytest.approx(fluctuation_w(watts) / 1000)
    assert (fluctuation_w(watts) > 1).all() and (fluctuation_w(np.full(120, 300.0)) == 0).all()


def test_correlated_anchors_and_common_shifts_partly_cancel():
    """Var(A_4 - A_0) = 1 + 9 - 2 x 0.5^2 x 3; a shift of all of 1 and 4 J moves the window by 3 J."""
    found = errors_of(anchored(correlation=0.5), (0, 4))["counter latch"]
    assert found == pytest.approx((Z95 * math.sqrt(10 - 1.5),))
    found = errors_of(anchored(common=(1.0, 50.0, 4.0)), (0, 4))["counter latch"]
    assert found == pytest.approx((Z95 * math.sqrt(10 + 9),))


def test_a_broken_interval_is_not_pinned():
    found = errors_of(anchored(broken=(True, False)), (0, 4))
    assert found["scale"] == pytest.approx((Z95 * 2,))
    assert found["counter latch"] == pytest.approx((Z95 * math.hypot(2, 3),))


def test_correlated_sums_are_the_same_by_convolution():
    assert _correlated_j2(np.array([1.0, 0.0, -2.0]), 0.5) == pytest.approx(1 + 4 - 2 * 2 * 0.25)
    assert _correlated_j2(np.array([1.0, 2.0]), 0.0) == 5.0
    many = np.cos(np.arange(70.0))
    distance = np.abs(np.arange(70)[:, None] - np.arange(70))
    for unit in (1.0, 0.01):
        assert _correlated_j2(many * unit, 0.5) == pytest.approx(many @ 0.5**distance @ many * unit**2, rel=0.01)
    assert _correlated_j2(np.ones(70), 0.0) == 70.0
    few = np.cos(np.arange(FEW_ANCHORS))
    exact = few @ 0.5 ** distance[:FEW_ANCHORS, :FEW_ANCHORS] @ few
    assert _correlated_j2(few, 0.5) == pytest.approx(exact, rel=1e-9)
    assert _convolve(np.array([1.0, 0.0, 0.0]), 0.5) == pytest.approx([1.0, 0.5, 0.25])
    assert _convolve(np.ones(60), 0.5)[30] == pytest.approx(1 + 2 * sum(0.5**k for k in range(1, 11)))


def test_a_counter_is_read_half_a_refresh_late():
    readings = Readings(ns(5, 6, 8), np.array([0.0, 100.0, 400.0]), np.array([True, True]), np.full(3, 0.12), 0.6)
    curve = counter_curve(readings, limit_w=200.0, tick_j=3.0)
    assert curve.edges_s == pytest.approx([-0.3, 0.7, 2.7]) and curve.origin_ns == 5 * NS
    assert list(curve.cell_j) == [100.0, 300.0]
    power = np.array([100.0, 150.0, 150.0])
    assert curve.anchors.sd_j == pytest.approx(np.hypot(0.6 / math.sqrt(12) * power, 3 / Z95))
    assert curve.anchors.read_sd_j == pytest.approx(0.12 / math.sqrt(12) * power)
    # 100 J in 1 s at 200 W: 0 to 100 J in the first half; 300 J in 2 s: 100 to 200 J in the first
    assert curve.walk_j2 == pytest.approx([2 * 50**2, 2 * 50**2])
    assert curve.pinned_s == pytest.approx((-0.3, 2.7))
    assert _walk_of_unknown_shape(np.array([100.0]), np.array([2.0]), None) == pytest.approx([2 * 50**2])
    assert _walk_of_unknown_shape(np.array([100.0, 120.0]), np.ones(2), 100.0) == pytest.approx([0.0, 0.0])


def test_polled_power_is_integrated_by_trapezoids_and_holes_stay_open():
    power = np.array([100.0, 300.0, 100.0, 100.0, 100.0])
    curve = polled_curve(ns(1, 2, 3, 6, 9.5), power, None)
    assert curve.cell_j == pytest.approx([200, 200, 300, 350]) and curve.known.all() and curve.origin_ns == NS
    assert polled_curve(ns(1, 2, 3, 6, 7), power, None).known.all()  # a hole is more than three usual steps of 1 s
    assert curve.walk_j2 == pytest.approx((np.std(power) * np.array([1, 1, 3, 3.5])) ** 2)
    holed = polled_curve(ns(1, 2, 3, 6.1, 7), power, 400.0)
    assert list(holed.known) == [True, True, False, True] and holed.cell_j[2] == 0 and holed.walk_j2[2] == 0
    assert polled_curve(ns(1, 2, 3, 6.1, 7), power, None, interpolate_gaps=True).cell_j[2] == pytest.approx(310)


def test_stated_energy_leaves_the_time_between_open():
    curve = stated_curve([(int(3e9), int(5e9), 8.0), (int(1e9), int(2e9), 4.0), (int(5e9), int(6e9), 2.0)])
    assert list(curve.edges_s) == [0, 1, 2, 4, 5] and list(curve.cell_j) == [4, 0, 8, 2]
    assert list(curve.known) == [True, False, True, True]


def test_a_sample_between_two_levels_is_cut_where_its_mean_puts_the_step():
    """175 W between 100 and 400 W: three quarters of it before the step. Levels within 10 % are no step."""
    edges, sampled = np.arange(4) * 0.02, np.ones(3, dtype=bool)
    cells = _with_steps(0, edges, np.array([100.0, 175.0, 400.0]), sampled, np.array([1.0, 2.0, 3.0]))
    assert cells.edges_s == pytest.approx([0, 0.02, 0.035, 0.04, 0.06])
    assert cells.cell_j == pytest.approx([2.0, 1.5, 2.0, 8.0])
    assert list(cells.shape_j) == [1, 2, 2, 3] and cells.sampled.all()
    for watts in ([100.0, 100.0, 400.0], [100.0, 400.0, 400.0], [100.0, 450.0, 400.0], [90.0, 95.0, 100.0]):
        assert len(_with_steps(0, edges, np.array(watts), sampled, np.zeros(3)).cell_j) == 3
    holed = np.array([True, True, False])
    assert len(_with_steps(0, edges, np.array([100.0, 175.0, 400.0]), holed, np.zeros(3)).cell_j) == 3


def test_a_hole_between_samples_is_a_cell_without_energy():
    cells = sample_cells(ns(1.0, 1.02, 2.0, 2.02), np.array([100.0, 100.0, 100.0, 100.0]))
    assert cells.edges_s == pytest.approx([-0.02, 0, 0.02, 0.98, 1.0, 1.02])
    assert cells.cell_j == pytest.approx([2, 2, 0, 2, 2]) and list(cells.sampled) == [True, True, False, True, True]
    assert sample_cells(ns(1.0, 1.05), np.array([100.0, 100.0])).sampled.all()
    curve = sample_curve(cells, Lag(0.01, 0.004), None)
    assert curve.edges_s[0] == pytest.approx(-0.03) and curve.scale_sd_rel == SCALE_SD and curve.lag_error_s == 0.004


def test_an_interval_of_kept_readings_is_known_if_all_that_it_joins_are():
    readings = Readings(ns(0, 1, 2, 3, 4), np.arange(5.0), np.array([True, False, True, True]), np.arange(5.0), 0.1)
    kept = readings.only(np.array([True, False, True, False, True]))
    assert list(kept.joules) == [0, 2, 4] and list(kept.known) == [False, True] and list(kept.call_s) == [0, 2, 4]


def test_sums_over_neighbors_intervals_and_smoothing():
    assert list(_nearby(np.ones(20))[[0, 8, 10, 19]]) == [9, 17, 17, 9]
    assert list(_interval_of(np.array([-1.0, 0.5, 1.5, 4.0]), np.array([0.0, 1.0, 2.0]))) == [0, 0, 1]
    edges, at_s = np.array([-2.0, 0.0, 1.0, 2.0, 4.0]), np.array([0.0, 1.0, 2.0])
    assert list(_between_known(edges, at_s, np.array([True, False]))) == [False, True, False, False]
    assert list(_power_around(np.array([0.0, 1.0, 3.0]), np.array([10.0, 60.0]))) == [10, 30, 30]
    rest = np.array([0.0, 1.0, 5.0, 7.0])
    assert list(_smooth(rest, np.array([True, False, True]), 0.0)) == list(rest)
    smooth = _smooth(rest, np.array([True, False, True]), 0.5)
    assert smooth == pytest.approx([0.5 / 1.5, 1 / 1.5, 8.5 / 1.5, 9.5 / 1.5])


def test_the_scale_is_pinned_where_the_smoother_has_readings_on_both_sides():
    """A correlation of 0.75 reaches three readings: of eight the interval in the middle is left, of seven none."""
    at_s = np.arange(10.0, 18.0)
    assert _pinned_s(at_s, 0.75) == (13, 14) and _pinned_s(at_s, 0.0) == (10, 17)
    assert _pinned_s(at_s[:7], 0.75) == (10, 10)


def joined_at(monkeypatch, readings, timing_s, samples=100, watts=100.0):
    """A joined curve of (time, joules), in seconds after the stamp of the first sample, which is at 10 s."""
    at_s, joules = np.array(readings).T
    monkeypatch.setattr("joulelab.meter.curve.align", lambda *_: Alignment(at_s, np.array(timing_s), 0.0))
    known, call_s = np.ones(len(at_s) - 1, dtype=bool), np.zeros(len(at_s))
    cells = sample_cells(10 * NS + NS // 50 * np.arange(samples), np.full(samples, watts))
    return joined_curve(cells, Readings(10 * NS + ns(*at_s), joules, known, call_s, 0.1), Lag(0.0, 0.005), 700.0)


def test_a_reading_of_unclear_age_is_left_out_if_three_others_are_clear(monkeypatch):
    readings, clear_s = [(0.5, 50.0), (1.0, 100.0), (1.5, 150.0), (1.7, 170.0)], AMBIGUOUS * 0.1
    curve = joined_at(monkeypatch, readings, [0.0, clear_s, 0.0, 0.05])
    assert list(curve.anchors.at_s) == pytest.approx([0.5, 1.0, 1.5])
    assert len(joined_at(monkeypatch, readings, [0.0, 0.05, 0.0, 0.05]).anchors.at_s) == 4


def test_before_the_samples_the_counter_is_alone_with_the_error_of_its_readings(monkeypatch):
    """50 J in the first second, read to 4 ms: 0.2 J."""
    curve = joined_at(monkeypatch, [(-2.0, 0.0), (-1.0, 50.0), (0.5, 200.0), (1.0, 250.0)], [0.004] * 4)
    assert list(curve.edges_s[:3]) == pytest.approx([-2.0, -1.0, -0.02])
    assert curve.joules([(8 * NS, 9 * NS)]) == pytest.approx(50.0) and curve.anchors.sd_j[0] == pytest.approx(0.2)


@pytest.mark.parametrize(("outside", "edges_s", "place"), [(-1.0, [-1.0, -0.02], 0), (3.0, [1.98, 3.0], 100)])
def test_one_reading_before_or_after_the_samples_extends_the_curve(monkeypatch, outside, edges_s, place):
    at_s = sorted([0.5, 1.0, outside])
    curve = joined_at(monkeypatch, [(one, 100.0 * one) for one in at_s], [0.004] * 3)
    assert curve.edges_s[place : place + 2] == pytest.approx(edges_s) and curve.known.all()
    assert list(np.flatnonzero(~curve.sampled)) == [place]
    whole_j = curve.joules([tuple(10 * NS + ns(at_s[0], at_s[-1]))])
    assert whole_j == pytest.approx(100 * (at_s[-1] - at_s[0]), rel=1e-3)  # readings in the samples are smoothed


def test_readings_in_the_first_and_last_sample_cut_no_cell(monkeypatch):
    curve = joined_at(monkeypatch, [(-0.01, 0.0), (1.0, 101.0), (1.97, 198.0)], [0.001] * 3)
    assert curve.edges_s == pytest.approx(np.arange(-1, 100) * 0.02) and curve.sampled.all()


def test_joules_of_the_counter_are_kept_where_samples_read_0_w(monkeypatch):
    curve = joined_at(monkeypatch, [(0.5, 0.0), (1.0, 10.0), (1.5, 40.0)], [0.001] * 3, watts=0.0)
    assert curve.joules([(int(10.5 * NS), 11 * NS)]) == pytest.approx(10.0)
    assert curve.joules([(11 * NS, int(11.25 * NS))]) == pytest.approx(15.0)


def everything():
    """Samples with a hole, steps and a changing scale; a counter with a broken interval that outlasts the samples."""
    place = np.arange(2500)
    power = 300 + 120 * np.sin(place * 0.7) + 15 * ((place * 37) % 11)
    power = np.where((place > 700) & (place % 50 < 25), 110.0 + (place * 13) % 7, power)
    power = np.where(place > 1900, 250.0 + 3 * np.cos(place), power)
    ends = 5.0 + 0.02 * (place + 1)
    truth = np.concatenate([[0.0], np.cumsum(power * 0.02)])
    kept = (place < 1200) | (place > 1300)
    scaled = power * np.where(place % 600 < 300, 1.02, 0.95)
    read_s = np.concatenate([np.arange(5.4, 55.0, 0.31), [55.6, 56.2]])
    latched = np.floor(read_s / 0.1) * 0.1 - 5.0
    joules = np.interp(latched, np.concatenate([[0.0], ends - 5.0, [60.0]]), np.append(truth, truth[-1] + 1500))
    known = np.ones(len(read_s) - 1, dtype=bool)
    known[40] = False
    joules[41:] += 1000
    readings = Readings(ns(*read_s), joules, known, np.full(len(read_s), 0.004), 0.1)
    cells = sample_cells(ns(*(ends[kept] + 0.012)), scaled[kept])
    return {
        "joined": joined_curve(cells, readings, Lag(0.01, 0.005), 700.0),
        "short": joined_curve(sample_cells(ns(*(ends[:120] + 0.012)), scaled[:120]), readings.only(read_s < 7.0),
                              Lag(0.01, 0.005), None),
        "few samples": joined_curve(sample_cells(ns(*(ends[:300] + 0.012)), scaled[:300]), readings,
                                    Lag(0.01, 0.005), 700.0),
        "steady": joined_curve(sample_cells(ns(*(ends[:900] + 0.012)), 300 + 0.1 * np.sin(place[:900])),
                               steady(read_s[read_s < 22.0]), Lag(0.01, 0.005), 700.0),
        "idle": joined_curve(sample_cells(ns(*(ends[:200] + 0.012)), np.zeros(200)),
                             Readings(ns(*read_s[:12]), np.zeros(12), known[:11], np.zeros(12), 0.1),
                             Lag(0.01, 0.005), 700.0),
        "samples": sample_curve(cells, Lag(0.01, 0.005), 700.0),
        "counter": counter_curve(readings, 700.0),
    }  # fmt: skip


def steady(read_s):
    joules = 300.0 * (np.floor(read_s / 0.1) * 0.1 - 5.0)
    return Readings(ns(*read_s), joules, np.ones(len(read_s) - 1, dtype=bool), np.full(len(read_s), 0.004), 0.1)


WINDOWS = {
    "all": [(5.0, 57.0)],
    "a second": [(10.003, 11.007)],
    "50 ms": [(21.011, 21.061)],
    "in a sample": [(30.004, 30.012)],
    "over the hole": [(28.5, 32.25)],
    "over the broken interval": [(17.2, 18.3)],
    "at the end": [(54.0, 56.0)],
    "two": [(12.0, 12.5), (40.0, 41.11)],
}


def figures():
    found = {}
    for name, curve in everything().items():
        for title, windows in WINDOWS.items():
            if name in ("joined", "samples", "counter") or title in ("all", "a second"):
                energy_j, _, covered_s = curve.energy([tuple(ns(*one).tolist()) for one in windows])
                errors = {cause: list(joules) for cause, joules in errors_of(curve, *windows).items()}
                plain = {"energy_j": energy_j, "covered_s": covered_s, "pinned_s": list(curve.pinned_s)}
                found[f"{name}, {title}"] = {**plain, **errors}
    return found


def test_figures_of_a_curve_with_everything_in_it_are_the_recorded_ones():
    recorded = json.loads(RECORDED.read_text())
    found = figures()
    assert found.keys() == recorded.keys()
    for name, one in found.items():
        assert one.keys() == recorded[name].keys(), name
        for cause, joules in one.items():
            assert joules == pytest.approx(recorded[name][cause], rel=1e-6, abs=1e-9), f"{name}: {cause}"


RECORDED_NOISE = {
    1: [0.916639487, 0.0156702525, 9e-06, 0.00871342664, 0.691732267],
    3: [2.54137372, 0.00593394291, 2.7e-05, 0.0171177399, 0.702569496],
    4: [3.3409636, 0.00419845851, 3.6e-05, 0.0216309028, 0.702789385],
    5: [4.20869639, 0.00320801543, 0.0172928267, 0.0607160342, 0.0201607042],
    6: [5.00021593, 0.00258829998, 0.0195104923, 0.0700966137, 0.0210163713],
    20: [17.5746054, 0.000839769005, 0.449358682, 2.39446769, 0.123177123],
}
"""Sums of scale, walk and reading errors, the scale's error and the correlation, by the number of intervals."""


@pytest.mark.parametrize("power_w", [1.0, 0.001, 1000.0])
@pytest.mark.parametrize("intervals", RECORDED_NOISE)
def test_what_a_short_trace_says_about_its_samples_is_as_recorded(intervals, power_w):
    """From four and five intervals on, their own scale and their own spread count. All but the reading errors is
    relative: it does not depend on the power."""
    edges = np.arange(0, intervals + 1.01, 0.25)
    cells_j = 0.25 * power_w * (1.0 + 0.2 * (np.arange(len(edges) - 1) % 3))
    shape_j = np.full(len(cells_j), 0.004 * power_w)
    cells = Cells(0, edges, cells_j, np.ones(len(cells_j), dtype=bool), shape_j)
    late = [1.3, 0.7] * 4 + [1.5, 0.9] * 3  # one reading late, the next one early; then another scale
    steps_j = power_w * np.array([1.0, 1.1, 0.9, 1.05, 1.0, 0.95, *late][:intervals])
    found = _SampleNoise.of(cells, 0.5 + np.arange(intervals + 1.0), np.full(intervals + 1, 0.01), steps_j)
    reading_errors = found.anchor_sd_j.sum() / power_w
    sums = [found.scale.sum(), found.scale_sd, found.walk_rel2.sum(), reading_errors, found.correlation]
    assert sums == pytest.approx(RECORDED_NOISE[intervals], rel=1e-6)


@pytest.mark.parametrize("shape_j", [[0.3, 0.0], [0.0, 0.3]])
def test_a_reading_has_the_error_of_the_shape_of_its_sample(shape_j):
    """One reading in each of two samples: the mean of both variances, times the weight of a reading when smoothed."""
    cells = Cells(0, np.arange(3.0), np.ones(2), np.ones(2, dtype=bool), np.array(shape_j))
    found = _SampleNoise.of(cells, np.array([0.5, 1.5]), np.zeros(2), np.ones(1))
    smoothed = (1 - found.correlation) / (1 + found.correlation)
    assert found.anchor_sd_j == pytest.approx(np.full(2, math.sqrt(0.3**2 / 2 / Z95**2 * smoothed)))


def test_readings_are_smoothed_over_50_at_most():
    cells = Cells(0, np.arange(3.0), np.ones(2), np.ones(2, dtype=bool), np.zeros(2))
    assert _SampleNoise.of(cells, np.array([0.5, 1.5]), np.full(2, 1.0), np.ones(1)).correlation == 0.98


@pytest.mark.parametrize(("joules", "cell_j"), [(0.0, 1.0), (1.0, 0.0)])
def test_without_energy_on_both_sides_the_samples_are_as_on_other_cards(joules, cell_j):
    cells = Cells(0, np.arange(4.0), np.full(3, cell_j), np.ones(3, dtype=bool), np.full(3, 0.1))
    found = _SampleNoise.of(cells, np.array([0.5, 1.5, 2.5]), np.zeros(3), np.array([joules, joules]))
    assert list(found.scale) == [SCALE, SCALE] and found.scale_sd == SCALE_SD and found.correlation == 0.0
    assert list(found.walk_rel2) == [WALK_REL_PER_SQRT_S**2] * 2 and list(found.anchor_sd_j) == [0.0] * 3


def test_a_step_of_the_counter_counts_where_samples_cover_all_of_it():
    """From a refresh (0.25 s) before its first reading to the samples' hole (0.05 s) after its last."""
    edges = np.array([0.0, 0.5, 1.0, 1.5])
    cells = Cells(0, edges, np.ones(3), np.array([True, True, True]), np.zeros(3))

    def steps(first_s, last_s, cells=cells):
        at_ns = (np.array([first_s, last_s]) * NS).astype(np.int64)
        return (
            Readings(at_ns, np.array([0.0, 7.0]), np.array([True]), np.zeros(2), 0.25).compared_with(cells).steps_j[0]
        )

    assert steps(0.25, 1.45) == 7.0
    assert np.isnan(steps(0.24, 1.45)) and np.isnan(steps(0.25, 1.46))
    holed = Cells(0, edges, np.ones(3), np.array([True, False, True]), np.zeros(3))
    assert np.isnan(steps(0.25, 1.45, holed))


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(figures(), indent=1) + "\n")
