"""The simulated driver behaves as the H200 of FACTS.md did, and the sensor reads it through the real nvidia-ml-py."""

import csv
import itertools
import os
import subprocess
import sys
import time
from contextlib import suppress

import pynvml
import pytest
from nvml_sim.driver import GPU_IS_LOST, NO_PERMISSION, NOT_SUPPORTED, UNKNOWN, Points, SimGpu, constant, ramp, square

from joulelab.meter.config import EnergyConfig
from joulelab.meter.monitor.telemetry import Telemetry
from joulelab.meter.sensors import SensorUnavailable
from joulelab.meter.sensors.nvml import NvmlSensor
from joulelab.runs import environment

SLICES = ("MIG-11111111-0000-0000-0000-000000000000", "MIG-22222222-0000-0000-0000-000000000000")


@pytest.fixture
def sim(nvml_here):
    with suppress(pynvml.NVMLError_Uninitialized):
        while True:  # what earlier tests of this process left open
            pynvml.nvmlShutdown()
    yield nvml_here
    nvml_here.init_error = 0


def world(sim, *gpus):
    sim.gpus = list(gpus)
    sim.write()
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def opened(**config):
    sensor = NvmlSensor(EnergyConfig(**config), pid=os.getpid())
    return sensor, sensor.open()


def kinds(lines, kind):
    return [line for line in lines if line["kind"] == kind]


def test_the_counter_is_constant_between_refreshes_and_slow(sim):
    card = world(sim, SimGpu(wave=constant(500)))
    begin = time.monotonic()
    readings = [pynvml.nvmlDeviceGetTotalEnergyConsumption(card) for _ in range(100)]
    took_s = time.monotonic() - begin
    assert took_s / 100 > 0.002  # and longer on a loaded machine
    steps = [b - a for a, b in itertools.pairwise(readings) if b != a]
    assert steps == pytest.approx([50_000] * len(steps), abs=1)  # 500 W x 100 ms, in mJ
    assert len(steps) <= took_s / 0.1 + 1


def test_power_usage_is_a_second_s_average_and_the_instant_field_is_not(sim):
    t = (time.monotonic_ns() - sim.origin_ns) / 1e9
    card = world(sim, SimGpu(wave=Points(((0, 100), (t, 100), (t + 1e-6, 700)))))
    time.sleep(0.45)
    instant, average = pynvml.nvmlDeviceGetFieldValues(card, [186, 185])
    assert instant.value.uiVal == pytest.approx(700_000)
    assert 250_000 < average.value.uiVal < 450_000
    assert pynvml.nvmlDeviceGetPowerUsage(card) == pytest.approx(average.value.uiVal, rel=0.3)


def test_the_buffer_holds_119_samples_20_ms_apart_late_and_one_percent_high(sim):
    card = world(sim, SimGpu(wave=constant(600)))
    _, samples = pynvml.nvmlDeviceGetSamples(card, pynvml.NVML_TOTAL_POWER_SAMPLES, 0)
    stamps = [sample.timeStamp for sample in samples]
    assert len(stamps) == 119
    assert {b - a for a, b in itertools.pairwise(stamps)} <= {19_999, 20_000, 20_001}
    assert 0.07 <= time.time() - stamps[-1] / 1e6 < 0.12
    assert samples[0].sampleValue.uiVal == pytest.approx(606_000, abs=1)


@pytest.mark.parametrize(
    "wave",
    [
        constant(300),
        square(0.3, 0.25, 80, 700),
        ramp(100, 700, 2.0),
        Points(((0, 50), (0.4, 600), (0.5, 90), (9, 300))),
    ],
    ids=["constant", "square", "ramp", "points"],
)
def test_the_driver_and_the_test_agree_on_the_waveform_s_joules(sim, wave):
    card = world(sim, SimGpu(wave=wave, settings={"refresh_s": 0.0001, "counter_us": 0}))
    stamps, readings = [], []
    for _ in range(5):
        stamps.append(time.monotonic_ns())
        readings.append(pynvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1000)
        time.sleep(0.11)
    output_text = [reading - readings[0] for reading in readings]
    assert output_text == pytest.approx([sim.true_energy_j(stamps[0], stamp) for stamp in stamps], abs=0.5)


