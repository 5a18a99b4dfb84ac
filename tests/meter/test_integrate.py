"""Joules from traces whose true energy is known."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import at, device, gpu_line, header, write

from joulelab.meter.integrate import both_paths, component_energy, device_energy, peak_power_w
from joulelab.meter.series import load_trace

LAG_S = 0.01  # the mean of what is assumed where nothing tells the lag


def steady(path, watts=200.0, seconds=20, counter=True):
    lines = [gpu_line(t / 2, watts, 1000 + watts * t / 2 if counter else None) for t in range(2 * seconds + 1)]
    return load_trace(write(path, [header(device()), *lines]))


def test_a_counter_window_is_the_difference_of_two_readings(tmp_path):
    figure = component_energy(steady(tmp_path / "t.jsonl"), "gpu", [(at(2), at(12))])
    assert figure.energy_j == pytest.approx(2000)
    assert (figure.method, figure.coverage) == ("counter", 1.0)
    assert figure.half_width_j < 0.035 * 2000
    assert figure.gain_error_rel == 0.05


def test_joules_without_errors_are_those_of_the_figure(tmp_path):
    windows = [(at(2.2), at(7.1)), (at(9), at(12.7))]
    for counter in (True, False):
        curve = steady(tmp_path / f"{counter}.jsonl", counter=counter).devices[0].best_path
        assert curve.joules(windows) == curve.energy(windows)[0] == pytest.approx(1720, rel=0.01)


def test_without_a_counter_power_is_integrated_and_reported_as_such(tmp_path):
    figure = component_energy(steady(tmp_path / "t.jsonl", counter=False), "gpu", [(at(2.2), at(12.7))])
    assert figure.energy_j == pytest.approx(2100)
    assert figure.method == "integrated"


def test_two_gpus_are_never_mixed_into_one_integral(tmp_path):
    lines = []
    for t in range(21):
        lines += [gpu_line(t, 100, name="gpu:A"), gpu_line(t, 300, name="gpu:B")]
    trace = load_trace(write(tmp_path / "t.jsonl", [header(device("gpu:A"), device("gpu:B")), *lines]))
    by_device = [device_energy(series, [(at(0), at(10))]).energy_j for series in trace.devices]
    assert by_device == pytest.approx([1000, 3000])
    assert component_energy(trace, "gpu", [(at(0), at(10))]).energy_j == pytest.approx(4000)


def test_a_missing_sensor_is_missing_with_reason_and_fix_and_never_0(tmp_path):
    gone = {"component": "gpu", "reason": "no driver", "fix": "install it"}
    trace = load_trace(write(tmp_path / "t.jsonl", [header(missing=[gone])]))
    figure = component_energy(trace, "gpu", [(at(0), at(1))])
    assert (figure.energy_j, figure.method, figure.reason, figure.fix) == (None, "missing", "no driver", "install it")


def test_two_packages_with_their_own_wraps_give_the_true_joules(tmp_path):
    """True 1,030 J; one wrap range for both packages had given 30 J."""
    devices = [
        device("rapl:package-0", "cpu", wrap_j=262.0, refresh_s=1e-9),
        device("rapl:package-1", "cpu", wrap_j=1000.0, refresh_s=1e-9),
        device("rapl:core", "cpu", counted=False),
    ]
    rows = [(250.0, 100.0), (10.0, 340.0), (32.0, 600.0), (30.0, 840.0), (50.0, 98.0)]
    # package 0: +22, +22, wrap to 30 (+260), +20 ; package 1: +240, +260, +240, wrap to 98 (+258)
    lines = [
        {"kind": "rapl", "mono_ns": at(t), "rapl": {"package-0": a, "package-1": b, "core": 5.0 * t}}
        for t, (a, b) in enumerate(rows)
    ]
    trace = load_trace(write(tmp_path / "t.jsonl", [header(*devices), *lines]))
    figure = component_energy(trace, "cpu", [(at(0), at(4))])
    assert figure.energy_j == pytest.approx((22 + 22 + 260 + 20) + (240 + 260 + 240 + 258))


def set_back(path, samples=(), sample_mw=100_000):
    """100 W for 20 s; the counter is set back between the readings at 10 and 11 s."""
    lines = [gpu_line(t, 100, 1000 + 100 * t if t <= 10 else 100 * t - 1050) for t in range(21)]
    lines += [samples_line(20, samples, sample_mw)] if samples else []
    return load_trace(write(path, [header(device(refresh_s=1e-9)), *lines]))


def samples_line(second, ends_s, power_mw):
    """What the 20 ms that ended at these seconds drew."""
    stamps = [at(end + LAG_S) for end in ends_s]
    return {
        "kind": "samples",
        "mono_ns": at(second),
        "device": "gpu:A",
        "wall_us": at(second) // 1000,
        "wall_us_mono_ns": at(second),
        "sample_us": [stamp // 1000 for stamp in stamps],
        "sample_mw": [power_mw] * len(stamps),
    }


def test_the_step_in_which_a_counter_was_set_back_is_unknown_and_never_0_joules(tmp_path):
    trace = set_back(tmp_path / "t.jsonl")
    figure = component_energy(trace, "gpu", [(at(0), at(20))])
    assert figure.energy_j == pytest.approx(1900)
    assert figure.coverage == pytest.approx(19 / 20)
    assert figure.reason == "the energy counter was set back"
    assert [gap.reason for gap in trace.gaps] == ["the energy counter was set back"]
    assert peak_power_w(trace, "gpu", [(at(0), at(20))]) == 100


def test_windows_next_to_the_set_back_are_untouched_and_one_inside_it_is_missing(tmp_path):
    trace = set_back(tmp_path / "t.jsonl")
    for window in ((at(0), at(10)), (at(11), at(20))):
        figure = component_energy(trace, "gpu", [window])
        assert (figure.energy_j, figure.coverage) == pytest.approx((100 * (window[1] - window[0]) / 1e9, 1.0))
        assert figure.reason is None
    inside = component_energy(trace, "gpu", [(at(10.2), at(10.8))])
    assert (inside.energy_j, inside.method, inside.reason) == (None, "missing", "the energy counter was set back")


def test_samples_continue_at_the_counter_s_scale_where_it_was_set_back(tmp_path):
    """The samples read 2 % high here, as those of a card may: the counter on both sides sets that right."""
    trace = set_back(tmp_path / "t.jsonl", samples=[0.02 * (k + 1) for k in range(1000)], sample_mw=102_000)
    figure = component_energy(trace, "gpu", [(at(0), at(20))])
    assert figure.energy_j == pytest.approx(2000, rel=0.002)
    assert figure.coverage == pytest.approx(1.0)
    assert figure.reason == "the energy counter was set back"
    assert component_energy(trace, "gpu", [(at(10), at(11))]).energy_j == pytest.approx(100, rel=0.002)


def test_where_the_samples_failed_with_the_counter_the_joules_are_unknown(tmp_path):
    """No samples from 10.2 to 10.8 s, while the driver was reloaded; elsewhere a hole is the counter's to fill."""
    ends = [0.02 * (k + 1) for k in range(1000)]
    left = [end for end in ends if not (10.2 < end < 10.81 or 5 < end < 5.5)]
    figure = component_energy(set_back(tmp_path / "t.jsonl", samples=left), "gpu", [(at(0), at(20))])
    assert figure.coverage == pytest.approx(1 - 0.6 / 20, abs=0.002)
    assert figure.energy_j == pytest.approx(2000 - 60, rel=0.005)


