"""AMD and Apple silicon through stand-ins for their libraries, and their absence."""

import sys
from types import SimpleNamespace

import pytest

from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import SensorUnavailable, amd, apple
from joulelab.meter.sensors.amd import AmdSensor
from joulelab.meter.sensors.apple import AppleSensor


class FakeAmdSmi:
    class AmdSmiException(Exception):
        pass

    def __init__(self, counter=True, cards=2):
        self.counter, self.cards = counter, cards

    def amdsmi_init(self):
        if not self.cards:
            raise self.AmdSmiException("no driver")

    def amdsmi_shut_down(self):
        pass

    def amdsmi_get_processor_handles(self):
        return list(range(self.cards))

    def amdsmi_get_gpu_device_uuid(self, handle):
        return f"{'ab'[handle] * 4}-0000"

    def amdsmi_get_gpu_asic_info(self, handle):
        return {"market_name": "AMD Instinct MI300X"}

    def amdsmi_get_energy_count(self, handle):
        if not self.counter:
            raise self.AmdSmiException("not supported")
        return {"energy_accumulator": 1_000_000 * (handle + 1), "counter_resolution": 15.3, "timestamp": 0}

    def amdsmi_get_power_info(self, handle):
        return {"current_socket_power": 300 + handle, "average_socket_power": "N/A"}

    def amdsmi_get_gpu_activity(self, handle):
        return {"gfx_activity": 99, "umc_activity": 12}

    def amdsmi_get_gpu_vram_usage(self, handle):
        return {"vram_used": 1000, "vram_total": 196_592}


@pytest.fixture(autouse=True)
def all_visible(monkeypatch):
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def opened(amdsmi, **config):
    sensor = AmdSensor(EnergyConfig(**config), 1, amdsmi)
    return sensor, sensor.open()


def test_an_amd_card_reads_like_any_gpu():
    sensor, devices = opened(FakeAmdSmi())
    assert [device.device for device in devices] == ["gpu:GPU-aaaa-0000", "gpu:GPU-bbbb-0000"]
    line = sensor.read()[1]
    assert (line["kind"], line["power_watts"], line["gpu_utilization_percent"]) == ("gpu", 301.0, 99)
    assert line["energy_counter_j"] == pytest.approx(30.6)


def test_an_amd_card_without_a_counter_is_polled_and_reports_it():
    sensor, devices = opened(FakeAmdSmi(counter=False))
    assert sensor.interval_s == 0.1
    assert "integrated" in devices[0].facts["reason"]
    assert "energy_counter_j" not in sensor.read()[0]


def test_rocm_s_variables_choose_among_amd_cards(monkeypatch):
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    assert [device.device for device in opened(FakeAmdSmi())[1]] == ["gpu:GPU-bbbb-0000"]


def test_amd_without_a_driver_or_library_is_missing_with_a_fix(monkeypatch):
    with pytest.raises(SensorUnavailable) as found:
        opened(FakeAmdSmi(cards=0))
    assert "no driver" in found.value.reason
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(SensorUnavailable) as found:
        opened(None)
    assert "pip install amdsmi" in found.value.fix


def test_apple_s_channels_are_components_and_the_neural_engine_is_only_shown():
    metrics = SimpleNamespace(cpu_total_mj=2000, gpu_mj=3000, dram_mj=None, ane_mj=10)
    sensor = AppleSensor(EnergyConfig(), 1, SimpleNamespace(get_cumulative_energy=lambda: metrics))
    assert [(device.device, device.counted) for device in sensor.open()] == [
        ("apple:cpu", True),
        ("apple:gpu", True),
        ("apple:ane", False),
    ]
    assert sensor.read()[0]["counters_j"] == {"apple:cpu": 2.0, "apple:gpu": 3.0, "apple:ane": 0.01}


def test_apple_without_its_library_is_missing_with_a_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", None)
    with pytest.raises(SensorUnavailable) as found:
        AppleSensor(EnergyConfig(), 1).open()
    assert "pip install zeus-apple-silicon" in found.value.fix


def test_whether_they_are_worth_trying_is_known_without_loading_them(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert apple.present()
    assert not amd.present()
