"""The monitor against the simulated NVML driver, through the real binding."""

import signal
import urllib.request

import pytest
from monitor_process import OPERATORS_FIELDS, Running, count, monitor, monitor_here, read_log, records
from nvml_sim.driver import GPU_IS_LOST, SimGpu, constant

from joulelab.meter.monitor.operator_log import choose

A, B, C = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abc")


@pytest.fixture
def three(nvml_here):
    nvml_sim = nvml_here
    nvml_sim.gpus = [SimGpu(uuid, constant(watts)) for uuid, watts in ((A, 100.0), (B, 200.0), (C, 300.0))]
    nvml_sim.write()
    return nvml_sim


def test_a_record_has_the_operators_fields_in_their_order_and_ours_after_them(nvml_sim, tmp_path):
    done = monitor("--interval", 0.5, "--duration", 1, "--out", "l.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    log = read_log(tmp_path / "l.jsonl")
    assert [line["kind"] for line in log if line["kind"] != "gpu"] == ["header", "end"]
    gpu = records(tmp_path / "l.jsonl", "gpu")
    assert len(gpu) == 3
    theirs = [key for key in gpu[0] if key in OPERATORS_FIELDS]
    assert theirs == OPERATORS_FIELDS
    assert gpu[0]["timestamp"][-6] in "+-"
    assert gpu[0]["power_watts"] == pytest.approx(100)
    assert {"device", "gpu_uuid", "energy_counter_j", "mono_ns", "session", "late_s"} <= gpu[0].keys()
    assert log[0]["driver"]


def test_plain_writes_sample_lines_only_so_that_old_plotting_scripts_work(nvml_sim, tmp_path):
    done = monitor("--plain", "--interval", 0.5, "--duration", 1, "--out", "l.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    log = read_log(tmp_path / "l.jsonl")
    assert len(log) == 3
    assert [line["power_watts"] for line in log] == pytest.approx([100, 100, 100])
    assert all(key in line for line in log for key in OPERATORS_FIELDS)


def test_the_counter_is_in_the_first_and_the_last_record_so_their_difference_is_the_energy(nvml_sim, tmp_path):
    monitor("--interval", 0.1, "--duration", 1.5, "--out", "l.jsonl", cwd=tmp_path)
    gpu = records(tmp_path / "l.jsonl", "gpu")
    rise_j = gpu[-1]["energy_counter_j"] - gpu[0]["energy_counter_j"]
    truth_j = nvml_sim.true_energy_j(gpu[0]["counter_mono_ns"], gpu[-1]["counter_mono_ns"])
    assert rise_j == pytest.approx(truth_j, abs=100 * 0.1 + 0.5)  # the counter is latched every 100 ms


def test_between_long_ticks_power_is_read_on_and_its_mean_recorded(nvml_sim, tmp_path):
    monitor("--interval", 2, "--duration", 2, "--out", "l.jsonl", cwd=tmp_path)
    last = records(tmp_path / "l.jsonl", "gpu")[-1]
    assert last["power_mean_watts"] == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize(
    ("visible", "wanted", "expected"),
    [
        (None, None, {A}),
        (None, "auto", {A, B, C}),
        (None, "2,0", {A, C}),
        (None, "GPU-bbbb", {B}),
        ("2,1", "0", {C}),
        ("2,1", "auto", {B, C}),
        (B, None, {B}),
        ("2,1", A, {A}),
    ],
)
def test_gpus_by_index_uuid_and_within_what_the_job_was_given(three, monkeypatch, visible, wanted, expected):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert {card.uuid for card in choose(wanted or "0").cards} == expected


@pytest.mark.parametrize(
    ("visible", "wanted", "code"),
    [(None, "3", 4), ("2,1", "2", 4), (None, "0,7", 4), (None, "GPU-dddd", 4), (None, "first", 4), ("", "0", 3)],
)
def test_a_wrong_gpu_is_4_and_a_job_without_any_is_3(three, monkeypatch, capsys, visible, wanted, code):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert monitor_here(monkeypatch, "--gpu", wanted) == code
    if code == 4:
        assert f"no GPU '{wanted.split(',')[-1]}'" in capsys.readouterr().err


def test_several_gpus_within_those_of_the_job_are_one_record_each(three, tmp_path):
    env = {"CUDA_VISIBLE_DEVICES": "2,1,0"}
    words = ["--gpu", "0,1", "--interval", 0.1, "--duration", 0.1, "--out", "l.jsonl"]
    done = monitor(*words, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    powers = [(line["gpu_uuid"], line["power_watts"]) for line in records(tmp_path / "l.jsonl", "gpu")]
    assert powers == [(C, 300.0), (B, 200.0)] * 2


def test_a_card_that_is_lost_is_a_gap_and_the_monitor_continues_until_it_returns(nvml_sim, tmp_path):
    with Running("--gpu", 0, "--interval", 0.1, cwd=tmp_path) as running:
        running.until(count("gpu", 2))
        nvml_sim.gpus[0].errors = {"all": GPU_IS_LOST}
        nvml_sim.write()
        running.until(count("gap", 5))
        nvml_sim.gpus[0].errors = {}
        nvml_sim.write()
        seen = sum(line["kind"] == "gpu" for line in read_log(running.log))
        running.until(count("gpu", seen + 2))
        code, reported = running.end()
    assert code == 0
    assert "nvml cannot be read" in reported
    assert "nvml answers again" in reported
    assert records(running.log, "host")  # the CPU's use meanwhile
    assert read_log(running.log)[-1]["errors"]["nvml"] >= 5


def test_gpu_memory_of_the_tracked_process_is_in_its_block(nvml_sim, tmp_path):
    import os

    nvml_sim.gpus[0].processes = {os.getpid(): 3 * 1024**3, 1: 1024**3}
    nvml_sim.write()
    monitor("--pid", os.getpid(), "--interval", 1, "--duration", 1, "--out", "l.jsonl", cwd=tmp_path)
    block = records(tmp_path / "l.jsonl", "gpu")[-1]["process"]
    assert block["gpu_memory_used_MB"] == 3 * 1024
    assert records(tmp_path / "l.jsonl", "warning")  # process 1 is on the card too


def test_prometheus_serves_watts_and_joules_with_labels_and_units_in_names(three, tmp_path):
    with Running("--gpu", "auto", "--interval", 0.2, "--prometheus", 0, cwd=tmp_path) as running:
        port = _port(running)
        running.until(count("gpu", 6))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            kind, text = answer.headers["Content-Type"], answer.read().decode()
        code, _ = running.end(signal.SIGINT)
    assert code == 0
    assert kind.startswith("text/plain; version=")
    assert any(line.startswith("joulelab_gpu_power_watts{") and f'uuid="{B}"' in line for line in text.splitlines())
    assert "# TYPE joulelab_gpu_energy_joules_total counter" in text
    assert "# HELP joulelab_gpu_power_watts " in text
    assert "joulelab_cpu_utilization_ratio " in text


def _port(running):
    while "metrics on" not in (line := running.process.stderr.readline()):
        assert line
    return int(line.split(":")[-1].split("/")[0])


def test_live_without_a_terminal_is_plain_lines(nvml_sim, tmp_path):
    done = monitor("--live", "--interval", 0.2, "--duration", 0.4, cwd=tmp_path)
    line = next(line for line in done.stderr.splitlines() if line.startswith("GPU 0 "))
    assert "100 W" in line
    assert "so far, energy counter" in line
    assert "\x1b" not in done.stderr
