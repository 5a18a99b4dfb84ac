"""Series of a device: which readings count, what is a fault, and how lines become arrays. Numbers by hand."""

import numpy as np
import pytest
from traces import at, device, gpu_line, header, write

from joulelab.clock import NS
from joulelab.meter.sensors import largest_rise_w
from joulelab.meter.series import SET_BACK, SLOW_READ_S, DeviceSeries, Trace, load_trace, unwrap, within_power
from joulelab.meter.trace import copy_to_parquet, read_lines


def stamps(*seconds):
    return (np.array(seconds) * NS).astype(np.int64)


def series(component="gpu", **fields):
    none = np.array([])
    plain = dict.fromkeys(("counter_ns", "counter_j", "power_ns", "power_w", "samples_ns", "samples_w"), none)
    plain |= {"device": "gpu:A", "component": component, "name": "A", "counted": True, "refresh_s": 0.1}
    return DeviceSeries(**{**plain, "gain_error_rel": 0.05, **fields})


def counter(*joules, seconds=None, **fields):
    seconds = range(len(joules)) if seconds is None else seconds
    return series(counter_ns=stamps(*seconds), counter_j=np.array(joules, dtype=float), **fields)


def test_slow_readings_are_left_out_unless_fewer_than_two_are_left():
    slow = SLOW_READ_S * 1.01
    mixed = counter(0, 50, 100, counter_read_s=np.array([SLOW_READ_S, slow, 0.0]))
    assert list(mixed.readings.joules) == [0, 100] and list(mixed.readings.call_s) == [SLOW_READ_S, 0.0]
    assert list(counter(0, 50, 100, counter_read_s=np.array([slow, slow, 0.0])).readings.joules) == [0, 50, 100]
    assert list(counter(0, 50, 100, counter_read_s=np.zeros(3)).readings.joules) == [0, 50, 100]
    assert list(counter(0, 50).readings.call_s) == [0, 0]
    assert counter(7).readings is None and counter(0, 50).readings.refresh_s == 0.1


def test_a_jump_is_more_than_the_device_can_draw_and_an_estimate_has_none():
    facts = {"power_limit_w": 100.0, "w_per_thread": 2.0}
    rises = counter(0, 100, 1e6, facts=facts)
    assert list(rises.readings.known) == [True, False]
    assert [(begin, end) for begin, end, _ in rises.counter_faults] == [(950_000_000, 1_950_000_000)]
    assert list(counter(0, 100, 1e6, facts=facts, component="cpu_estimate").readings.known) == [True, True]
    # two readings 10 ms apart may be on both sides of a refresh of 0.1 s
    most_j = largest_rise_w(100.0) * 0.11
    for rise_j, known in ((0.95 * most_j, True), (1.05 * most_j, False)):
        assert list(counter(0, rise_j, seconds=(0, 0.01), facts=facts).readings.known) == [known]


def test_an_estimate_has_the_error_of_a_clock_tick_and_a_counter_none():
    """Two threads of 3 W: 0.1 s x 3 W is a tick of 0.3 J. A counter at rest adds no error."""
    model = counter(0, 0, 0, component="cpu_estimate", facts={"w_per_thread": 3.0})
    assert model.counter_path.anchors.sd_j == pytest.approx(np.full(3, 0.3 / 1.96))
    assert counter(0, 0, 0).counter_path.anchors.sd_j == pytest.approx(np.zeros(3))


def test_two_samples_are_too_few_for_a_curve():
    two = {"samples_ns": stamps(1.0, 1.02), "samples_w": np.array([50.0, 50.0])}
    polled = {"power_ns": stamps(0, 2, 4), "power_w": np.array([900.0, 900.0, 900.0])}
    assert series(**two, **polled).power_path.cell_j == pytest.approx([1800, 1800])
    assert series(**two).power_path is None
    assert len(counter(0, 5, 9, **two).best_path.cell_j) == 2 and list(counter(0, 5, **two).lag_likelihood) == [0.0]