def test_the_two_paths_are_compared_where_the_counter_was_not_set_back(tmp_path):
    paths = both_paths(set_back(tmp_path / "t.jsonl"), "gpu", [(at(8), at(14))])
    assert paths.counter.energy_j == pytest.approx(500)
    assert paths.disagreement_rel == pytest.approx(0.0, abs=1e-6)


def test_a_wrapping_counter_that_fell_too_far_for_a_wrap_was_set_back(tmp_path):
    """From 5,000 J to 7 J within half a second: as a wrap that were half a megawatt."""
    package = device("rapl:package-0", "cpu", wrap_j=262_143.0, refresh_s=1e-9, facts={"max_gap_s": 131.0})
    rows = [4_900.0, 4_950.0, 5_000.0, 7.0, 57.0]
    lines = [{"kind": "rapl", "mono_ns": at(k / 2), "rapl": {"package-0": value}} for k, value in enumerate(rows)]
    trace = load_trace(write(tmp_path / "t.jsonl", [header(package), *lines]))
    figure = component_energy(trace, "cpu", [(at(0), at(2))])
    assert (figure.energy_j, figure.coverage) == (pytest.approx(150), pytest.approx(0.75))
    assert figure.reason == "the energy counter was set back"


def test_an_estimate_keeps_its_name_and_its_wide_gain(tmp_path):
    model = device("estimate:cpu", "cpu_estimate", refresh_s=1e-9, gain_error_rel=0.7, facts={"w_per_thread": 3.0})
    lines = [
        {"kind": "estimate", "mono_ns": at(t), "device": "estimate:cpu", "busy_thread_s": 2.0 * t} for t in range(5)
    ]
    trace = load_trace(write(tmp_path / "t.jsonl", [header(model), *lines]))
    figure = component_energy(trace, "cpu_estimate", [(at(1), at(4))])
    assert (figure.energy_j, figure.method, figure.gain_error_rel) == (pytest.approx(18.0), "estimated", 0.7)


