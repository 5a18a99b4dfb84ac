"""Clocks in logs: zones, daylight saving, steps, late and doubled lines, holes."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from made_logs import every, old_monitor

from joulelab.meter.importers.convert import read_power_log
from joulelab.meter.importers.log_energy import IdleGiven, device_energy, figures
from joulelab.meter.importers.power_log import TimeRule, put_in_order
from joulelab.report.tables.log_tables import log_grid, log_result


def logged(tmp_path, rows, zone=None):
    path = old_monitor(tmp_path / "log", rows)
    log = read_power_log(path, TimeRule(zone), "this test")
    return log, device_energy(log.devices[0])


def constant(stamps, watts=100.0):
    return [(stamp, 0, watts + 0.001 * number) for number, stamp in enumerate(stamps)]


def test_naive_stamps_are_read_in_the_zone_given_not_as_utc(tmp_path):
    log, _ = logged(tmp_path, constant(every(1, 3, "2026-07-01T12:00:00")), "Europe/Berlin")
    utc, _ = logged(tmp_path, constant(every(1, 3, "2026-07-01T12:00:00")), "UTC")
    offset, _ = logged(tmp_path, constant(every(1, 3, "2026-07-01T12:00:00")), "+02:00")
    assert utc.first_s - log.first_s == 7200
    assert offset.first_s == log.first_s


def test_an_unknown_zone_is_answered_with_examples(tmp_path, joulelab_here):
    path = old_monitor(tmp_path / "x", constant(every(1, 3)))
    code, _, err = joulelab_here("import", path, "--time-zone", "Berlin/Europe")
    assert code == 2
    assert "Europe/Berlin" in err


def test_the_hour_that_autumn_runs_through_twice_counts_twice(tmp_path):
    """02:00 to 03:00 comes twice in Berlin on 2026-10-25; the log goes through both."""
    before = every(600, 6, "2026-10-25T02:00:00")
    again = every(600, 12, "2026-10-25T02:00:00")
    log, energy = logged(tmp_path, constant(before + again), "Europe/Berlin")
    assert energy.duration_s == 17 * 600
    assert energy.trapezoid_j == pytest.approx(100 * 17 * 600, rel=1e-3)
    assert any("daylight saving time repeats" in note for note in log.notes)


def test_the_hour_that_spring_leaps_over_is_no_hole(tmp_path):
    stamps = every(600, 6, "2026-03-29T01:00:00") + every(600, 6, "2026-03-29T03:00:00")
    log, energy = logged(tmp_path, constant(stamps), "Europe/Berlin")
    assert energy.duration_s == 11 * 600
    assert energy.holes == ()
    assert any("daylight saving" in note for note in log.notes)


def test_times_that_do_not_exist_hint_at_another_zone(tmp_path):
    log, _ = logged(tmp_path, constant(every(600, 6, "2026-03-29T02:00:00")), "Europe/Berlin")
    assert any("the time zone is probably wrong" in note for note in log.notes)


def test_a_clock_set_back_is_taken_out_and_reported(tmp_path):
    stamps = every(1, 60, "2026-03-02T12:00:00") + every(1, 60, "2026-03-02T11:30:00")
    log, energy = logged(tmp_path, constant(stamps), "UTC")
    assert energy.duration_s == pytest.approx(119)
    assert energy.trapezoid_j == pytest.approx(100 * 119, rel=1e-3)
    assert any(f"the clock was set back by {minutes} min" in note for note in log.notes for minutes in (30, 31))


def test_a_small_step_back_is_a_step_too():
    ordered = put_in_order([0, 1, 2, 3, 4, 1.5, 2.5, 3.5, 4.5, 5.5])
    assert len(ordered.steps_s) == 1
    assert list(np.diff(ordered.seconds)) == pytest.approx([1] * 9)


def test_lines_out_of_order_are_sorted_by_time(tmp_path):
    stamps = every(1, 20)
    stamps[5], stamps[7] = stamps[7], stamps[5]
    log, energy = logged(tmp_path, constant(stamps), "UTC")
    assert energy.duration_s == 19
    assert energy.holes == ()
    assert any("out of order" in note for note in log.notes)


def test_a_log_written_backwards_is_turned():
    ordered = put_in_order([9, 8, 7, 6, 5, 4, 3, 2, 1])
    assert sorted(ordered.seconds) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert ordered.steps_s == ()


def test_doubled_records_count_once(tmp_path):
    rows = constant(every(1, 11))
    log, energy = logged(tmp_path, [row for row in rows for _ in (0, 1)])
    assert energy.samples == 11
    assert energy.trapezoid_j == pytest.approx(1000, rel=1e-3)
    assert any("are in the file twice" in note for note in log.notes)


def test_stamps_in_whole_seconds_of_faster_readings_are_averaged(tmp_path):
    rows = [(stamp, 0, watts) for stamp in every(1, 11) for watts in (50.0, 150.0)]
    log, energy = logged(tmp_path, rows)
    assert energy.samples == 11
    assert energy.trapezoid_j == pytest.approx(1000)
    assert any("have the same timestamp" in note for note in log.notes)


def test_a_hole_is_left_out_and_shown(tmp_path):
    stamps = every(1, 11) + every(1, 11, "2026-03-02T12:05:00")
    log, energy = logged(tmp_path, constant(stamps))
    assert energy.trapezoid_j == pytest.approx(2000, rel=1e-3)
    assert energy.seen_s == 20
    ((begin, end),) = energy.holes
    assert end - begin == 290
    grid = log_grid(log, figures(log, IdleGiven()))
    assert grid.rows[0][4:7:2] == ("100.0", "≥ 2.00 kJ"), "watts of covered time, joules as a lower bound"
    assert "lower bound, readings are missing" in grid.note
    with_idle = log_grid(log, figures(log, IdleGiven(power_w=60.0)))
    assert with_idle.rows[0][7] == "≥ 800 J", "above idle, too"
    rows = figures(log, IdleGiven())
    assert re.search(r": ≥ 2\.00 kJ, ≥ [\d.]+ kWh, 5 min 10 s$", log_result(rows))
    estimated = [replace(row, energy=replace(row.energy, component="cpu_estimate")) for row in rows]
    assert ": ≥ 2.00 kJ, estimated, ≥ " in log_result(estimated), "no interval around a lower bound"


def session(boot, offset_s, mono_s, wall_of):
    """A header and records of ours, with what the wall clock showed at each."""
    from joulelab.clock import iso

    head = {
        "kind": "header", "timestamp": iso(wall_of(mono_s[0])), "mono_ns": round(mono_s[0] * 1e9), "boot_id": boot,
        "host": "h", "session": f"{boot}{mono_s[0]}", "wall_minus_mono_s": offset_s, "devices": [],
    }  # fmt: skip
    lines = [
        {"kind": "gpu", "timestamp": iso(wall_of(s)), "mono_ns": round(s * 1e9), "session": head["session"],
         "device": "gpu:A", "power_watts": 100.0}
        for s in mono_s
    ]  # fmt: skip
    return [head, *lines]


def read_lines(tmp_path, lines):
    (tmp_path / "log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_power_log(tmp_path / "log", TimeRule(), "this test")


def test_a_wall_clock_stepped_by_an_hour_moves_nothing_in_our_own_log(tmp_path):
    offset = 1_770_000_000.0
    lines = session("b", offset, [float(s) for s in range(100, 131)], lambda s: offset + s + (3600 if s >= 115 else 0))
    log = read_lines(tmp_path, lines)
    energy = device_energy(log.devices[0])
    assert energy.trapezoid_j == pytest.approx(3000)
    assert any("stepped by +3600.0 s" in note for note in log.notes)


def test_sessions_appended_after_a_reboot_are_placed_by_their_own_headers(tmp_path):
    first = session("b1", 1_770_000_000.0, [1000.0, 1001.0, 1002.0], lambda s: 1_770_000_000 + s)
    second = session("b2", 1_770_005_000.0, [10.0, 11.0, 12.0], lambda s: 1_770_005_000 + s)
    energy = device_energy(read_lines(tmp_path, first + second).devices[0])
    assert energy.samples == 6
    assert energy.trapezoid_j == pytest.approx(400)
    assert len(energy.holes) == 1


def test_an_old_log_that_our_monitor_continued_is_one_file_of_two_kinds(tmp_path):
    from made_logs import old_record

    old = [old_record(stamp, 0, 50.0) for stamp in every(1, 4)]
    new = session("b", 1_772_460_000.0, [0.5, 1.5, 2.5], lambda s: 1_772_460_000 + s)
    log = read_lines(tmp_path, old + new)
    assert {device.source.device for device in log.devices} == {"gpu:0", "gpu:A"}
    assert "older records" in log.clock
