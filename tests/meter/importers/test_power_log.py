"""Times and energy columns of imported logs, by hand."""

from datetime import datetime

import numpy as np
import pytest

from joulelab.meter.importers.power_log import (
    ELAPSED,
    DeviceLog,
    Findings,
    PowerLog,
    Row,
    Source,
    StageLog,
    StampReader,
    TimeRule,
    _with_energy_in_j,
    amount,
    epoch_seconds,
    gather,
    number,
    parse_zone,
    put_in_order,
    stamp_reader,
)

CARD = Source("gpu:0", "card", "gpu")


def ordered(*seconds):
    found = put_in_order(seconds)
    return list(found.seconds), found.late, found.steps_s


def test_times_in_order_stay():
    assert ordered(0, 1, 2, 2, 3) == ([0, 1, 2, 2, 3], 0, ())
    assert ordered(5) == ([5], 0, ()) and ordered() == ([], 0, ())


def test_late_lines_fill_the_places_where_they_were_missing():
    assert ordered(0, 1, 4, 5, 2, 3, 6, 7) == ([0, 1, 4, 5, 2, 3, 6, 7], 2, ())
    assert ordered(9, 8, 7, 6) == ([9, 8, 7, 6], 3, ())


def test_a_clock_that_was_set_back_continues_after_one_median_step():
    """Back by 3 s after the reading at 5 s: the next, at 2.25 s, is put at 6 s; 2.25 - 5 - 1 = -3.75."""
    seconds, late, steps = ordered(0, 1, 2, 3, 4, 5, 2.25, 3.25, 4.25, 5.25, 6.25)
    assert seconds == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10] and (late, steps) == (0, (-3.75,))
    seconds, late, steps = ordered(100, 101, 102, 50, 51, 52)
    assert seconds == [100, 101, 102, 103, 104, 105] and (late, steps) == (0, (-53.0,))
    seconds, _, steps = ordered(100, 101, 102, 50, 51, 20, 21)
    assert seconds == [100, 101, 102, 103, 104, 105, 106] and steps == (-53.0, -32.0)
    # a second pass over the same time, a quarter of a step after the first
    assert ordered(0, 1, 2, 3, 4, 5, 2.25, 3.25, 4.25) == ([0, 1, 2, 3, 4, 5, 6, 7, 8], 0, (-3.75,))
    # regular steps lead out of the block, although it is in a gap
    assert ordered(0, 1, 2, 20, 21, 22, 15, 16, 17, 18, 19, 20, 21, 22)[1:] == (0, (-8.0,))
    assert ordered(10, 5) == ([10, 15], 0, (-10.0,))


def test_the_median_step_leaves_out_repeated_times():
    """Steps 0 (four times), 2, 2, 13, 2: the usual step is 2 s, so the clock continues at 6 s."""
    seconds, _, steps = ordered(0, 0, 0, 0, 0, 2, 4, -9, -7)
    assert seconds[-2:] == [6, 8] and steps == (-15.0,)


def energy(values, unit, watts=None, times=(1, 2, 3, 4), starts_at_zero=False):
    columns = {"energy_counter_j": np.array(values, dtype=float)}
    if watts is not None:
        columns["power_watts"] = np.array(watts, dtype=float)
    device, how = _with_energy_in_j(DeviceLog(CARD, np.array(times, dtype=float), columns), unit, starts_at_zero)
    at, joules = device.series("energy_counter_j")
    return list(at), list(joules), how


def test_an_energy_column_without_power_has_the_unit_of_its_name():
    at, joules, how = energy([1, 2, 2, 5], "mJ")
    assert (at, joules) == ([1, 2, 3, 4], pytest.approx([0.001, 0.002, 0.002, 0.005]))
    assert how == "the energy column is read as cumulative in mJ, as its name says"
    at, joules, how = energy([3, 2, 2, 5], "Wh")
    assert joules == pytest.approx([10800, 18000, 25200, 43200]) and "the first row (1.08e+04 J) begins before" in how
    at, joules, how = energy([3, 2, 2, 5], "J", starts_at_zero=True)
    assert (at, joules) == ([0, 1, 2, 3, 4], [0, 3, 5, 7, 12]) and "not counted" not in how
    assert energy([3, 2, 2, 5], "J", times=(0, 1, 2, 3), starts_at_zero=True)[0] == [0, 1, 2, 3]
    assert energy([7], "J", times=(1,))[2].startswith("the energy column is read as energy per row in J")