def test_three_samples_give_the_counter_a_shape_and_say_something_about_the_lag():
    three = {"samples_ns": stamps(1.0, 1.02, 1.04), "samples_w": np.full(3, 50.0)}
    found = counter(0, 5, 9, **three)
    assert found.best_path.sampled.sum() == 3 and len(found.lag_likelihood) > 1


def test_the_method_is_that_of_the_readings():
    assert (counter(0, 5).method, counter(0).method) == ("counter", "integrated")
    assert counter(0, 5, component="cpu_estimate").method == "estimated"
    assert series().last_ns is None
    assert counter(0, 5, samples_ns=stamps(3), samples_w=np.array([1.0])).last_ns == 3 * NS


def test_readings_are_complete_up_to_the_last_of_the_slowest_device_that_still_reports():
    def trace(*devices):
        return Trace({}, devices, (), (), 0, 30 * NS, True, interval_s=2.0, offset_s=0.0)

    fast, slow, failed = counter(0, 5, seconds=(0, 29)), counter(0, 5, seconds=(0, 12)), counter(0, 5, seconds=(0, 9))
    assert trace(fast, slow, failed).reported_until_ns == int(11.9 * NS)
    assert trace(fast, failed).reported_until_ns == int(28.9 * NS)
    assert trace(failed).reported_until_ns == trace().reported_until_ns == 30 * NS


def test_a_fault_is_noted_at_its_reading(tmp_path):
    lines = [gpu_line(t, 100.0, energy_j) for t, energy_j in enumerate((0, 100, 20, 120))]
    trace = load_trace(write(tmp_path / "t.jsonl", [header(device(refresh_s=0.4)), *lines]))
    assert [(gap.mono_ns, gap.reason) for gap in trace.gaps] == [(at(2), SET_BACK)]
    assert (trace.first_ns, trace.last_ns, trace.ended) == (at(0), at(3), False)


def test_samples_are_placed_by_the_pair_of_clocks_and_sorted(tmp_path):
    """Stamps 3 and 1 ms before the wall time that was read together with the monotonic time."""
    line = {"kind": "samples", "device": "gpu:A", "mono_ns": at(5), "wall_us": 9_000_000, "wall_us_mono_ns": at(4)}
    line |= {"sample_us": [8_999_000, 8_997_000], "sample_mw": [250_000, 90_000]}
    (found,) = load_trace(write(tmp_path / "t.jsonl", [header(device()), line])).devices
    assert list(found.samples_ns) == [at(4) - 3_000_000, at(4) - 1_000_000]
    assert list(found.samples_w) == [90.0, 250.0]


def test_cpu_time_that_was_seen_late_is_spread_backward():
    """At most 10 W: 25 J at 3 s were used from 0.5 s on, so 5 J were used by 1 s, and 15 J by 2 s."""
    late = within_power(stamps(0, 1, 2, 3), np.array([0.0, 2.0, 2.0, 25.0]), 10.0)
    assert list(late) == [0.0, 5.0, 15.0, 25.0]
    even = np.array([0.0, 2.0, 4.0])
    assert (
        list(within_power(stamps(5, 6, 7), even, 10.0)) == list(within_power(stamps(5, 6, 7), even, None)) == [0, 2, 4]
    )
    assert list(within_power(stamps(5), np.array([3.0]), 10.0)) == [3.0]


def test_a_wrap_adds_the_range_and_equal_readings_none():
    found = unwrap(stamps(0, 1, 2, 3, 4), np.array([980.0, 980.0, 10.0, 30.0, 30.0]), 1000.0)
    assert list(found) == [980, 980, 1010, 1030, 1030]


