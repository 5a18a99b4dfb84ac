"""A power cap is set only where asked for, within what the card takes, and always taken back."""

import fcntl

import pytest
from fake_nvml import FakeNvml, NVMLError

from joulelab.errors import ConfigError, SensorMissing
from joulelab.meter import power_cap as capping
from joulelab.meter.power_cap import power_cap, restore_power_limits


class Capped(FakeNvml):
    def __init__(self, permitted=True, **options):
        super().__init__(**options)
        self.permitted = permitted
        self.limits_mw = {}

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return next(handle for handle in range(self.nvmlDeviceGetCount()) if self.nvmlDeviceGetUUID(handle) == uuid)

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


@pytest.fixture
def saved(tmp_path):
    return tmp_path / "power_limits.node.1.jsonl"


def test_the_cap_holds_inside_and_is_taken_back_after_an_error(saved):
    nvml = Capped()
    with pytest.raises(ZeroDivisionError), power_cap(350.0, "auto", saved, nvml):
        assert set(nvml.limits_mw.values()) == {350_000}
        raise ZeroDivisionError
    assert set(nvml.limits_mw.values()) == {700_000}


def test_only_the_gpus_of_the_job_are_capped(monkeypatch, saved):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    nvml = Capped()
    with power_cap(350.0, "auto", saved, nvml):
        assert len(nvml.limits_mw) == 1


def test_a_cap_the_card_does_not_take_is_refused_with_the_range(saved):
    with pytest.raises(ConfigError) as found, power_cap(50.0, "auto", saved, Capped()):
        pass
    assert found.value.hint == "give 200 to 700 W"


def test_a_driver_that_refuses_is_answered_with_the_way_out(saved):
    with (
        pytest.raises(ConfigError, match="Insufficient Permissions"),
        power_cap(350.0, "auto", saved, Capped(permitted=False)),
    ):
        pass


def test_a_cap_without_a_driver_is_an_error_and_not_ignored(saved):
    with (
        pytest.raises(SensorMissing, match="NVML does not answer"),
        power_cap(350.0, "auto", saved, Capped(present=False)),
    ):
        pass


def test_limits_are_on_disk_before_the_cap_is_set_and_gone_after_it(saved):
    class Watched(Capped):
        def nvmlDeviceSetPowerManagementLimit(self, handle, limit_mw):  # noqa: N802
            assert "700000" in saved.read_text()
            super().nvmlDeviceSetPowerManagementLimit(handle, limit_mw)

    with power_cap(350.0, "auto", saved, Watched()):
        assert saved.exists()
    assert not saved.exists()


def test_a_limit_that_someone_changed_meanwhile_is_left_alone(saved):
    nvml = Capped()
    with power_cap(350.0, "auto", saved, nvml):
        nvml.limits_mw = dict.fromkeys(nvml.limits_mw, 500_000)
    assert set(nvml.limits_mw.values()) == {500_000}


def test_what_cannot_be_restored_is_kept_and_answered_with_the_command(saved):
    nvml = Capped()
    with power_cap(350.0, "auto", saved, nvml):
        nvml.permitted = False
    assert saved.exists()
    assert all("nvidia-smi -i" in text and "-pl 700" in text for text in restore_power_limits(saved, nvml))
    nvml.permitted = True
    assert all("from 350 to 700 W" in text for text in restore_power_limits(saved, nvml))
    assert not saved.exists()


def test_after_a_restart_of_the_machine_the_driver_has_forgotten_the_cap(saved, monkeypatch):
    nvml = Capped()
    with power_cap(350.0, "auto", saved, nvml):
        nvml.permitted = False
    monkeypatch.setattr("joulelab.clock.boot_id", lambda: "a later boot")
    assert restore_power_limits(saved, nvml) == []
    assert not saved.exists()


def test_a_holder_that_hangs_does_not_hang_the_next(tmp_path, monkeypatch):
    saved = tmp_path / "limits"
    saved.write_text("")
    monkeypatch.setattr(capping, "LOCK_LIMIT_S", 0.2)
    with saved.open("r+b") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with capping._alone_with(saved) as exists:
            assert exists