def test_with_power_the_reading_that_gives_its_energy_is_right():
    """100 W for 3 s."""
    power = [100, 100, 100, 100]
    assert energy([0, 100, 200, 300], "J", power)[2] == (
        "the energy column is cumulative in J, inferred from power x time"
    )
    assert "cumulative in J," in energy([0, 299, 299.5, 300], "J", power)[2]
    at, joules, how = energy([0, 1e8, 2e8, 3e8], "mJ", power)
    assert joules == pytest.approx([0, 100, 200, 300]) and how.endswith(
        "in uJ, inferred from power x time (its name says mJ)"
    )
    _, joules, how = energy([100, 99, 100, 101], "J", power)
    assert joules == pytest.approx([100, 199, 299, 400]) and "energy per row in J" in how
    at, _, how = energy([0, 5, 9, 12], "J", power)
    assert at == [] and "does not match power x time in any unit" in how
    assert energy([100, 100, 100, 100], "J", power)[1] == [100, 200, 300, 400]


def row(stamp=None, seconds=None, device="gpu:0", **values):
    return Row(Source(device, "card", "gpu"), stamp=stamp, seconds=seconds, values=values)


def test_records_are_counted_once_unless_they_have_no_time():
    found = Findings("test log")
    log = gather(
        [row(100.0 + 1.7e9, power_watts=5.0)] * 2 + [row(101.0 + 1.7e9, power_watts=7.0)], TimeRule("UTC"), found
    )
    (device,) = log.devices
    assert list(device.columns["power_watts"]) == [5.0, 7.0] and log.has_wall
    assert log.notes == ("gpu:0: 1 records are in the file twice",)


def test_the_order_of_a_records_fields_does_not_matter_and_one_record_is_a_log():
    same = [row(seconds=1.0, power_watts=5.0, temperature_C=5.0), row(seconds=1.0, temperature_C=5.0, power_watts=5.0)]
    log = gather(same, TimeRule(), Findings("test log"))
    assert list(log.devices[0].times_s) == [1.0] and log.notes == ("gpu:0: 1 records are in the file twice",)
    assert gather([row("no time", power_watts=5.0)], TimeRule("UTC"), Findings("test log")).devices == ()


def test_records_of_one_time_are_replaced_by_their_mean():
    rows = [row(seconds=1.0, power_watts=4.0), row(seconds=1.0, power_watts=8.0, temperature_C=50.0)]
    (device,) = gather([*rows, row(seconds=2.0, power_watts=1.0)], TimeRule(), Findings("test log")).devices
    assert list(device.times_s) == [1.0, 2.0] and list(device.columns["power_watts"]) == [6.0, 1.0]
    assert device.columns["temperature_C"][0] == 50.0 and np.isnan(device.columns["temperature_C"][1])


def test_impossible_values_are_left_out_and_counted():
    rows = [row(seconds=1.0, power_watts=-4.0), row(seconds=2.0, power_watts=8.0), row(seconds=5e9, power_watts=1.0)]
    log = gather(rows, TimeRule(), Findings("test log"))
    assert log.notes[0].startswith("2 rows with a negative or impossible power, energy or time")
    assert list(log.devices[0].series("power_watts")[1]) == [8.0]