def test_every_kind_of_line_becomes_the_readings_of_its_device(tmp_path):
    components = {"gpu:A": "gpu", "rapl:package-0": "cpu", "c": "cpu", "p": "node"}
    devices = [device(name, one, refresh_s=None, gain_error_rel=None) for name, one in components.items()]
    devices.append(device("e", "cpu_estimate", gain_error_rel=0.5, facts={"w_per_thread": 3.0}))
    lines = [
        {"kind": "gpu", "device": "gpu:A", "mono_ns": at(1), "energy_counter_j": 5.0, "counter_mono_ns": at(0.9)},
        {"kind": "gpu", "device": "gpu:A", "mono_ns": at(2), "energy_counter_j": 7.0, "counter_read_s": 0.01},
        {"kind": "gpu", "device": "gpu:A", "mono_ns": at(3), "power_watts": 80.0},
        {"kind": "rapl", "mono_ns": at(4), "rapl": {"package-0": 11.0}},
        {"kind": "counters", "mono_ns": at(5), "counters_j": {"c": 12.0}},
        {"kind": "power", "mono_ns": at(6), "powers_w": {"p": 13.0}},
        {"kind": "estimate", "device": "e", "mono_ns": at(7), "busy_thread_s": 2.0},
        {"kind": "reported", "device": "p", "begin_ns": at(7), "mono_ns": at(8), "energy_j": 3.0, "peak_w": 4.0},
        {"kind": "gap", "device": "c", "mono_ns": at(9), "reason": "unplugged"},
        {"kind": "end", "mono_ns": at(10)},
    ]
    trace = load_trace(write(tmp_path / "t.jsonl", [header(*devices), *lines]))
    gpu, rapl, counted, node, estimate = trace.devices
    assert (list(gpu.counter_ns), list(gpu.counter_j)) == ([at(0.9), at(2)], [5.0, 7.0])
    assert list(gpu.counter_read_s) == [0.0, 0.01] and (list(gpu.power_ns), list(gpu.power_w)) == ([at(3)], [80.0])
    assert (list(rapl.counter_ns), list(rapl.counter_j)) == ([at(4)], [11.0]) and rapl.counter_read_s is None
    assert (list(counted.counter_j), list(node.power_w), list(estimate.counter_j)) == ([12.0], [13.0], [6.0])
    assert [(cell.begin_ns, cell.end_ns, cell.energy_j, cell.peak_w) for cell in node.reported] == [
        (at(7), at(8), 3.0, 4.0)
    ]
    assert [(gap.device, gap.mono_ns, gap.reason) for gap in trace.gaps] == [("c", at(9), "unplugged")]
    assert (gpu.refresh_s, gpu.gain_error_rel, estimate.gain_error_rel) == (0.1, 0.0, 0.5)
    assert [one.device for one in gpu.driver.devices] == ["gpu:A"]  # only GPUs have a lag in common
    assert (trace.first_ns, trace.last_ns, trace.ended, trace.interval_s) == (at(0), at(10), True, 0.5)
    without_time = {"kind": "gap", "device": "c", "reason": "x"}
    assert load_trace(write(tmp_path / "u.jsonl", [header(*devices), without_time])).first_ns == at(0)
    empty = load_trace(write(tmp_path / "empty.jsonl", []))
    assert (empty.first_ns, empty.last_ns, empty.devices, empty.ended) == (0, 0, (), False)


def test_a_second_recorder_adds_its_devices_and_a_gap_if_the_first_was_killed(tmp_path):
    second = {**header(device("gpu:A"), device("gpu:B")), "mono_ns": at(5)}
    for end, gaps in (([], ["recorder"]), ([{"kind": "end", "mono_ns": at(4)}], [])):
        trace = load_trace(write(tmp_path / "t.jsonl", [header(device("gpu:A")), *end, second]))
        assert [one.device for one in trace.devices] == ["gpu:A", "gpu:B"]
        assert ([gap.device for gap in trace.gaps], trace.ended) == (gaps, False)


def test_a_gap_hides_no_wrap_if_one_would_need_five_times_the_highest_power():
    """Followed intervals (up to 2 x 3 s) have 20 W at most; 400 J in the gap of 7 s would be 57 W, 900 J 129 W."""
    for wrap_j, known in ((400.0, False), (900.0, True)):
        facts = {"max_gap_s": 3.0, "wrap_j": wrap_j}
        cpu = counter(0, 10, 130, 140, seconds=(0, 1, 7, 14), component="cpu", facts=facts)
        assert list(cpu.readings.known) == [True, True, known]
    unfollowed = counter(0, 10, seconds=(0, 7), component="cpu", facts={"max_gap_s": 3.0, "wrap_j": 1e9})
    assert list(unfollowed.readings.known) == [False]
    at_rest = counter(0, 0, 0, seconds=(0, 1, 11), component="cpu", facts={"max_gap_s": 3.0, "wrap_j": 70.0})
    assert list(at_rest.readings.known) == [True, True]


