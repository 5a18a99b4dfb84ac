"""Faults of sensors and clocks: the figure follows the counter, and where it cannot, the interval or the label says so.

The cases are those of an audit of the first release; the joules that release reported are in each docstring.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from audit_intervals import LOADS, SimulatedCard, square_wave
from traces import at, device, gpu_line, header, write

from joulelab.clock import NS
from joulelab.meter.figures import EnergyFigure, ErrorComponent, total
from joulelab.meter.integrate import component_energy, device_energy
from joulelab.meter.series import JUMPED, SET_BACK, SharedLag, load_trace

LENGTH_S = 30.0


def card(load="0.3 s", seed=0, **settings):
    random = np.random.default_rng(seed)
    return SimulatedCard(square_wave(LOADS[load], LENGTH_S, 0.3), random, **settings)


def window(start_s, end_s):
    return round(start_s * NS), round(end_s * NS)


def covers(figure, true_j):
    return abs(figure.energy_j - true_j) <= figure.half_width_j


@pytest.mark.parametrize("load", ["steady", "0.3 s", "2 s"])
def test_where_samples_stop_the_total_follows_the_counter(load):
    """338.9 ± 10 J were reported of 1,003.0 J."""
    simulated = card(load)
    series = simulated.series()
    kept = series.samples_ns < 10 * NS
    series = replace(series, samples_ns=series.samples_ns[kept], samples_w=series.samples_w[kept])
    whole = device_energy(series, [window(1, 28)])
    true_j = simulated.true_energy(1, 28)
    assert whole.energy_j == pytest.approx(true_j, rel=0.005)
    assert covers(whole, true_j)
    assert whole.coverage == pytest.approx(1.0)
    after, before = device_energy(series, [window(15.33, 16.4)]), device_energy(series, [window(5.33, 6.4)])
    assert covers(after, simulated.true_energy(15.33, 16.4))
    assert after.half_width_j > before.half_width_j  # only the counter is left there


def test_samples_stamped_by_another_clock_do_not_shorten_the_curve():
    """The wall clock was set by an hour and the driver kept the old one: 499.6 ± 9 J were reported of 4,000.6 J."""
    simulated = card("0.5 s")
    series = simulated.series()
    moved = np.where(series.samples_ns > 4 * NS, series.samples_ns + 3600 * NS, series.samples_ns)
    series = replace(series, samples_ns=moved)
    figure = device_energy(series, [window(1, 28)])
    assert covers(figure, simulated.true_energy(1, 28))
    assert figure.energy_j == pytest.approx(simulated.true_energy(1, 28), rel=0.01)


def test_a_counter_that_is_set_back_leaves_the_samples_and_an_interval_that_holds():
    """1,006.3 ± 4.0 J were reported of 1,000.8 J."""
    inside = []
    for seed in range(60):
        simulated = card("0.3 s", seed)
        series = simulated.series()
        counter_j = np.where(series.counter_ns > 12 * NS, series.counter_j - 2000, series.counter_j)
        series = replace(series, counter_j=counter_j)
        figure = device_energy(series, [window(10.5, 14.5)])
        inside.append(covers(figure, simulated.true_energy(10.5, 14.5)))
        assert figure.reason == SET_BACK
        assert figure.coverage == 1.0
    assert np.mean(inside) >= 0.93 - 2 * np.sqrt(0.93 * 0.07 / 60)


def test_a_counter_that_jumps_is_not_believed():
    """A jump of 5,000 J: 9,139 J were reported of 2,820 J."""
    simulated = card("2 s")
    series = simulated.series()
    jumped = replace(series, counter_j=np.where(series.counter_ns > 12 * NS, series.counter_j + 5000, series.counter_j))
    figure = device_energy(jumped, [window(8.2, 16.7)])
    assert covers(figure, simulated.true_energy(8.2, 16.7))
    assert figure.energy_j == pytest.approx(simulated.true_energy(8.2, 16.7), rel=0.01)
    assert figure.reason == JUMPED
    no_samples = replace(jumped, samples_ns=jumped.samples_ns[:0], samples_w=jumped.samples_w[:0])
    alone = device_energy(no_samples, [window(8.2, 16.7)])
    assert alone.lower_bound
    assert alone.energy_j < simulated.true_energy(8.2, 16.7) <= alone.energy_j + alone.half_width_j


def test_a_reading_during_which_the_driver_hung_is_of_an_unknown_moment():
    """A driver that hangs for 4 s: 1,178.8 ± 9.1 J were reported of 1,166.6 J."""
    simulated = card("2 s")
    series = simulated.series()
    hung = 11
    read_s, counter_ns = series.counter_read_s.copy(), series.counter_ns.copy()
    read_s[hung], counter_ns[hung] = 4.0, counter_ns[hung] + 2 * NS  # answered at once, returned 4 s later
    behind = (series.counter_ns > series.counter_ns[hung]) & (series.counter_ns < counter_ns[hung] + 2 * NS)
    samples = (series.samples_ns < series.counter_ns[hung]) | (series.samples_ns > series.counter_ns[hung] + 1.6 * NS)
    series = replace(
        series,
        counter_ns=counter_ns[~behind],
        counter_j=series.counter_j[~behind],
        counter_read_s=read_s[~behind],
        samples_ns=series.samples_ns[samples],
        samples_w=series.samples_w[samples],
    )
    for start_s, end_s in ((8.0, 20.0), (11.0, 13.5), (2.0, 28.0)):
        assert covers(device_energy(series, [window(start_s, end_s)]), simulated.true_energy(start_s, end_s))


def test_time_without_readings_widens_the_interval_up_to_the_device_s_limit(tmp_path):
    """`512 J ± 0.1 %` was printed at 72 % coverage."""
    lines = [gpu_line(t, 400.0) for t in [*range(8), *range(12, 21)]]
    path = write(tmp_path / "t.jsonl", [header(device(facts={"power_limit_w": 700.0})), *lines])
    figure = component_energy(load_trace(path), "gpu", [(at(0), at(20))])
    assert figure.coverage == pytest.approx(0.75)
    assert figure.lower_bound
    assert figure.energy_j == pytest.approx(6000)
    assert [error.joules for error in figure.errors if error.name == "missing time"] == [pytest.approx((3500.0,))]
    assert figure.mean_power_w(20.0) == pytest.approx(400)


def test_a_range_of_40_joules_at_30_watts_is_followed(tmp_path):
    """It wraps every 1.33 s; readings 21 ms apart were called gaps in which a wrap may hide."""
    package = device("rapl:package-0", "cpu", wrap_j=40.0, refresh_s=0.001, facts={"max_gap_s": 0.02})
    times = np.cumsum(np.concatenate([np.full(50, 0.021), np.full(60, 0.16)]))
    lines = [{"kind": "rapl", "mono_ns": at(t), "rapl": {"package-0": (30 * t) % 40}} for t in times]
    trace = load_trace(write(tmp_path / "t.jsonl", [header(package), *lines]))
    figure = component_energy(trace, "cpu", [(at(0.5), at(9.5))])
    assert (figure.coverage, figure.energy_j) == (1.0, pytest.approx(270, rel=0.01))


def test_an_error_that_all_cards_share_does_not_average_out():
    """Eight cards in step: 37 to 69 % of the 95 % intervals contained the truth."""
    lag = ErrorComponent(name="sample lag", joules=(-2.0, 2.0), shared=True)
    noise = ErrorComponent(name="counter latch", joules=(1.0,))
    one = EnergyFigure(energy_j=100.0, method="counter").with_errors(lag, noise)
    eight = total([one] * 8)
    by_name = {error.name: error.half_width_j for error in eight.errors}
    assert by_name == {"sample lag": pytest.approx(16.0), "counter latch": pytest.approx(np.sqrt(8))}
    assert eight.half_width_j == pytest.approx(np.hypot(16, np.sqrt(8)))
    assert one.minus(one).half_width_j == pytest.approx(np.sqrt(2))  # opposite signs cancel


def test_the_lag_is_found_from_counter_and_samples():
    for lag_s in (0.0, 0.01, 0.02):
        driver = SharedLag()
        random = np.random.default_rng(int(lag_s * 1000))
        power_w = square_wave(0.5, 60.0, 0.3)
        for _ in range(4):
            SimulatedCard(power_w, random, lag_s).series(driver)
        assert driver.lag.mean_s == pytest.approx(lag_s, abs=driver.lag.half_width_s)
        assert driver.lag.half_width_s < 0.005


def test_windows_that_tile_a_load_have_the_interval_of_the_whole():
    inside = []
    for seed in range(20):
        simulated = SimulatedCard(square_wave(0.3, 60.0, 0.1), np.random.default_rng(seed), lag_s=0.02)
        series = simulated.series()
        edges = [round((2 + 0.05 * seed + 0.6 * k) * NS) for k in range(91)]
        tiles = list(pairwise(edges))
        every_other = tiles[::2]
        whole, tiled = device_energy(series, [(edges[0], edges[-1])]), device_energy(series, tiles)
        assert tiled.energy_j == pytest.approx(whole.energy_j, rel=1e-9)
        assert tiled.half_width_j == pytest.approx(whole.half_width_j, rel=1e-6)
        true_j = sum(simulated.true_energy(a / NS, b / NS) for a, b in every_other)
        inside.append(covers(device_energy(series, every_other), true_j))
    assert sum(inside) >= 17


@pytest.mark.parametrize("lag_s", [0.0, 0.02])
def test_windows_in_step_with_the_load_share_the_error_of_the_lag(lag_s):
    """90 windows of 0.6 s, each while power is high: error -1.25 %, stated ± 0.26 %, because errors were added in
    quadrature that all windows have in the same direction."""
    inside = []
    for seed in range(10):
        simulated = SimulatedCard(square_wave(1.2, 114.0, 0.0), np.random.default_rng(seed), lag_s=lag_s)
        high = [window(1.2 * k, 1.2 * k + 0.6) for k in range(3, 93)]
        figure = device_energy(simulated.series(), high)
        true_j = sum(simulated.true_energy(a / NS, b / NS) for a, b in high)
        inside.append(covers(figure, true_j))
        assert figure.energy_j == pytest.approx(true_j, rel=0.006)
        assert figure.half_width_j < 0.006 * true_j
    assert sum(inside) >= 8


def test_the_interval_shrinks_smoothly_with_the_length_of_the_trace():
    """It fell from 1.88 to 0.52 % when a trace became 5 s long."""
    widths = []
    for length_s in np.arange(3.5, 7.0, 0.5):
        found = []
        for seed in range(12):
            simulated = SimulatedCard(square_wave(None, length_s, 0.0), np.random.default_rng(seed))
            figure = device_energy(simulated.series(), [window(1.0, 2.5)])
            found.append(figure.half_width_j / figure.energy_j)
        widths.append(np.median(found))
    steps = np.array(widths[1:]) / np.array(widths[:-1])
    assert (steps > 0.6).all()
    assert (steps < 1.5).all()