def test_the_hour_that_autumn_repeats_is_the_second_one_if_the_first_would_go_back():
    """2026-10-25 in Berlin: 02:30 is 00:30 UTC, and an hour later again."""
    stamps = StampReader(parse_zone("Europe/Berlin"), "Berlin")
    first = stamps.seconds("2026-10-25 02:30:00", None)
    assert first == pytest.approx(1792888200.0) and stamps.repeated_hour == 1
    assert stamps.seconds("2026-10-25 02:20:00", first) == first - 600 + 3600
    assert stamps.seconds("2026-10-25 02:40:00", first) == first + 600
    assert stamps.seconds("2026-10-25 03:30:00", None) == first + 2 * 3600 and stamps.repeated_hour == 3
    assert stamps.seconds("2026-03-29 02:30:00", None) is not None and stamps.impossible == 1
    assert (stamps.naive, stamps.aware, stamps.unreadable) == (5, 0, 0)
    assert stamps.seconds("2026-10-25T02:30:00+00:00", None) == first + 2 * 3600 and stamps.aware == 1
    assert stamps.seconds("no time", None) is None and stamps.unreadable == 1
    assert parse_zone("-02:30").utcoffset(None).total_seconds() == -9000


def test_what_is_a_number_and_what_can_be_an_amount():
    assert [number(cell) for cell in (43.2, "43.20 W", "17 %", "-3", ".5", 0)] == [43.2, 43.2, 17.0, -3.0, 0.5, 0.0]
    assert [number(cell) for cell in (True, False, None, "[N/A]", "-", "nan", 10**400, float("inf"))] == [None] * 8
    assert [amount(cell) for cell in (0, 5, 1e18, -1e-9, 1.1e18)] == [0.0, 5.0, 1e18, None, None]


def test_power_is_the_slope_of_a_counter_where_it_does_not_fall():
    times = np.array([0.0, 2.0, 4.0, 6.0])
    device = DeviceLog(CARD, times, {"energy_counter_j": np.array([0.0, 10.0, 10.0, 3.0])})
    assert [list(one) for one in device.power()] == [[1.0, 3.0], [5.0, 0.0]]
    assert len(DeviceLog(CARD, times[:1], {"energy_counter_j": np.array([1.0])}).power()[0]) == 0


def stamps_of(*texts, zone="UTC"):
    reader = stamp_reader(zone)
    return [reader.seconds(text, None) for text in texts], reader


def test_stamps_are_counted_by_what_they_are():
    seconds, reader = stamps_of(1.7e9, "1.7e12", "5e9", "2026-01-01 00:00:00", "2026-01-01T00:00:00+00:00")
    assert seconds == [1.7e9, 1.7e9, None, 1767225600.0, 1767225600.0]
    assert (reader.aware, reader.naive, reader.unreadable) == (4, 1, 1)
    assert reader.notes() == [
        "numeric timestamps have different units, judging by their size: ms, s",
        "1 records have no readable time and were skipped",
    ]
    assert reader.clock_text() == "wall clock; timestamps without an offset, read as UTC"
    assert stamps_of(1.7e9)[1].notes() == []
    assert stamps_of(1.7e9)[1].clock_text() == "wall clock; timestamps are s since 1970, judging by their size"
    assert stamps_of("2026-01-01T00:00:00+00:00")[1].clock_text() == "wall clock; timestamps have an offset"
    _, reader = stamps_of("2026-10-24 12:00:00", "2026-10-26 12:00:00", zone="Europe/Berlin")
    assert reader.notes() == ["daylight saving time changed during the log; durations account for it"]


def test_lines_that_come_late_are_about_a_step_away_from_those_that_are_there():
    """6 and 7 are missing where they belong; a jump of 1.5 steps leads back to the log."""
    assert ordered(0, 1, 2, 3, 4, 5, 8, 9, 6, 7, 10)[1] == 2
    assert ordered(*range(20), 3.5, 20)[1:] == (0, (-16.5,))


def test_energy_per_row_needs_its_sum_without_the_first_row():
    """Rows of 1000, 100, 100 and 100 J at 100 W: the first began before the log. A counter may begin anywhere."""
    power = [100, 100, 100, 100]
    assert "energy per row in J" in energy([1000, 100, 100, 100], "J", power)[2]
    assert "cumulative in J," in energy([5000, 5100, 5200, 5300], "J", power)[2]
    assert energy([100, 200], "J", [100, 100], times=(1, 2))[2].startswith("the energy column is cumulative in J")