def test_a_window_beyond_the_trace_lowers_the_coverage(tmp_path):
    figure = component_energy(steady(tmp_path / "t.jsonl", seconds=10), "gpu", [(at(5), at(15))])
    assert figure.energy_j == pytest.approx(200 * 4.95)  # the last reading tells of half a refresh before it
    assert figure.coverage == pytest.approx(0.495)


def test_a_hole_in_polled_power_is_not_filled_in(tmp_path):
    lines = [gpu_line(t, 100) for t in [*range(5), *range(15, 21)]]
    trace = load_trace(write(tmp_path / "t.jsonl", [header(device()), *lines]))
    figure = device_energy(trace.devices[0], [(at(0), at(20))])
    assert figure.energy_j == pytest.approx(900)
    assert figure.coverage == pytest.approx(9 / 20)


def test_the_20_ms_samples_place_an_edge_inside_a_burst(tmp_path):
    """1 s at 100 W, 1 s at 500 W, read once in 2 s: the samples tell which second took the energy."""
    lines = [gpu_line(0.05, 100, 0.0), gpu_line(2.05, 500, 600.0)]
    samples = samples_line(2, [0.02 * (k + 1) for k in range(100)], 100_000)
    samples["sample_mw"][50:] = [500_000] * 50
    trace = load_trace(write(tmp_path / "t.jsonl", [header(device()), *lines, samples]))
    figure = component_energy(trace, "gpu", [(at(0), at(1))])
    assert figure.energy_j == pytest.approx(100, rel=0.01)
    assert peak_power_w(trace, "gpu", [(at(0), at(2))]) == 500


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.floats(0.6, 19.4), min_size=1, max_size=6, unique=True),
    powers=st.lists(st.floats(5, 700), min_size=41, max_size=41),
)
def test_windows_that_partition_a_run_sum_to_it(tmp_path_factory, cuts, powers):
    energy, lines = 0.0, []
    for k, watts in enumerate(powers):
        lines.append(gpu_line(k / 2, watts, energy))
        energy += watts / 2
    trace = load_trace(write(tmp_path_factory.mktemp("t") / "t.jsonl", [header(device()), *lines]))
    edges = sorted({at(0.5), *(at(cut) for cut in cuts), at(19.5)})
    parts = [component_energy(trace, "gpu", [pair]).energy_j for pair in itertools.pairwise(edges)]
    assert sum(parts) == pytest.approx(component_energy(trace, "gpu", [(at(0.5), at(19.5))]).energy_j)


def test_cpu_time_that_was_seen_late_is_spread_over_the_time_in_which_it_was_possible(tmp_path):
    """Eight readings of 0 W, then 15.2 W on two threads of 2.5 W: a child was counted when it was reaped."""
    facts = {"w_per_thread": 2.5, "power_limit_w": 5.0}
    model = device("estimate:cpu", "cpu_estimate", refresh_s=0.01, gain_error_rel=0.7, facts=facts)
    busy = [*[0.0] * 9, 3.04, 3.54]
    lines = [
        {"kind": "estimate", "mono_ns": at(0.5 * k), "device": "estimate:cpu", "busy_thread_s": seconds}
        for k, seconds in enumerate(busy)
    ]
    trace = load_trace(write(tmp_path / "trace.jsonl", [header(model), *lines]))
    (series,) = trace.devices
    assert peak_power_w(trace, "cpu_estimate", [(at(0), at(5))]) <= 5.0 + 1e-6
    assert component_energy(trace, "cpu_estimate", [(at(0), at(5))]).energy_j == pytest.approx(3.54 * 2.5, rel=0.01)
    assert series.counter_j[0] == 0.0 and series.counter_j[-1] == pytest.approx(3.54 * 2.5)
