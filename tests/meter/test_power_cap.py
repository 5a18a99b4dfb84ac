"""A power cap is set only where asked for, within what the card takes, and always taken back."""

import pytest
from fake_nvml import FakeNvml, NVMLError

from joulelab.errors import ConfigError, SensorMissing
from joulelab.meter.config import EnergyConfig
from joulelab.meter.power_cap import power_cap


class Capped(FakeNvml):
    def __init__(self, permitted=True, **options):
        super().__init__(**options)
        self.permitted = permitted
        self.limits_mw = {}

    def nvmlDeviceGetPowerManagementLimit(self, handle):  # noqa: N802
        return self.limits_mw.get(str(handle), 700_000)

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle):  # noqa: N802
        return [200_000, 700_000]

    def nvmlDeviceSetPowerManagementLimit(self, handle, limit_mw):  # noqa: N802
        if not self.permitted:
            raise NVMLError("Insufficient Permissions")
        self.limits_mw[str(handle)] = limit_mw


@pytest.fixture(autouse=True)
def all_gpus_visible(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "GPU_DEVICE_ORDINAL"):
        monkeypatch.delenv(name, raising=False)


def test_without_the_setting_nothing_is_touched():
    nvml = Capped()
    with power_cap(EnergyConfig(), nvml):
        pass
    assert nvml.limits_mw == {}


def test_the_cap_holds_inside_and_is_taken_back_after_an_error():
    nvml = Capped()
    with pytest.raises(ZeroDivisionError), power_cap(EnergyConfig(power_cap_w=350.0), nvml):
        assert set(nvml.limits_mw.values()) == {350_000}
        raise ZeroDivisionError
    assert set(nvml.limits_mw.values()) == {700_000}


def test_only_the_gpus_of_the_job_are_capped(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    nvml = Capped()
    with power_cap(EnergyConfig(power_cap_w=350.0), nvml):
        assert len(nvml.limits_mw) == 1


def test_a_cap_the_card_does_not_take_is_refused_with_the_range():
    with pytest.raises(ConfigError) as found, power_cap(EnergyConfig(power_cap_w=50.0), Capped()):
        pass
    assert found.value.hint == "give 200 to 700 W"


def test_a_driver_that_refuses_is_answered_with_the_way_out():
    with (
        pytest.raises(ConfigError, match="Insufficient Permissions"),
        power_cap(EnergyConfig(power_cap_w=350.0), Capped(permitted=False)),
    ):
        pass


def test_a_cap_without_a_driver_is_an_error_and_not_ignored():
    with (
        pytest.raises(SensorMissing, match="NVML does not answer"),
        power_cap(EnergyConfig(power_cap_w=350.0), Capped(present=False)),
    ):
        pass