def test_a_log_that_is_written_newest_first_is_turned_around():
    assert ordered(9, 8, 7) == ([9, 8, 7], 2, ())
    assert ordered(9, 8, 8, 7, 7) == ([9, 8, 8, 7, 7], 4, ())
    # one time alone, again and again, is no order
    assert ordered(10, 5, 5, 5) == ([10, 15, 15, 15], 0, (-10.0,))


def test_steps_may_be_shorter_than_a_second():
    """Back by 0.95 s in steps of 0.25 s."""
    assert ordered(0, 0.25, 0.5, 0.75, 1, 0.3, 0.55, 0.8) == (
        pytest.approx([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]), 0, (pytest.approx(-0.95),),
    )  # fmt: skip


def test_a_block_that_regular_steps_lead_out_of_is_not_late():
    """With a usual step of 1 s, 1.5 s from the block to the log are a jump; with one of 2 s, 2 s are none."""
    assert ordered(0, 1, 2, 3, 20, 17.5, 18.5, 20, 21)[1:] == (2, ())
    assert ordered(*[2 * time for time in (0, 1, 2, 20, 21, 22, 15, 16, 17, 18, 19, 20, 21, 22)])[1:] == (0, (-16.0,))


def test_late_lines_may_be_the_last_of_the_log_but_not_before_its_begin():
    assert ordered(0, 1, 4, 5, 2, 3)[1:] == (2, ())
    assert ordered(0, 10, 11, 12, 0, 5, 6)[1:] == (3, ())


def test_a_late_line_is_at_least_seven_tenths_of_a_step_from_both_neighbors():
    assert ordered(0, 10, 20, 30, 60, 70, 37, 80)[1:] == (1, ())
    assert ordered(0, 10, 20, 30, 60, 70, 35, 80)[1:] == (0, (-45.0,))
    assert ordered(0, 5, 10, 15, 20, 9, 25)[1:] == (0, (-16.0,))
    # close to the first time, and far from the second
    assert ordered(0, *range(10, 21), 0.25, 21)[1:] == (0, (-20.75,))


def test_the_unit_of_a_stamp_follows_from_its_size():
    assert epoch_seconds(1.7e9) == (1.7e9, "s") and epoch_seconds(1.7e12) == (1.7e9, "ms")
    assert epoch_seconds(1.7e15) == (1.7e9, "us") and epoch_seconds(1.7e18) == (1.7e9, "ns")
    assert epoch_seconds(5.0) == (5.0, "elapsed s") and epoch_seconds(1e8) == (1e8, "s")
    assert [epoch_seconds(limit) for limit in (1e11, 1e14, 1e17)] == [(1e8, "ms"), (1e8, "us"), (1e8, "ns")]


def test_times_end_in_the_year_2096():
    seconds, reader = stamps_of(4e9, 4.001e9, "2096-10-02T07:06:40+00:00", "2096-10-02T07:06:41+00:00", 1e20, "12 s")
    assert seconds == [4e9, None, 4e9, None, None, None] and reader.unreadable == 4
    rows = [row(seconds=4e9, power_watts=1.0), row(seconds=4.001e9, power_watts=1.0)]
    (device,) = gather(rows, TimeRule("UTC"), Findings("test log")).devices
    assert list(device.times_s) == [4e9]


def test_zones_are_east_or_west():
    assert parse_zone("+02:30").utcoffset(None).total_seconds() == 9000
    assert f"({datetime.now().astimezone().tzname()};" in stamp_reader(None).zone_text
    stamps = StampReader(parse_zone("Europe/Berlin"), "Berlin")
    first = stamps.seconds("2026-10-25 02:30:00", None)
    assert stamps.seconds("2026-10-25 02:30:00", first) == first


