"""The NVML sensor against a stand-in binding: what it reads, which cards it takes, what it does without features."""

import time

import pytest
from fake_nvml import FakeNvml

from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import SensorUnavailable
from joulelab.meter.sensors.nvml import NoCardAnswers, NvmlSensor, throttle_names


def opened(nvml, **config):
    sensor = NvmlSensor(EnergyConfig(**config), pid=1, nvml=nvml)
    return sensor, sensor.open()


@pytest.fixture(autouse=True)
def all_gpus_visible(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        monkeypatch.delenv(name, raising=False)


def test_a_reading_keeps_the_fields_operators_parse():
    sensor, _ = opened(FakeNvml())
    line = sensor.read()[0]
    expected = {
        "gpu_index", "gpu_name", "gpu_uuid", "power_watts", "memory_used_MB", "memory_total_MB", "temperature_C",
        "gpu_utilization_percent", "memory_utilization_percent", "energy_counter_j", "sm_clock_MHz",
        "memory_clock_MHz", "throttle_reasons", "throttle_names", "power_limit_w",
    }  # fmt: skip
    assert expected <= line.keys()
    assert (line["power_watts"], line["memory_used_MB"], line["gpu_name"]) == (100.0, 3.0, "Fake H200")
    assert (line["sm_clock_MHz"], line["memory_clock_MHz"]) == (1980, 3201)


def test_throttle_reasons_have_names():
    assert throttle_names(0x24) == ["sw_power_cap", "sw_thermal_slowdown"]
    assert throttle_names(0) == []
    assert throttle_names(1 << 20) == ["bit_20"]


def test_the_instant_field_goes_before_the_average():
    assert opened(FakeNvml())[0].read()[0]["power_watts"] == 100.0
    assert opened(FakeNvml(instant=False))[0].read()[0]["power_watts"] == 90.0


def test_the_counter_has_a_slower_rhythm_of_its_own():
    sensor, _ = opened(FakeNvml(), gpus="0", sample_interval_s=0.02, counter_interval_s=0.2)
    with_counter = []
    for _ in range(12):
        with_counter.append("energy_counter_j" in sensor.read()[0])
        time.sleep(0.05)
    assert with_counter[0]
    assert 3 <= sum(with_counter) <= 4


def test_an_edge_of_a_recording_is_read_with_the_counter_whether_due_or_not():
    sensor, _ = opened(FakeNvml(), gpus="0")
    sensor.read()
    assert "energy_counter_j" not in sensor.read()[0]
    assert "energy_counter_j" in sensor.read_edge()[0]


def test_a_slow_counter_is_read_less_often(monkeypatch):
    nvml = FakeNvml()
    quick = nvml.nvmlDeviceGetTotalEnergyConsumption
    nvml.nvmlDeviceGetTotalEnergyConsumption = lambda handle: (time.sleep(0.02), quick(handle))[1]
    _, devices = opened(nvml)
    # two cards of 20 ms a call: at 1 % of a core both together can be asked every 4 s
    assert devices[0].facts["counter_interval_s"] == pytest.approx(4.0, rel=0.2)


def test_samples_of_the_buffer_come_once_each():
    sensor, _ = opened(FakeNvml(), gpus="0")
    time.sleep(0.05)
    first = next(line for line in sensor.read() if line["kind"] == "samples")["sample_us"]
    time.sleep(0.05)
    second = next(line for line in sensor.read() if line["kind"] == "samples")["sample_us"]
    assert max(first) < min(second)


def test_without_the_buffer_the_card_is_polled_at_its_refresh():
    sensor, devices = opened(FakeNvml(buffer=False), sample_interval_s=0.5)
    assert sensor.interval_s == 0.1
    assert devices[0].facts["has_20ms_buffer"] is False


def test_the_buffer_is_read_before_it_runs_over():
    assert opened(FakeNvml(), sample_interval_s=10)[0].interval_s == 2.0


def test_a_card_without_a_counter_gives_power_and_reports_it():
    sensor, devices = opened(FakeNvml(counter=False))
    assert "energy_counter_j" not in sensor.read()[0]
    assert "no energy counter" in devices[0].facts["reason"]


def test_polled_power_alone_states_a_wider_error_and_an_average_its_window():
    _, instant = opened(FakeNvml(counter=False, buffer=False))
    _, average = opened(FakeNvml(counter=False, buffer=False, instant=False))
    assert (instant[0].facts["power_field"], instant[0].gain_error_rel) == ("instant", 0.25)
    assert (average[0].facts["power_field"], average[0].refresh_s) == ("average", 1.0)
    assert "average over about 1 s" in average[0].facts["reason"]


def test_no_card_that_answers_is_an_error_and_not_silence():
    nvml = FakeNvml()
    sensor, _ = opened(nvml)
    nvml.failing = True
    with pytest.raises(NoCardAnswers, match="GPU is lost"):
        sensor.read()
    nvml.failing = False
    assert sensor.read()[0]["power_watts"] == 100.0


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("1", ["GPU-bbbbbbbb"]), ("GPU-aaaa", ["GPU-aaaaaaaa"]), ("1,0", ["GPU-bbbbbbbb", "GPU-aaaaaaaa"])],
)
def test_only_the_gpus_of_the_job_are_metered(monkeypatch, visible, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    _, devices = opened(FakeNvml())
    assert [device.device for device in devices] == [f"gpu:{uuid}" for uuid in expected]


def test_a_job_without_gpus_meters_none(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SensorUnavailable, match="visible") as found:
        opened(FakeNvml())
    assert found.value.component == "gpu"


def test_a_gpu_requested_by_a_wrong_name_is_refused_with_those_there_are():
    with pytest.raises(SensorUnavailable) as found:
        opened(FakeNvml(), gpus="0,7")
    assert "no GPU matches '7'" in found.value.reason
    assert "GPU-bbbbbbbb" in found.value.reason


def test_an_entry_that_hides_the_rest_is_a_warning(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,5,1")
    sensor, devices = opened(FakeNvml())
    assert len(devices) == 1
    (text,) = [line["text"] for line in sensor.read() if line["kind"] == "warning"]
    assert "'5'" in text
    assert not [line for line in sensor.read() if line["kind"] == "warning"]


def test_a_missing_driver_is_reported_with_the_way_out():
    with pytest.raises(SensorUnavailable) as found:
        opened(FakeNvml(present=False))
    assert "Driver Not Loaded" in found.value.reason
    assert "nvidia-smi" in found.value.fix
