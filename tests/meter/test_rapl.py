"""RAPL through a powercap tree made for the test."""

import pytest

from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import SensorUnavailable
from joulelab.meter.sensors.rapl import RaplSensor


def domain(root, folder, name, energy_uj, wrap_uj=262_143_328_850):
    place = root / folder
    place.mkdir(parents=True)
    (place / "name").write_text(name + "\n")
    (place / "energy_uj").write_text(f"{energy_uj}\n")
    (place / "max_energy_range_uj").write_text(f"{wrap_uj}\n")


@pytest.fixture
def tree(tmp_path):
    domain(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    domain(tmp_path, "intel-rapl:0:0", "core", 1_000_000)
    domain(tmp_path, "intel-rapl:0:1", "dram", 2_000_000, wrap_uj=65_712_999_613)
    domain(tmp_path, "intel-rapl:1", "package-1", 7_000_000)
    domain(tmp_path, "intel-rapl:1:0", "dram", 3_000_000, wrap_uj=65_712_999_613)
    domain(tmp_path, "intel-rapl:2", "psys", 99_000_000)
    return tmp_path


def test_only_packages_and_dram_are_counted_and_the_rest_is_shown(tree):
    devices = RaplSensor(EnergyConfig(rapl_root=str(tree)), pid=1).open()
    counted = sorted(device.device for device in devices if device.counted)
    shown = sorted(device.device for device in devices if not device.counted)
    assert counted == ["rapl:package-0", "rapl:package-0/dram", "rapl:package-1", "rapl:package-1/dram"]
    assert shown == ["rapl:package-0/core", "rapl:psys"]


def test_each_domain_has_its_own_wrap_range(tree):
    devices = {device.device: device for device in RaplSensor(EnergyConfig(rapl_root=str(tree)), pid=1).open()}
    assert devices["rapl:package-0"].wrap_j == pytest.approx(262_143.32885)
    assert devices["rapl:package-1/dram"].wrap_j == pytest.approx(65_712.999613)
    assert devices["rapl:package-1/dram"].component == "dram"


def test_readings_are_in_joules(tree):
    sensor = RaplSensor(EnergyConfig(rapl_root=str(tree)), pid=1)
    sensor.open()
    (line,) = sensor.read()
    assert line["rapl"]["package-1"] == pytest.approx(7.0)


def test_no_tree_is_missing_with_a_reason(tmp_path):
    with pytest.raises(SensorUnavailable) as found:
        RaplSensor(EnergyConfig(rapl_root=str(tmp_path / "none")), pid=1).open()
    assert found.value.component == "cpu"
    assert "no RAPL domains" in found.value.reason


def test_an_unreadable_counter_is_answered_with_the_fix(tree, monkeypatch):
    """As root every file is readable, so the refusal is made by a folder in the counter's place."""
    (tree / "intel-rapl:0" / "energy_uj").unlink()
    (tree / "intel-rapl:0" / "energy_uj").mkdir()
    with pytest.raises(SensorUnavailable) as found:
        RaplSensor(EnergyConfig(rapl_root=str(tree)), pid=1).open()
    assert "not readable" in found.value.reason
    assert "chmod a+r" in found.value.fix