def test_two_readings_are_enough_to_spread_and_to_unwrap():
    assert list(within_power(stamps(0, 1), np.array([0.0, 25.0]), 10.0)) == [15.0, 25.0]
    assert list(unwrap(stamps(0, 1, 2), np.array([500.0, 10.0, 20.0]), 1000.0, 1000.0)) == [500, 10, 20]
    assert list(unwrap(stamps(0, 5, 6), np.array([900.0, 10.0, 20.0]), 1000.0, 10.0)) == [900, 1010, 1020]


def test_whether_a_fall_is_a_wrap_depends_on_the_reading_after_it():
    """From 900 to 850 J in 1 s: a wrap would be a rise of 950 J, and 100 x 1 s x 500 J / 1000 s are possible."""
    fallen = [900.0, 900.0, 850.0, 950.0]
    assert list(unwrap(stamps(0, 1, 2, 3), np.array(fallen), 1000.0, 1000.0)) == fallen


def test_the_range_of_a_counter_is_among_its_facts(tmp_path):
    devices = [device("a", "cpu", wrap_j=1000.0, facts={"max_gap_s": 3.0}), device("b", "cpu")]
    found = load_trace(write(tmp_path / "t.jsonl", [header(*devices)])).devices
    assert [one.facts for one in found] == [{"max_gap_s": 3.0, "wrap_j": 1000.0}, {}]


def test_a_gap_of_a_counter_of_unknown_range_may_hide_a_wrap():
    facts = {"max_gap_s": 0.01}
    cpu = counter(0, 0, 0, seconds=(0, 0.01, 0.11), component="cpu", facts=facts)
    assert list(cpu.readings.known) == [True, False]


def test_samples_without_a_power_each_are_not_read(tmp_path):
    line = {"kind": "samples", "device": "gpu:A", "mono_ns": at(5), "wall_us": 9, "wall_us_mono_ns": at(4)}
    line |= {"sample_us": [7, 8], "sample_mw": [250_000]}
    with pytest.raises(ValueError, match="shorter"):
        load_trace(write(tmp_path / "t.jsonl", [header(device()), line]))


def test_a_trace_in_columns_has_the_times_of_its_lines(tmp_path):
    lines = [gpu_line(t, 100.0, 100.0 * t) for t in range(3)]
    path = copy_to_parquet(write(tmp_path / "t.jsonl", [header(device()), *lines]), read_lines)
    trace = load_trace(path)
    assert (trace.first_ns, trace.last_ns, list(trace.devices[0].counter_j)) == (at(0), at(2), [0.0, 100.0, 200.0])


@pytest.mark.parametrize(("last_s", "until_s"), [(90.1, 90.0), (90.0, 99.9)])
def test_a_device_without_a_reading_for_ten_intervals_has_failed(last_s, until_s):
    """Its readings are 0.1 s old; with an interval of 1 s, one that ended 10 s before the last still reports."""
    devices = [counter(0, 1, seconds=(0, end_s)) for end_s in (last_s, 100.0)]
    trace = Trace({}, devices, (), (), 0, 100 * NS, True, interval_s=1.0, offset_s=0.0)
    assert trace.reported_until_ns == pytest.approx(until_s * NS)


def test_a_header_without_a_wall_clock_has_no_offset(tmp_path):
    head = {name: value for name, value in header(device()).items() if name not in ("wall_minus_mono_s", "interval_s")}
    trace = load_trace(write(tmp_path / "t.jsonl", [head, gpu_line(0, 100.0)]))
    assert (trace.offset_s, trace.interval_s) == (0.0, 1.0)
