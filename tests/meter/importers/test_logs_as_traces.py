"""`--out`: the log as a trace of ours, read back by the meter with the same joules."""

import json

import pytest
from made_logs import dmon, every, old_monitor, old_record

from joulelab.meter.integrate import device_energy
from joulelab.meter.series import load_trace


def energies(path):
    trace = load_trace(path)
    window = (trace.first_ns, trace.last_ns)
    return {series.device: device_energy(series, [window]).energy_j for series in trace.devices}


def test_the_meter_finds_the_same_joules_per_gpu(tmp_path, joulelab_here):
    path = dmon(tmp_path / "log", [[100] * 61, [300] * 61])
    code, _, err = joulelab_here("import", path, "--out", tmp_path / "trace.jsonl")
    assert code == 0
    assert "trace: " in err
    assert energies(tmp_path / "trace.jsonl") == {"gpu:0": pytest.approx(6000), "gpu:1": pytest.approx(18000)}
    header = json.loads((tmp_path / "trace.jsonl").read_text().splitlines()[0])
    assert header["imported"]["format"] == "nvidia-smi dmon"
    assert "assumed" in header["imported"]["clock"]
    assert len(header["imported"]["sha256"]) == 64


def test_counters_go_along(tmp_path, joulelab_here):
    lines = [{**old_record(s, 0, 100.0), "energy_counter_j": 150.0 * tick} for tick, s in enumerate(every(1, 11))]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, lines)))
    joulelab_here("import", tmp_path / "log", "--out", tmp_path / "trace.jsonl")
    assert energies(tmp_path / "trace.jsonl")["gpu:0"] == pytest.approx(1500, rel=0.02)


def test_what_was_stated_about_the_clock_stays_with_the_trace(tmp_path, joulelab_here):
    path = old_monitor(tmp_path / "log", [(stamp, 0, 100.0) for stamp in every(1, 11)])
    joulelab_here("import", path, "--time-zone", "Asia/Tokyo", "--out", tmp_path / "trace.jsonl")
    _, out, _ = joulelab_here("import", tmp_path / "trace.jsonl", "--json")
    data = json.loads(out)
    assert data["devices"][0]["first"].startswith("2026-03-02T03:00:00")
    assert data["devices"][0]["energy_j"] == pytest.approx(1000)
    assert "imported from" in data["format"]


def test_a_trace_that_exists_is_never_written_over(tmp_path, joulelab_here):
    path = dmon(tmp_path / "log", [[100] * 61])
    (tmp_path / "trace.jsonl").write_text("mine")
    code, _, err = joulelab_here("import", path, "--out", tmp_path / "trace.jsonl")
    assert code == 2
    assert "already exists" in err
    assert (tmp_path / "trace.jsonl").read_text() == "mine"
