"""Energy and levels of an imported log, by hand. The log begins at 100 s, so that times and seconds of it differ."""

import math

import numpy as np
import pytest

from joulelab.meter.importers.log_energy import (
    IdleGiven,
    Inference,
    Level,
    Segment,
    _level,
    _spread,
    device_energy,
    figures,
    find_levels,
    idle_level,
    inference,
    otsu_cut,
    parse_idle,
    require_energy,
    require_inference,
    stable_idle_before_load,
    summary_data,
    total_rise,
    with_energy,
    without_cooldown,
)
from joulelab.meter.importers.power_log import DeviceLog, PowerLog, Source, UnusableLog

FIRST_S = 100.0


def log_of(*levels, component="gpu", has_wall=True, facts=None, **columns):
    """A reading per second: (watts, number) of each level."""
    watts = np.concatenate([np.full(number, float(power)) for power, number in levels])
    times = FIRST_S + np.arange(len(watts))
    source = Source(device="gpu:0", name="card", component=component)
    device = DeviceLog(source, times, {"power_watts": watts, **columns})
    return PowerLog("test log", "a clock", has_wall, (device,), facts=facts or {})


def curve(*levels):
    return log_of(*levels).devices[0].power()


def test_a_gap_is_left_out_or_interpolated():
    times = FIRST_S + np.array([0.0, 1.0, 2.0, 6.0, 7.0])
    device = DeviceLog(Source("gpu:0", "card", "gpu"), times, {"power_watts": np.array([10.0, 20, 20, 40, 40])})
    found = device_energy(device)
    assert (found.trapezoid_j, found.seen_s, found.mean_w, found.interval_s) == (75.0, 3.0, 25.0, 1.0)
    assert (found.holes, found.interpolated, found.max_w) == (((102.0, 106.0),), False, 40.0)
    assert (found.duration_s, found.covered_s, found.samples) == (7.0, 3.0, 5)
    whole = device_energy(device, interpolate_gaps=True)
    assert (whole.trapezoid_j, whole.seen_s, whole.interpolated) == (195.0, 7.0, True)
    three = DeviceLog(device.source, times[:4] - np.array([0, 0, 0, 1.0]), {"power_watts": np.full(4, 10.0)})
    assert device_energy(three).holes == () and not device_energy(three, interpolate_gaps=True).interpolated


def test_a_counter_that_restarts_begins_at_0_and_one_that_wraps_continues():
    times = np.array([0.0, 1.0, 2.0, 3.0])
    plain = Source("gpu:0", "card", "gpu")
    assert total_rise(times, np.array([10.0, 15.0, 3.0, 4.0]), plain) == (5 + 3 + 1, 1)
    wrapping = Source("rapl:0", "cpu", "cpu", wrap_j=20.0)
    assert total_rise(times, np.array([10.0, 15.0, 3.0, 4.0]), wrapping) == (5 + 8 + 1, 0)
    assert total_rise(times[:1], np.array([10.0]), plain) == (None, 0)
    assert total_rise(times[:2], np.array([10.0, 10.0]), plain) == (0.0, 0)


