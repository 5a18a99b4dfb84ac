"""The NVML sensor against a stand-in binding: what it reads, which cards it takes, what it does without features."""

import pytest
from fake_nvml import FakeNvml

from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import SensorUnavailable
from joulelab.meter.sensors.nvml import NvmlSensor


def opened(nvml, **config):
    sensor = NvmlSensor(EnergyConfig(**config), pid=1, nvml=nvml)
    return sensor, sensor.open()


@pytest.fixture(autouse=True)
def all_gpus_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_reading_keeps_the_fields_operators_parse():
    sensor, _ = opened(FakeNvml())
    line = sensor.read()[0]
    expected = {
        "gpu_index", "gpu_name", "gpu_uuid", "power_watts", "memory_used_MB", "gpu_utilization_percent",
        "memory_utilization_percent", "temperature_C", "energy_counter_j", "sm_clock_MHz", "throttle_reasons",
    }  # fmt: skip
    assert expected <= line.keys()
    assert (line["power_watts"], line["memory_used_MB"], line["gpu_name"]) == (100.0, 3.0, "Fake H200")


def test_the_instant_field_goes_before_the_average():
    assert opened(FakeNvml())[0].read()[0]["power_watts"] == 100.0
    assert opened(FakeNvml(instant=False))[0].read()[0]["power_watts"] == 90.0


def test_samples_of_the_buffer_come_once_each():
    sensor, _ = opened(FakeNvml())
    first = next(line for line in sensor.read() if line["kind"] == "samples")["sample_us"]
    second = next(line for line in sensor.read() if line["kind"] == "samples")["sample_us"]
    assert max(first) < min(second)


def test_without_the_buffer_the_card_is_polled_at_its_refresh():
    sensor, devices = opened(FakeNvml(buffer=False), sample_interval_s=0.5)
    assert sensor.interval_s == 0.1
    assert devices[0].facts["has_20ms_buffer"] is False


def test_a_card_without_a_counter_gives_power_only():
    sensor, _ = opened(FakeNvml(counter=False))
    assert "energy_counter_j" not in sensor.read()[0]


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


def test_a_missing_driver_is_reported_with_the_way_out():
    with pytest.raises(SensorUnavailable) as found:
        opened(FakeNvml(present=False))
    assert "Driver Not Loaded" in found.value.reason
    assert "nvidia-smi" in found.value.fix
