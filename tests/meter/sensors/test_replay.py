"""A recorded trace as a sensor: its joules again, now."""

import time

import pytest
from traces import T0, at, device, gpu_line, header, write

from joulelab.clock import NS
from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import SensorUnavailable
from joulelab.meter.sensors.replay import ReplaySensor


@pytest.fixture
def trace(tmp_path):
    lines = [header(device(facts={"driver": "580"}), interval_s=0.1)]
    for tick in range(1, 6):
        line = gpu_line(tick / 10, 200.0, energy_j=20.0 * tick)
        lines.append({**line, "counter_mono_ns": at(tick / 10) - 1_000_000})
    stamps = [1_000_000 - 40_000, 1_000_000 - 20_000]
    samples = {
        "kind": "samples",
        "mono_ns": at(0.5),
        "device": "gpu:A",
        "wall_us": 1_000_000,
        "wall_us_mono_ns": at(0.5),
    }
    lines.append({**samples, "sample_us": stamps, "sample_mw": [200_000, 210_000]})
    lines.append({"kind": "end", "mono_ns": at(0.6), "reason": "stop"})
    return write(tmp_path / "old.jsonl", lines)


def replayed(path, speed=1.0):
    sensor = ReplaySensor(EnergyConfig(replay_trace=str(path), replay_speed=speed), pid=1)
    devices = sensor.open()
    begin, lines = time.monotonic_ns(), []
    while time.monotonic_ns() - begin < 0.7 * NS / speed:
        lines += sensor.read()
        time.sleep(0.02)
    return begin, devices, lines


def test_lines_come_in_their_old_rhythm_at_new_times(trace):
    begin, (card,), lines = replayed(trace)
    gpu = [line for line in lines if line["kind"] == "gpu"]
    assert [line["energy_counter_j"] for line in gpu] == [20, 40, 60, 80, 100]
    assert [(line["mono_ns"] - begin) / NS for line in gpu] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5], abs=0.02)
    assert all(line["mono_ns"] - line["counter_mono_ns"] == 1_000_000 for line in gpu)
    assert card.facts["replayed_from"] == str(trace)
    assert T0 not in {line["mono_ns"] for line in lines}


def test_samples_land_where_they_were(trace):
    begin, _, lines = replayed(trace)
    (line,) = [line for line in lines if line["kind"] == "samples"]
    stamps = [line["wall_us_mono_ns"] - (line["wall_us"] - stamp) * 1000 for stamp in line["sample_us"]]
    assert [(stamp - begin) / NS for stamp in stamps] == pytest.approx([0.46, 0.48], abs=0.02)
    assert line["sample_mw"] == [200_000, 210_000]


def test_at_another_speed_the_joules_stay_and_the_watts_follow(trace):
    begin, _, lines = replayed(trace, speed=5)
    gpu = [line for line in lines if line["kind"] == "gpu"]
    assert gpu[-1]["energy_counter_j"] == 100
    assert gpu[-1]["power_watts"] == 1000
    assert (gpu[-1]["mono_ns"] - begin) / NS == pytest.approx(0.1, abs=0.02)


def test_no_trace_or_a_strange_file_is_missing_with_a_reason(tmp_path):
    (tmp_path / "other.jsonl").write_text("{}\n")
    for path, reason in [("", "no trace"), (tmp_path / "none", "no trace at"), (tmp_path / "other.jsonl", "header")]:
        with pytest.raises(SensorUnavailable) as found:
            ReplaySensor(EnergyConfig(replay_trace=str(path)), pid=1).open()
        assert reason in found.value.reason