def test_two_readings_of_a_counter_give_one_power():
    device = DeviceLog(CARD, np.array([0.0, 2.0]), {"energy_counter_j": np.array([0.0, 10.0])})
    assert [list(one) for one in device.power()] == [[1.0], [5.0]]


def test_a_log_begins_with_the_first_reading_of_any_device():
    late, early = (DeviceLog(CARD, np.array(times), {}) for times in ([5.0, 6.0], [3.0, 9.0]))
    empty = DeviceLog(CARD, np.array([]), {})
    assert PowerLog("test log", "a clock", True, (late, empty, early)).first_s == 3.0
    assert PowerLog("test log", "a clock", True, (empty,)).first_s == 0.0


def test_devices_are_counted_and_stages_complete_unless_the_file_says_otherwise():
    assert Source("gpu:0").counted and StageLog("train", "student", "train", 1.0).complete
    assert not Findings("test log").starts_at_zero


def test_an_energy_column_is_scaled_for_the_devices_that_have_one():
    rows = [row(seconds=1.0, energy_counter_j=1000.0), row(seconds=2.0, energy_counter_j=3000.0)]
    rows += [row(seconds=1.0, device="gpu:1", power_watts=5.0)]
    first, second = gather(rows, TimeRule(), Findings("test log", energy_unit="mJ")).devices
    assert list(first.columns["energy_counter_j"]) == [1.0, 3.0] and set(second.columns) == {"power_watts"}
    assert list(gather(rows, TimeRule(), Findings("test log")).devices[0].columns["energy_counter_j"]) == [1000, 3000]


def clock_of(*rows, **found):
    log = gather(rows, TimeRule("UTC"), Findings("test log", **found))
    assert log.notes == ()
    return log.clock, log.has_wall


def test_the_clock_of_a_log_is_described():
    ours = "the recorder's monotonic clock, placed by its header's wall clock"
    sound, naive = row(seconds=1.7e9, power_watts=1.0), row("2026-01-01 00:00:00", power_watts=1.0)
    aware, elapsed = row(1.7e9 + 9, power_watts=1.0), row(5.0, power_watts=1.0)
    assert clock_of(sound) == (ours, True) and clock_of(elapsed) == (ELAPSED, False)
    older = "for older records: wall clock; timestamps without an offset, read as UTC"
    assert clock_of(sound, naive) == (f"{ours}; {older}", True)
    assert clock_of(sound, aware, naive) == (f"{ours}; {older}", True)
    assert clock_of(sound, elapsed_clock="steps") == ("steps", False)
    assert clock_of(naive) == ("wall clock; timestamps without an offset, read as UTC", True)


def test_energy_and_power_agree_within_a_factor_of_3():
    """300 J by power: 850 J and 150 J are the same energy, 950 J and 90 J are not, in J or in another unit."""
    power = [100, 100, 100, 100]
    for joules, agrees in ((850, True), (950, False), (150, True), (90, False)):
        assert ("cumulative in J," in energy([0, 0, 0, joules], "J", power)[2]) is agrees
    # a counter that rose by 1.8: 1800 J in kJ, 6480 J in Wh, and 3600 J by power; the stated unit fits
    assert "cumulative in kJ," in energy([0, 0, 0, 1.8], "kJ", [1200] * 4)[2]
    assert "cumulative in Wh," in energy([0, 0, 0, 1.8], "J", [1200] * 4)[2]
    # 0.3 J by power
    assert energy([0, 1e5, 2e5, 3e5], "mJ", [0.1] * 4)[2].endswith(
        "in uJ, inferred from power x time (its name says mJ)"
    )


def test_two_rows_of_equal_energy_are_energy_per_row_and_one_row_has_its_stated_unit():
    assert energy([100, 100], "J", [100, 100], times=(1, 2))[2].startswith("the energy column is energy per row in J")
    assert energy([7, np.nan], "J", [100, 100], times=(1, 2))[2].startswith("the energy column is read as")
    assert "not counted" in energy([3, 2, 2, 5], "J", times=(0, 1, 2, 3), starts_at_zero=True)[2]
