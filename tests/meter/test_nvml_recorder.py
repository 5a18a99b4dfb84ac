"""The recorder, a real child process, on the simulated driver: joules against a truth that is exactly known."""

import os
import subprocess
import sys
import time

import pytest
from nvml_sim.driver import GPU_IS_LOST, SimGpu, constant, square

from joulelab.meter.config import EnergyConfig
from joulelab.meter.integrate import component_energy, device_energy
from joulelab.meter.sensors.nvml import NvmlSensor
from joulelab.meter.series import SET_BACK, load_trace
from joulelab.meter.session import Meter
from joulelab.meter.trace import read_lines

OTHER = "GPU-bbbbbbbb-0000-0000-0000-000000000000"


def recorded(folder, seconds=3.0, act=lambda: None, **config):
    """A trace, and the window in it that was measured: readings go on for more than a second on both sides."""
    meter = Meter(folder / "trace.jsonl", folder / "events.jsonl", EnergyConfig(**config))
    meter.start()
    time.sleep(0.4)
    begin = time.monotonic_ns()
    act()
    time.sleep(max(0.0, seconds - (time.monotonic_ns() - begin) / 1e9))
    end = time.monotonic_ns()
    time.sleep(1.2)
    meter.stop()
    return load_trace(folder / "trace.jsonl"), (begin, end)


def test_constant_power_is_billed_within_one_percent(nvml_sim, tmp_path):
    nvml_sim.gpus = [SimGpu(wave=constant(500))]
    nvml_sim.write()
    trace, window = recorded(tmp_path, counter_interval_s=0.5)
    figure = component_energy(trace, "gpu", [window])
    assert figure.method == "counter"
    assert figure.energy_j == pytest.approx(nvml_sim.true_energy_j(*window), rel=0.01)
    assert figure.coverage == pytest.approx(1.0, abs=0.01)


def test_two_gpus_are_metered_apart_and_added_up(nvml_sim, tmp_path):
    waves = [square(0.2, 0.5, 100, 700), constant(90)]
    nvml_sim.gpus = [SimGpu(wave=waves[0], settings={"phase_s": 0.03}), SimGpu(uuid=OTHER, wave=waves[1])]
    nvml_sim.write()
    trace, window = recorded(tmp_path)
    truths = [nvml_sim.true_energy_j(*window, gpu=index) for index in (0, 1)]
    for series, truth in zip((s for s in trace.devices if s.component == "gpu"), truths, strict=True):
        figure = device_energy(series, [window])
        assert figure.energy_j == pytest.approx(truth, rel=0.03)
    assert component_energy(trace, "gpu", [window]).energy_j == pytest.approx(sum(truths), rel=0.03)


def test_a_driver_that_fails_for_a_while_leaves_gaps_and_the_joules_are_still_right(nvml_sim, tmp_path):
    nvml_sim.gpus = [SimGpu(wave=constant(400))]
    nvml_sim.write()

    def fail_for_a_while():
        time.sleep(0.8)
        nvml_sim.gpus[0].errors = {"all": GPU_IS_LOST}
        nvml_sim.write()
        time.sleep(1.2)
        nvml_sim.gpus[0].errors = {}
        nvml_sim.write()

    trace, window = recorded(tmp_path, 3.5, fail_for_a_while, counter_interval_s=0.5)
    assert any("GPU is lost" in gap.reason for gap in trace.gaps)
    assert not [gap for gap in trace.gaps if gap.mono_ns > window[1]]
    figure = component_energy(trace, "gpu", [window])
    # the card went on counting while nobody could read it
    assert figure.energy_j == pytest.approx(nvml_sim.true_energy_j(*window), rel=0.02)


def test_a_counter_that_fails_for_a_while_leaves_the_samples(nvml_sim, tmp_path):
    nvml_sim.gpus = [SimGpu(wave=constant(400))]
    nvml_sim.write()

    def fail_for_a_while():
        time.sleep(0.6)
        nvml_sim.gpus[0].errors = {"counter": 999}
        nvml_sim.write()
        time.sleep(1.2)
        nvml_sim.gpus[0].errors = {}
        nvml_sim.write()

    trace, window = recorded(tmp_path, 3.0, fail_for_a_while, counter_interval_s=0.5)
    assert {gap.device for gap in trace.gaps} == {f"gpu:{nvml_sim.gpus[0].uuid}"}
    figure = component_energy(trace, "gpu", [window])
    assert figure.energy_j == pytest.approx(nvml_sim.true_energy_j(*window), rel=0.02)
    assert figure.coverage == pytest.approx(1.0, abs=0.01)


def set_back_after(sim, seconds):
    """The counter counts on from another value, as after a reset of the card."""
    time.sleep(seconds)
    sim.gpus[0].settings = {**sim.gpus[0].settings, "base_j": 0}
    sim.write()