def test_a_level_leaves_out_readings_next_to_a_change_except_at_the_ends_of_the_log():
    times, watts = curve((100, 6), (300, 5), (100, 4))
    low = _level(times, watts, watts < 200, FIRST_S, "x")
    assert [(one.from_s, one.to_s, one.samples) for one in low.segments] == [(0.0, 4.0, 5), (12.0, 14.0, 3)]
    high = _level(times, watts, watts > 200, FIRST_S, "x")
    assert [(one.from_s, one.to_s, one.samples, one.mean_w) for one in high.segments] == [(7.0, 9.0, 3, 300.0)]
    assert _level(*curve((100, 6), (300, 3), (100, 6)), np.arange(15) // 6 == 1, FIRST_S, "x").samples == 4
    assert _level(times, watts, np.zeros(15, dtype=bool), FIRST_S, "x") is None
    short = np.isin(np.arange(15), (5, 6, 7))
    assert _level(times, watts, short, FIRST_S, "x") is None
    assert (low.power_w, low.spread_w, low.samples) == (100.0, 0.0, 8)


def test_two_levels_are_clear_if_they_are_far_apart():
    idle, busy = find_levels(*curve((100, 8), (300, 8)), FIRST_S)
    assert (idle.power_w, busy.power_w) == (100.0, 300.0)
    assert find_levels(*curve((100, 3), (300, 4)), FIRST_S) is None
    assert find_levels(*curve((100, 4), (300, 4)), FIRST_S) is not None
    assert find_levels(*curve((100, 8), (102, 8)), FIRST_S) is None
    assert find_levels(*curve((100, 8), (102.5, 8)), FIRST_S) is not None
    assert find_levels(np.array([]), np.array([]), FIRST_S) is None
    assert find_levels(np.array([FIRST_S]), np.array([5.0]), FIRST_S) is None
    # 71 W apart and a spread of 24 W in one of the levels: not clear, whichever level varies
    times = FIRST_S + np.arange(16.0)
    varied = np.array([145.0, 190.0] * 4)
    assert find_levels(times, np.concatenate([np.full(8, 100.0), varied]), FIRST_S) is None
    assert find_levels(times, np.concatenate([varied, np.full(8, 235.0)]), FIRST_S) is None
    assert otsu_cut(np.array([1.0, 2.0, 9.0, 10.0])) == 5.5
    # cut after two of four: 2 x 2 x 1.5^2 = 9; after three: 3 x 1 x (5/3)^2 = 8.3
    assert otsu_cut(np.array([0.0, 0.0, 1.0, 2.0])) == 0.5


def test_idle_before_the_load_is_stable():
    """The first readings of a card that cools down are left out until the rest varies by less than 5 %."""
    times, watts = curve((150, 2), (100, 10), (300, 8), (120, 8))
    idle, busy = find_levels(times, watts, FIRST_S)
    found = stable_idle_before_load(times, watts, FIRST_S, idle, busy)
    assert found.power_w == 100.0 and found.segments == (Segment(2.0, 10.0, 100.0, 9),)
    loaded = curve((300, 8), (100, 8))
    assert stable_idle_before_load(*loaded, FIRST_S, *find_levels(*loaded, FIRST_S)) is None


def test_a_lower_level_after_the_load_is_its_cooldown():
    times, watts = curve((400, 10), (200, 10))
    busy = Level(300.0, 1.0, 20, "x", (Segment(0.0, 19.0, 300.0, 20),))
    assert without_cooldown(times, watts, FIRST_S, busy).power_w == 400.0
    rising = curve((200, 10), (400, 10))
    assert without_cooldown(*rising, FIRST_S, busy) is busy
    part = Level(400.0, 1.0, 10, "x", (Segment(0.0, 9.0, 400.0, 10),))
    assert without_cooldown(times, watts, FIRST_S, part) is part


def test_idle_power_as_given():
    times, watts = curve((100, 5), (130, 5))
    given = idle_level(times, watts, FIRST_S, IdleGiven(power_w=7.0))
    assert (given.power_w, given.samples, given.spread_w) == (7.0, 0, None)
    found = idle_level(times, watts, FIRST_S, IdleGiven(window_s=(4.0, 5.0)))
    assert (found.power_w, found.samples, found.spread_w) == (115.0, 2, pytest.approx(30 / math.sqrt(2)))
    assert idle_level(times, watts, FIRST_S, IdleGiven()) is None
    with pytest.raises(UnusableLog, match=r"no reading in --idle 20\.\.30 s"):
        idle_level(times, watts, FIRST_S, IdleGiven(window_s=(20.0, 30.0)))
    assert IdleGiven(power_w=0.0).known and IdleGiven(window_s=(0.0, 1.0)).known and not IdleGiven().known


def test_without_two_levels_all_readings_outside_the_idle_segment_are_the_work():
    times, watts = curve((100, 3), (101, 1), (105, 3))
    found = inference(times, watts, FIRST_S, IdleGiven(window_s=(0.0, 2.0)), 0.5)
    assert (found.idle.power_w, found.busy.power_w, found.busy.samples) == (100.0, 104.0, 4)
    assert (found.net_w, found.net_j, found.gross_j) == (4.0, 2.0, 52.0)
    middle = inference(times, watts, FIRST_S, IdleGiven(window_s=(3.0, 3.0)), 0.5)
    assert middle.busy.power_w == pytest.approx((3 * 100 + 3 * 105) / 6)
    watts_given = inference(times, watts, FIRST_S, IdleGiven(power_w=90.0), 0.5)
    assert watts_given.busy.samples == 7 and watts_given.busy.source == "all readings"
    with pytest.raises(UnusableLog, match="no reading outside"):
        inference(times, watts, FIRST_S, IdleGiven(window_s=(0.0, 6.0)), 0.5)
    with pytest.raises(UnusableLog, match="two clear levels"):
        inference(times, watts, FIRST_S, IdleGiven(), 0.5)
    with pytest.raises(UnusableLog, match="begins with the load"):
        inference(*curve((300, 8), (100, 8)), FIRST_S, IdleGiven(), 0.5)
    clear = inference(*curve((100, 8), (300, 8)), FIRST_S, IdleGiven(), 0.5)
    assert (clear.net_w, clear.idle.source) == (200.0, "stable readings before the load")


def test_the_interval_of_a_level_is_of_20_readings_at_most_and_of_their_rounding():
    assert Level(1.0, 2.0, 4, "x").half_width_w(0.0) == pytest.approx(1.96)
    assert Level(1.0, 2.0, 400, "x").half_width_w(0.0) == pytest.approx(1.96 * 2 / math.sqrt(20))
    assert Level(1.0, None, 1, "x").half_width_w(3.0) == 1.5
    assert Level(1.0, None, 0, "x").half_width_w(3.0) == 0.0
    both = Inference(Level(9.0, None, 1, "x"), Level(5.0, None, 1, "x"), 2.0, rounding_w=6.0)
    assert both.net_half_width_w == pytest.approx(math.hypot(3, 3))
    assert both.net_half_width_j == pytest.approx(2 * math.hypot(3, 3))


def test_the_data_of_a_log():
    temperature = np.array([50.0, 60.0] + [40.0] * 14)
    log = log_of((100, 8), (300, 8), facts={"power_rounding_w": 2.0}, temperature_C=temperature)
    rows = figures(log, IdleGiven(), latency_s=0.5)
    (data,) = summary_data(log, with_energy(log, rows))["devices"]
    # 7 steps at 100 W, one at 200 W, 7 at 300 W
    assert (data["energy_j"], data["energy_method"], data["coverage"]) == (3000.0, "trapezoid", 1.0)
    assert data["trapezoid"] == {"energy_j": 3000.0, "energy_kj": 3.0, "energy_wh": pytest.approx(3000 / 3600)}
    assert data["temperature_C"] == {"mean": pytest.approx((50 + 60 + 14 * 40) / 16), "max": 60.0}
    assert data["counter"] is None and data["first"].startswith("1970-01-01T")
    assert data["above_idle_j"] == 3000 - 15 * 100 and data["inference"]["energy_gross_j"] == 150.0
    assert data["inference"]["power_above_idle_half_width_w"] == pytest.approx(math.hypot(1, 1))
    cold = log_of((100, 8), has_wall=False)
    assert summary_data(cold, figures(cold, IdleGiven()))["devices"][0]["first"] is None
    single = log_of((100, 1))
    assert summary_data(single, figures(single, IdleGiven()))["devices"][0]["coverage"] is None


def test_methods_of_energy():
    def method(component="gpu", **columns):
        source = Source("gpu:0", "card", component)
        device = DeviceLog(source, np.array([100.0, 101.0]), {name: np.array(one) for name, one in columns.items()})
        log = PowerLog("test log", "a clock", True, (device,))
        (data,) = summary_data(log, figures(log, IdleGiven()))["devices"]
        return data["energy_method"], data["energy_j"]

    assert method(power_watts=[5.0, 5.0]) == ("trapezoid", 5.0)
    assert method(power_watts=[5.0, 5.0], energy_counter_j=[0.0, 6.0]) == ("counter", 6.0)
    assert method("cpu_estimate", energy_counter_j=[0.0, 6.0]) == ("estimated", 6.0)
    assert method() == ("missing", None)
    single = DeviceLog(Source("gpu:0"), np.array([100.0]), {"energy_counter_j": np.array([5.0])})
    assert (device_energy(single).counter_s, device_energy(single).counter_j) == (0.0, None)


def test_a_log_without_a_gpu_or_without_readings_is_refused():
    cpu = log_of((100, 8), component="cpu")
    with pytest.raises(UnusableLog, match="needs the measured power of a GPU") as refused:
        require_inference(cpu, figures(cpu, IdleGiven(), 0.5))
    assert "nothing in it was measured" not in str(refused.value)
    estimate = log_of((100, 8), component="cpu_estimate")
    with pytest.raises(UnusableLog, match="nothing in it was measured"):
        require_inference(estimate, figures(estimate, IdleGiven(), 0.5))
    empty = PowerLog("test log", "a clock", True, (DeviceLog(Source("gpu:0", "card", "gpu"), np.array([1.0]), {}),))
    with pytest.raises(UnusableLog, match="no valid reading of power or energy"):
        with_energy(empty, figures(empty, IdleGiven()))


def test_an_idle_segment_may_be_given_as_times():
    log = log_of((100, 8))
    assert parse_idle("1970-01-01T00:01:41+00:00..1970-01-01T00:01:45+00:00", log) == (1.0, 5.0)


def test_a_gap_is_longer_than_three_usual_steps():
    """Steps of 2 s; 6 s are none, 8 s are a gap. The counter rose by 60 J in 18 s."""
    times = FIRST_S + np.array([0.0, 2.0, 4.0, 10.0, 12.0, 20.0])
    device = DeviceLog(Source("gpu:0"), times, {"power_watts": np.full(6, 10.0)})
    found = device_energy(device)
    assert (found.holes, found.seen_s, found.mean_w) == (((112.0, 120.0),), 12.0, 10.0)
    log = PowerLog("test log", "a clock", True, (device,))
    (data,) = summary_data(log, figures(log, IdleGiven()))["devices"]
    assert data["gaps_s"] == [[12.0, 20.0]] and data["coverage"] == 12 / 20
    assert data["last"].startswith("1970-01-01T00:02:00")
    counted = device_energy(DeviceLog(Source("gpu:0"), times[1:], {"energy_counter_j": np.arange(0.0, 75.0, 15.0)}))
    assert (counted.counter_j, counted.counter_s, counted.mean_w) == (60.0, 18.0, 60 / 18)


@pytest.mark.parametrize(("max_gap_s", "restarts"), [(120.0, 0), (130.0, 1)])
def test_a_decrease_is_a_wrap_only_if_the_device_can_count_that_much_in_the_time(max_gap_s, restarts):
    """The counter wraps at 20 J; the rise of 8 J in 1 s needs a limit of 100 x 1 s x 10 J / max_gap_s."""
    source = Source("rapl:0", "cpu", "cpu", wrap_j=20.0, max_gap_s=max_gap_s)
    times = np.array([100.0, 101.0, 102.0, 104.0])
    assert total_rise(times, np.array([10.0, 15.0, 3.0, 4.0]), source)[1] == restarts


def idle_and_busy(*idle_segments, busy_from):
    segments = tuple(Segment(begin, end, 100.0, 1) for begin, end in idle_segments)
    busy = Level(900.0, 0.0, 4, "x", (Segment(busy_from, busy_from + 9, 900.0, 4),))
    return Level(100.0, 0.0, 4, "x", segments), busy


def test_readings_are_stable_up_to_a_standard_deviation_of_5_percent():
    times = FIRST_S + np.arange(5.0)
    levels = idle_and_busy((0.0, 4.0), busy_from=9.0)
    # deviations of 5, 5, 5, 5 and 0 W: sqrt(100 / 4) = 5 W of 100 W
    stable = stable_idle_before_load(times, np.array([105.0, 105.0, 95.0, 95.0, 100.0]), FIRST_S, *levels)
    assert (stable.samples, stable.power_w) == (5, 100.0)
    unstable = stable_idle_before_load(times, np.array([100.0, 150.0, 100.0, 150.0, 100.0]), FIRST_S, *levels)
    assert (unstable.samples, unstable.power_w) == (4, 125.0)


def test_idle_power_is_of_the_last_idle_segment_before_the_load():
    times, watts = curve((100, 5), (101, 5))
    found = stable_idle_before_load(times, watts, FIRST_S, *idle_and_busy((0.0, 4.0), (5.0, 9.0), busy_from=20.0))
    assert (found.samples, found.power_w) == (5, 101.0)


def test_a_cooldown_is_searched_within_the_load():
    times, watts = curve((100, 10), (400, 10), (200, 10))
    busy = Level(300.0, 1.0, 20, "x", (Segment(10.0, 29.0, 300.0, 20),))
    found = without_cooldown(times, watts, FIRST_S, busy)
    assert (found.power_w, found.samples, found.segments[0].from_s) == (400.0, 9, 10.0)


def test_a_level_that_begins_with_the_second_reading_leaves_it_out():
    times, watts = curve((100, 8))
    found = _level(times, watts, np.arange(8) >= 1, FIRST_S, "x")
    assert [(one.from_s, one.to_s) for one in found.segments] == [(2.0, 7.0)]


def test_one_reading_has_no_spread_and_a_log_states_its_length():
    assert _spread(np.array([5.0])) is None and _spread(np.array([5.0, 7.0])) == pytest.approx(math.sqrt(2))
    with pytest.raises(UnusableLog) as refused:
        idle_level(*curve((100, 8)), FIRST_S, IdleGiven(window_s=(20.0, 30.0)))
    assert refused.value.hint == "the log is 7 s long"


def test_energy_above_idle_is_of_power_over_time():
    counter = DeviceLog(Source("gpu:0"), FIRST_S + np.arange(2.0), {"energy_counter_j": np.array([0.0, 9.0])})
    (row,) = figures(PowerLog("test log", "a clock", True, (counter,)), IdleGiven(power_w=5.0))
    assert row.idle.power_w == 5.0 and row.above_idle_j is None
    (row,) = figures(log_of((100, 8), (300, 8)), IdleGiven(), latency_s=0.5)
    assert row.inference.net_half_width_w == 0.0  # no spread and no stated rounding


def test_one_reading_is_a_power_without_energy():
    log = log_of((100, 1))
    rows = with_energy(log, figures(log, IdleGiven()))
    assert [row.energy.max_w for row in rows] == [100.0]
    with pytest.raises(UnusableLog, match=r"energy needs at least two$"):
        require_energy(log, rows)
    noted = PowerLog("test log", "a clock", True, log.devices, notes=("a note", "another"))
    with pytest.raises(UnusableLog, match=r"energy needs at least two \(a note; another\)$"):
        require_energy(noted, rows)
    two = log_of((100, 2))
    require_energy(two, figures(two, IdleGiven()))