def test_a_card_reads_as_its_control_file_states(sim):
    world(sim, SimGpu(settings={"utilization": "97 40", "temperature_c": 66, "throttle": 4, "limit_w": 600}))
    sensor, (device,) = opened()
    line = sensor.read()[0]
    assert device.facts["power_limit_w"] == line["power_limit_w"] == 600
    assert (line["gpu_utilization_percent"], line["memory_utilization_percent"]) == (97, 40)
    assert (line["temperature_C"], line["throttle_names"]) == (66, ["sw_power_cap"])
    assert (line["sm_clock_MHz"], line["memory_clock_MHz"], line["memory_total_MB"]) == (1980, 3201, 141 * 1024)


def test_one_lost_card_leaves_a_gap_and_the_other_its_readings(sim):
    world(sim, SimGpu(), SimGpu(uuid="GPU-bbbbbbbb", wave=constant(50)))
    sensor, _ = opened()
    sim.gpus[0].errors = {"all": GPU_IS_LOST}
    sim.write()
    lines = sensor.read()
    assert [(gap["device"], gap["reason"]) for gap in kinds(lines, "gap")] == [
        (f"gpu:{sim.gpus[0].uuid}", "NVML: GPU is lost")
    ]
    assert [line["gpu_uuid"] for line in kinds(lines, "gpu")] == ["GPU-bbbbbbbb"]
    sim.gpus[0].errors = {}
    sim.write()
    assert len(kinds(sensor.read(), "gpu")) == 2


def test_a_failing_counter_costs_the_counter_only(sim):
    world(sim, SimGpu())
    sensor, _ = opened()
    sim.gpus[0].errors = {"counter": 999}
    sim.write()
    lines = sensor.read()
    assert kinds(lines, "gap")[0]["reason"].startswith("energy counter:")
    assert "energy_counter_j" not in lines[0]
    assert lines[0]["power_watts"] == pytest.approx(100)


def test_the_average_never_replaces_a_failing_instant_field(sim):
    world(sim, SimGpu(), SimGpu(uuid="GPU-bbbbbbbb"))
    sensor, _ = opened()
    sim.gpus[0].errors = {"instant": 999}
    sim.write()
    assert [line["gpu_uuid"] for line in kinds(sensor.read(), "gpu")] == ["GPU-bbbbbbbb"]


def test_a_restarted_driver_is_asked_anew_until_it_answers(sim, monkeypatch):
    monkeypatch.setattr("joulelab.meter.sensors.nvml.REVIVE_EVERY_S", 0.0)
    world(sim, SimGpu())
    sensor, _ = opened()
    pynvml.nvmlShutdown()
    pynvml.nvmlShutdown()
    sim.init_error = GPU_IS_LOST
    sim.write()
    for _ in range(2):
        with pytest.raises(Exception, match="Uninitialized"):
            sensor.read()
    sim.init_error = 0
    sim.write()
    with pytest.raises(Exception, match="Uninitialized"):
        sensor.read()
    assert kinds(sensor.read(), "gpu")
    sensor.close()


def test_features_a_card_lacks_are_not_gaps(sim):
    world(sim, SimGpu(errors=dict.fromkeys(("counter", "samples", "instant", "utilization"), NOT_SUPPORTED)))
    sensor, (device,) = opened()
    assert (device.facts["power_field"], device.facts["has_counter"], device.facts["has_20ms_buffer"]) == (
        "average", False, False,
    )  # fmt: skip
    lines = sensor.read()
    assert [line["kind"] for line in lines] == ["gpu"]
    assert lines[0]["gpu_utilization_percent"] is None


def test_cards_a_cgroup_forbids_are_passed_over(sim, monkeypatch):
    world(sim, SimGpu(), SimGpu(uuid="GPU-bbbbbbbb"))
    sim.gpus[0].errors = {"handle": NO_PERMISSION}
    sim.write()
    assert [device.facts["gpu_index"] for device in opened()[1]] == [1]
    assert [gpu["index"] for gpu in environment.gpus()] == [1]
    # CUDA counts only what it may open, so its first card is NVML's second
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [device.device for device in opened()[1]] == ["gpu:GPU-bbbbbbbb"]