def test_a_counter_that_is_set_back_leaves_the_samples_and_reports_it(nvml_sim, tmp_path):
    nvml_sim.gpus = [SimGpu(wave=constant(400), settings={"base_j": 1e6})]
    nvml_sim.write()
    trace, window = recorded(tmp_path, 3.0, lambda: set_back_after(nvml_sim, 1.2), counter_interval_s=0.5)
    assert [gap.reason for gap in trace.gaps] == [SET_BACK]
    figure = component_energy(trace, "gpu", [window])
    assert figure.energy_j == pytest.approx(nvml_sim.true_energy_j(*window), rel=0.02)
    assert figure.reason == SET_BACK


def test_without_samples_the_step_in_which_the_counter_was_set_back_is_unknown(nvml_sim, tmp_path):
    nvml_sim.gpus = [SimGpu(wave=constant(400), settings={"base_j": 1e6}, errors={"samples": 3})]
    nvml_sim.write()
    trace, window = recorded(tmp_path, 3.0, lambda: set_back_after(nvml_sim, 1.2), counter_interval_s=0.5)
    figure = component_energy(trace, "gpu", [window])
    ((*lost, _),) = trace.devices[0].counter_faults
    lost_s = (lost[1] - lost[0]) / 1e9
    assert 0.2 < lost_s < 3.0  # between two readings; on a busy machine they are further apart than asked for
    assert figure.coverage == pytest.approx(1 - lost_s / 3.0, abs=0.02)
    assert figure.energy_j == pytest.approx(nvml_sim.true_energy_j(*window) - 400 * lost_s, rel=0.05)
    assert figure.reason == SET_BACK


def test_a_card_without_counter_or_buffer_is_polled_and_integrated(nvml_sim, tmp_path):
    nvml_sim.gpus = [SimGpu(wave=constant(250), errors={"counter": 3, "samples": 3})]
    nvml_sim.write()
    trace, window = recorded(tmp_path, 2.0)
    (series,) = [series for series in trace.devices if series.component == "gpu"]
    assert len(series.power_ns) > 20
    figure = component_energy(trace, "gpu", [window])
    assert figure.method == "integrated"
    assert figure.energy_j == pytest.approx(nvml_sim.true_energy_j(*window), rel=0.01)


def test_a_mig_job_with_a_neighbor_is_labeled_and_warned(nvml_sim, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-11111111")
    slices = ("MIG-11111111-0000", "MIG-22222222-0000")
    nvml_sim.gpus = [SimGpu(), SimGpu(uuid=OTHER, mig_uuids=slices, processes={os.getpid(): 1, 4_000_000: 1})]
    nvml_sim.write()
    trace, window = recorded(tmp_path, 1.0)
    (series,) = [series for series in trace.devices if series.component == "gpu"]
    assert (series.device, series.facts["shared"]) == (f"gpu:{OTHER}", True)
    expected_j = 100 * (window[1] - window[0]) / 1e9  # a sleep may last longer than asked
    assert component_energy(trace, "gpu", [window]).energy_j == pytest.approx(expected_j, rel=0.05)
    warnings = [line for line in read_lines(tmp_path / "trace.jsonl") if line["kind"] == "warning"]
    assert [(line["device"], line["pid"]) for line in warnings] == [(f"gpu:{OTHER}", 4_000_000)]


RANK = """
import sys, time
from pathlib import Path
from joulelab.meter.config import EnergyConfig
from joulelab.meter.session import Meter
folder, rank, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
meter = Meter(folder / "trace.jsonl", folder / f"events.{rank}.jsonl", EnergyConfig(counter_interval_s=0.5))
meter.start()
time.sleep(seconds)
meter.stop()
"""


@pytest.mark.slow
def test_ranks_that_were_given_a_gpu_each_have_them_all_in_the_one_trace_also_after_the_recorder_changed(
    nvml_sim, tmp_path
):
    nvml_sim.gpus = [SimGpu(wave=constant(300)), SimGpu(uuid=OTHER, wave=constant(500))]
    nvml_sim.write()
    ranks = []
    for rank, seconds in (("0", "3"), ("1", "6")):  # the first is elected and leaves first
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": rank}
        ranks.append(subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), rank, seconds], env=env))
        while not (tmp_path / "trace.jsonl").exists():
            time.sleep(0.05)
    assert [rank.wait() for rank in ranks] == [0, 0]
    trace = load_trace(tmp_path / "trace.jsonl")
    gpus = {series.device: series for series in trace.devices if series.component == "gpu"}
    assert len(gpus) == 2
    both = (max(int(series.counter_ns[0]) for series in gpus.values()), trace.last_ns - int(1e9))
    truth = sum(nvml_sim.true_energy_j(*both, gpu=index) for index in (0, 1))
    assert component_energy(trace, "gpu", [both]).energy_j == pytest.approx(truth, rel=0.02)


def test_a_card_of_another_rank_that_a_cgroup_hides_is_reported_as_missing(nvml_here):
    sensor = NvmlSensor(EnergyConfig(), os.getpid())
    sensor.open()
    devices, lines = sensor.add_gpus(["GPU-hidden"])
    assert devices == []
    assert "GPU-hidden cannot be opened" in lines[0]["text"]
    sensor.close()
