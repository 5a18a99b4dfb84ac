"""RAPL through a powercap tree made for the test."""

import subprocess
import time

import pytest
from rapl_tree import domain

from joulelab.meter.config import EnergyConfig
from joulelab.meter.integrate import component_energy
from joulelab.meter.sensors import SensorUnavailable, rapl
from joulelab.meter.sensors.rapl import RaplSensor, why_shared
from joulelab.meter.series import load_trace
from joulelab.meter.session import Meter


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def opened(root, **config):
    sensor = RaplSensor(EnergyConfig(rapl_root=str(root), **config), pid=1)
    return sensor, {device.device: device for device in sensor.open()}


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


def unreadable(folder):
    """As root every file is readable, so the refusal is made by a folder in the counter's place."""
    (folder / "energy_uj").unlink()
    (folder / "energy_uj").mkdir()


def test_an_unreadable_counter_is_answered_with_the_fix(tree):
    unreadable(tree / "intel-rapl:0")
    with pytest.raises(SensorUnavailable) as found:
        opened(tree)
    assert "not readable" in found.value.reason
    assert "chmod a+r" in found.value.fix
    assert 'SUBSYSTEM=="powercap"' in found.value.fix
    assert "setcap cap_dac_read_search+ep" in found.value.fix
    for command, _ in found.value.commands:
        assert command in found.value.fix
        subprocess.run(["bash", "-n", "-c", command], check=True)


def test_an_unreadable_domain_that_is_only_shown_is_warned_about_once(tree):
    unreadable(tree / "intel-rapl:0:0")
    sensor, devices = opened(tree)
    assert "rapl:package-0/core" not in devices
    assert [line["device"] for line in sensor.read() if line["kind"] == "warning"] == ["rapl:package-0/core"]
    assert [line["kind"] for line in sensor.read()] == ["rapl"]


def test_amd_and_multi_die_packages_have_names_of_their_own(tmp_path):
    domain(tmp_path, "intel-rapl:0", "package-0", 1)  # the kernel's name for AMD's domains too
    domain(tmp_path, "intel-rapl:0:0", "core", 1)
    domain(tmp_path, "intel-rapl:1", "package-1-die-0", 1)
    domain(tmp_path, "intel-rapl:1:0", "uncore", 1)
    _, devices = opened(tmp_path)
    counted = {name for name, device in devices.items() if device.counted}
    assert counted == {"rapl:package-0", "rapl:package-1-die-0"}
    assert set(devices) - counted == {"rapl:package-0/core", "rapl:package-1-die-0/uncore"}


def test_a_package_shown_through_memory_too_counts_once(tree):
    domain(tree, "intel-rapl-mmio:0", "package-0", 5_000_000)
    _, devices = opened(tree)
    assert devices["rapl:package-0"].counted
    assert not devices["rapl:mmio/package-0"].counted


def test_a_nested_tree_is_the_same_tree(tmp_path):
    domain(tmp_path, "intel-rapl/intel-rapl:0", "package-0", 1)
    domain(tmp_path, "intel-rapl/intel-rapl:0/intel-rapl:0:0", "dram", 1)
    (tmp_path / "intel-rapl:0").symlink_to(tmp_path / "intel-rapl/intel-rapl:0")
    _, devices = opened(tmp_path)
    assert sorted(devices) == ["rapl:package-0", "rapl:package-0/dram"]


def test_the_domains_are_read_twice_within_the_shortest_wrap(tree):
    sensor, devices = opened(tree, sample_interval_s=60)
    assert sensor.interval_s == pytest.approx(65_712.999613 / 1000 / 2)  # dram's range at 1 kW
    assert devices["rapl:package-0"].facts["max_gap_s"] == pytest.approx(262_143.32885 / 1000 / 2)
    assert opened(tree, sample_interval_s=0.5)[0].interval_s == 0.5


def test_two_packages_that_wrap_at_different_ranges_add_up(tmp_path):
    """One range for both made 3 J of these 103 J once."""
    root = tmp_path / "powercap"
    domain(root, "intel-rapl:0", "package-0", 90_000_000, wrap_uj=100_000_000)
    domain(root, "intel-rapl:1", "package-1", 10_000_000, wrap_uj=500_000_000)
    config = EnergyConfig(rapl_root=str(root), gpus="none", sample_interval_s=0.1)
    meter = Meter(tmp_path / "t.jsonl", tmp_path / "e.jsonl", config)
    meter.start()
    begin = time.monotonic_ns()
    time.sleep(0.3)
    (root / "intel-rapl:0" / "energy_uj").write_text("43000000")  # 53 J on, over the edge
    (root / "intel-rapl:1" / "energy_uj").write_text("60000000")
    time.sleep(0.3)
    end = time.monotonic_ns()
    meter.stop()
    assert component_energy(load_trace(tmp_path / "t.jsonl"), "cpu", [(begin, end)]).energy_j == pytest.approx(103)


def test_on_a_shared_node_rapl_is_labeled_and_not_counted(tree, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "1")
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    _, devices = opened(tree)
    assert not any(device.counted for device in devices.values())
    package = devices["rapl:package-0"]
    assert package.facts["node_wide"] is True
    assert "1 of this node's 64 CPUs" in package.facts["reason"]
    assert opened(tree, node_shared="no")[1]["rapl:package-0"].counted


@pytest.mark.parametrize(
    ("environ", "shared"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_CPUS_PER_NODE": "64"}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_CPUS_PER_NODE": "64(x3)", "SLURM_CPUS_ON_NODE": "8"}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_CPUS_PER_NODE": "64,8", "SLURM_NODEID": "1"}, True),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_CPUS_PER_NODE": "64,8", "SLURM_NODEID": "0"}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "32"}, True),
        ({"SLURM_JOB_ID": "1"}, True),
    ],
)
def test_a_job_has_the_node_to_itself_when_it_has_all_its_cpus(environ, shared):
    assert (why_shared("auto", environ, node_cpus=64) is not None) == shared
    assert why_shared("yes", environ, node_cpus=64)
    assert why_shared("no", environ, node_cpus=64) is None


def test_a_small_range_is_read_as_often_as_its_power_needs(tmp_path, monkeypatch):
    """A range of 40 J at 30 W wraps every 1.33 s: first read every 20 ms, then eight times within a wrap."""
    counter = domain(tmp_path, energy_uj=0, wrap_uj=40_000_000)
    sensor, _ = opened(tmp_path, sample_interval_s=0.5)
    assert sensor.interval_s == 0.02
    for tick in range(4):
        counter.write_text(f"{tick * 1_500_000}")
        monkeypatch.setattr(rapl.time, "monotonic_ns", lambda now_ns=tick * 50_000_000: now_ns)
        sensor.read()
    assert sensor.interval_s == pytest.approx(40 / 30 / 8)
