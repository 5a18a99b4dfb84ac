"""What a sensor is like, from series of exactly known properties and from one recorded on an H200."""

import json
import tempfile
from pathlib import Path

import pytest

from joulelab.meter.calibrate import (
    CardReadings,
    agreement_rel,
    averaging_window_s,
    calibrate_rapl,
    call_cost,
    card_profile,
    idle_states,
    refresh_period_s,
)
from joulelab.meter.config import EnergyConfig
from joulelab.meter.profile import MachineProfile, load_profile, profile_id, profile_path, save_profile, with_id
from joulelab.meter.sensors import Device
from joulelab.runs.paths import cache_folder
from joulelab.runs.spec import user_config_file

RECORDED = json.loads((Path(__file__).parent / "recorded" / "h200-card.json").read_text())


def polled(function, seconds, every=0.002):
    return [(n * every, function(n * every)) for n in range(int(seconds / every))]


def load_power(second):
    """700 W until 5 s, then 120 W."""
    return 700.0 if second <= 5 else 120.0


def boxcar(window):
    """The mean of `load_power` over the last `window` seconds."""

    def mean(second):
        loaded = min(window, max(0.0, 5 - (second - window)))
        return (700.0 * loaded + 120.0 * (window - loaded)) / window

    return mean


def test_the_refresh_period_is_the_time_between_changes():
    latched = polled(lambda second: float(second // 0.1), 3)
    assert refresh_period_s(latched) == pytest.approx(0.1, abs=0.003)


@pytest.mark.parametrize("readings", [[], [(0.0, 1.0)], [(n * 0.01, 5.0) for n in range(100)]])
def test_a_sensor_that_never_changed_has_no_known_refresh(readings):
    assert refresh_period_s(readings) is None


@pytest.mark.parametrize("window", [0.2, 1.0, 1.5])
def test_a_rolling_mean_gives_away_its_window_by_how_it_falls(window):
    found = averaging_window_s(polled(boxcar(window), 9), load_end_s=5)
    assert found == pytest.approx(window, rel=0.05)


def test_an_instant_sensor_has_no_window_to_speak_of():
    assert averaging_window_s(polled(load_power, 9), load_end_s=5) < 0.01


def test_without_a_load_there_is_no_step_to_judge_by():
    assert averaging_window_s(polled(lambda second: 80.0, 9), load_end_s=5) is None
    assert averaging_window_s([], load_end_s=5) is None


def test_integral_and_counter_of_the_same_power_agree():
    counter = [(float(s), 500.0 * s) for s in range(11)]
    power = [(s / 10, 510.0) for s in range(101)]
    assert agreement_rel(counter, power) == pytest.approx(0.02)


@pytest.mark.parametrize(("counter", "power"), [([], []), ([(0.0, 1.0), (1.0, 1.0)], [(0.0, 5.0), (1.0, 5.0)])])
def test_a_counter_that_does_not_advance_has_no_agreement(counter, power):
    assert agreement_rel(counter, power) is None


def test_idle_is_reported_by_state_of_the_clocks_and_passing_states_are_left_out():
    rows = [(n / 10, 126.0, 1980.0) for n in range(30)] + [(3 + n / 10, 100.0, 1200.0) for n in range(5)]
    rows += [(3.5 + n / 10, 80.0, 345.0) for n in range(60)]
    fast, slow = idle_states(rows)
    assert (fast.power_w, fast.sm_clock_MHz) == (126.0, 2000.0)
    assert (slow.power_w, slow.sm_clock_MHz) == (80.0, 300.0)
    assert slow.duration_s == pytest.approx(5.9, abs=0.05)


def test_a_call_is_reported_by_its_median_and_its_worst_hundredth():
    cost = call_cost([0.002] * 99 + [0.02])
    assert cost.median_s == 0.002
    assert 0.002 < cost.p99_s <= 0.02
    assert call_cost([0.1]) is None


def test_a_recorded_h200_has_the_measured_properties():
    rows = {what: [tuple(row) for row in series] for what, series in RECORDED["series"].items()}
    readings = CardReadings(rows, RECORDED["durations_s"], [tuple(row) for row in RECORDED["rest"]], RECORDED["load"])
    readings.begin_s, readings.end_s = RECORDED["begin_s"], RECORDED["end_s"]
    found = card_profile(Device(device="gpu:GPU-x", component="gpu", name="NVIDIA H200"), readings)
    assert found.refresh_s["counter"] == pytest.approx(0.1, abs=0.02)
    assert found.refresh_s["instant"] == pytest.approx(0.1, abs=0.02)
    assert found.averaging_window_s["average"] == pytest.approx(1.0, abs=0.1)
    assert found.averaging_window_s["instant"] < 0.2
    assert abs(found.agreement_rel) < 0.03
    assert found.call_cost["counter"].median_s > 50 * found.call_cost["average"].median_s
    assert found.idle[0].power_w == pytest.approx(80, abs=2)


def test_rapl_is_calibrated_as_far_as_it_answers(rapl_tree):
    notes = []
    (found,) = calibrate_rapl(EnergyConfig(rapl_root=str(rapl_tree)), notes, seconds=0.05)
    assert found.call_cost["counter"].calls > 5
    assert found.refresh_s == {"counter": None}  # a file that never changes


def test_no_rapl_is_a_note_and_no_error(tmp_path):
    notes = []
    assert calibrate_rapl(EnergyConfig(rapl_root=str(tmp_path)), notes) == []
    assert "no RAPL domains" in notes[0]


def profile(**fields):
    plain = {"host": "node1", "made_at": "2026-03-01T10:00:00+00:00", "joulelab": "0", "python": "3", "processor": "p"}
    return MachineProfile(**{**plain, **fields})


def test_a_profile_is_kept_per_host_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    kept = with_id(profile())
    assert save_profile(kept) == tmp_path / "joulelab" / "machines" / "node1.json"
    assert load_profile("node1") == kept
    assert kept.profile_id.startswith("node1-20260301-")


def test_two_calibrations_never_share_an_id():
    assert with_id(profile()).profile_id != with_id(profile(driver="580")).profile_id


@pytest.mark.parametrize("text", [None, "{", "{}", '{"host": 1}'])
def test_a_profile_that_cannot_be_read_is_no_profile(tmp_path, monkeypatch, text):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    if text is not None:
        profile_path().parent.mkdir(parents=True)
        profile_path().write_text(text)
    assert profile_id() is None


def test_a_user_without_a_home_has_no_profile_and_a_temporary_folder(monkeypatch):
    """An arbitrary user id of a container: no HOME, and no entry in the system's list of users."""

    def unknown():
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "JOULELAB_CONFIG", "JOULELAB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    assert profile_id() is None
    for folder in (profile_path(), user_config_file(), cache_folder()):
        assert folder.is_relative_to(tempfile.gettempdir())