def test_telemetry_reads_on_after_the_sensor_that_chose_its_cards_was_closed(sim, tmp_path):
    with Telemetry(tmp_path / "power.csv"):
        pass
    assert ",100.0," in (tmp_path / "power.csv").read_text()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


def test_telemetry_never_puts_the_average_in_place_of_instant_power(sim, tmp_path):
    """Half a second after a step from 100 to 700 W the average is at about 400 W; a failing field leaves a blank."""
    t = (time.monotonic_ns() - sim.origin_ns) / 1e9
    gpu = SimGpu(wave=Points(((0.0, 100.0), (t + 0.1, 100.0), (t + 0.1001, 700.0))))
    world(sim, gpu)
    pynvml.nvmlShutdown()
    with Telemetry(tmp_path / "power.csv") as telemetry:
        time.sleep(0.6)
        for errors in ({}, {"instant": UNKNOWN}, {"fields": UNKNOWN}, {}):
            gpu.errors = errors
            sim.write()
            telemetry.log_once()
    with (tmp_path / "power.csv").open() as file:
        _, *power = [row["power_watts"] for row in csv.DictReader(file)]
    assert power == ["700.0", "", "", "700.0"]


def test_telemetry_that_begins_while_the_instant_field_fails_waits_for_it(sim, tmp_path):
    gpu = SimGpu(wave=constant(300), errors={"instant": UNKNOWN})
    world(sim, gpu)
    pynvml.nvmlShutdown()
    with Telemetry(tmp_path / "power.csv") as telemetry:
        gpu.errors = {}
        sim.write()
        telemetry.log_once()
    with (tmp_path / "power.csv").open() as file:
        assert [row["power_watts"] for row in csv.DictReader(file)] == ["", "300.0"]


def test_a_mig_slice_is_metered_by_its_card_and_labeled_shared(sim, monkeypatch):
    world(sim, SimGpu(), SimGpu(uuid="GPU-bbbbbbbb", wave=constant(400), mig_uuids=SLICES))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2222")
    sensor, (device,) = opened()
    assert device.device == "gpu:GPU-bbbbbbbb"
    assert device.counted
    assert device.facts["shared"] is True
    assert "energy of the whole card" in device.facts["reason"]
    lines = sensor.read()
    assert lines[0]["power_watts"] == pytest.approx(400)
    assert lines[0]["gpu_utilization_percent"] is None  # the driver has none for a card cut into slices


def test_a_stranger_on_the_gpu_is_warned_about_once(sim):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        world(sim, SimGpu(processes={os.getpid(): 1 << 20, child.pid: 2 << 20, os.getppid(): 0, 4_000_000: 0}))
        sensor, _ = opened()
        lines = sensor.read_edge()
        child.communicate(b"\n")
    assert [entry["pid"] for entry in lines[0]["gpu_processes"]] == list(sim.gpus[0].processes)
    texts = {line["pid"]: line["text"] for line in kinds(lines, "warning")}
    assert set(texts) == {os.getppid(), 4_000_000}
    assert "another PID namespace" in texts[4_000_000]
    assert not kinds(sensor.read_edge(), "warning")


def test_samples_stamped_by_another_clock_are_not_placed(sim):
    world(sim, SimGpu())
    sensor, _ = opened()
    sim.gpus[0].settings = {"stamp_shift_s": -3600}
    sim.write()
    time.sleep(0.1)
    assert not kinds(sensor.read(), "samples")
    sim.gpus[0].settings = {"stamp_shift_s": 3600}
    sim.write()
    assert not kinds(sensor.read(), "samples")
    sim.gpus[0].settings = {}
    sim.write()
    assert kinds(sensor.read(), "samples")


def test_a_driver_that_does_not_start_is_missing_with_a_reason(sim):
    sim.init_error = 9
    sim.write()
    with pytest.raises(SensorUnavailable) as found:
        opened()
    assert "Driver Not Loaded" in found.value.reason
