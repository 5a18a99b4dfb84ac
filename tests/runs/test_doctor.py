"""What `joulelab doctor` says of components, sensors that are there, and sensors that are not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from joulelab.cli.main import app
from joulelab.errors import SensorMissing, UsageError
from joulelab.meter.config import EnergyConfig
from joulelab.meter.sensors import Device, SensorUnavailable
from joulelab.runs.doctor import commands, component_states, demand, diagnose, findings
from joulelab.runs.environment import DiscoveredSensors, demand_sensors, discover_sensors

ESTIMATE = Device("estimate:cpu", "cpu_estimate", "EPYC", gain_error_rel=0.7, facts={"w_per_thread": 2.5})
H200 = Device("gpu:A", "gpu", "H200", refresh_s=0.1, gain_error_rel=0.05)
NO_GPU = SensorUnavailable("gpu", "NVML does not answer", "install the driver")
NO_RAPL = SensorUnavailable("cpu", "energy_uj is not readable", "sudo chmod a+r")


def states(*devices, missing=()):
    return {state.component: state for state in component_states(DiscoveredSensors(tuple(devices), tuple(missing)))}


def test_a_component_with_a_counted_sensor_is_measured():
    found = states(H200)["gpu"]
    assert (found.status, found.by) == ("measured", "H200")
    assert "every 100 ms" in found.why


def test_a_missing_component_has_its_reason_and_its_fix():
    found = states(missing=[NO_GPU])["gpu"]
    assert (found.status, found.why, found.fix) == ("missing", "NVML does not answer", "install the driver")


def test_a_cpu_without_a_sensor_is_estimated():
    found = states(ESTIMATE, missing=[NO_RAPL])["cpu"]
    assert found.status == "estimated"
    assert "±70 %" in found.by
    assert found.fix == "sudo chmod a+r"


def test_what_hides_the_cpu_hides_the_memory_too():
    assert states(missing=[NO_RAPL])["dram"].why == "energy_uj is not readable"


def test_a_sensor_of_the_whole_node_does_not_measure_this_job():
    node = Device("rapl:package-0", "cpu", "package-0", counted=False, facts={"reason": "shared node"})
    assert states(node)["cpu"].status == "missing"
    assert states(node)["cpu"].why == "shared node"


def test_node_meters_are_listed_and_do_not_count_as_measured_energy(monkeypatch):
    bmc = Device("node:ipmi", "node", "IPMI node power", counted=False, refresh_s=1.0, gain_error_rel=0.1)
    silent = SensorUnavailable("node", "Redfish node power: no reading", "set JOULELAB_REDFISH")
    sensors = DiscoveredSensors((bmc,), (silent, NO_GPU))
    rows = [state for state in component_states(sensors) if state.component == "node"]
    assert [(row.status, row.by, row.fix) for row in rows] == [
        ("measured", "IPMI node power", ""),
        ("missing", "-", "set JOULELAB_REDFISH"),
    ]
    assert "never added" in rows[0].why
    monkeypatch.setattr("joulelab.runs.doctor.discover_sensors", lambda config: sensors)
    with pytest.raises(SensorMissing):
        demand(diagnose(EnergyConfig(), Path.cwd(), seconds=0.1))


def test_a_machine_without_a_node_meter_has_no_row_for_it():
    assert "node" not in states(H200, missing=[NO_GPU])


@pytest.mark.parametrize(
    ("known", "devices", "ok", "words"),
    [
        (0, (), False, "none: no NVIDIA driver"),
        (8, (H200,), True, "8 known to the driver, 1 of them metered"),
        (2, (), False, "2 known to the driver, 0 of them metered"),
        (0, (H200,), True, "1 metered"),
    ],
)
def test_a_machine_whose_gpus_no_one_meters_is_not_ok(monkeypatch, tmp_path, known, devices, ok, words):
    monkeypatch.setattr("joulelab.runs.environment.gpus", lambda: [{}] * known)
    (found,) = [f for f in findings(DiscoveredSensors(devices, ()), tmp_path, None, 0.001) if f.what == "GPUs"]
    assert found.ok is ok
    assert words in found.text


def test_a_sensor_that_breaks_on_opening_does_not_hide_the_others(monkeypatch):
    class Broken:
        def __init__(self, config, pid): ...

        def open(self):
            raise RuntimeError("boom")

    monkeypatch.setattr("joulelab.lookup.SENSORS.resolve", lambda name: Broken)
    found = discover_sensors(EnergyConfig())
    assert found.devices == ()
    assert all("boom" in gone.reason for gone in found.missing)


def test_required_sensors_that_are_not_there_stop_before_anything_starts(tmp_path):
    config = EnergyConfig(require="measured", gpus="none", rapl_root=str(tmp_path))
    with pytest.raises(SensorMissing, match="nothing was started") as refused:
        demand_sensors(config)
    assert refused.value.exit_code == 3
    demand_sensors(config.model_copy(update={"require": "nothing"}))


@pytest.fixture
def doctor(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("joulelab.runs.doctor.recorder_cpu_share", lambda config, seconds: 0.004)
    monkeypatch.setattr("joulelab.meter.calibrate.RAPL_S", 0.05)

    def call(*words):
        return CliRunner().invoke(app, ["doctor", "--runs-dir", str(tmp_path), *words])

    return call


def test_doctor_answers_in_json_with_a_rapl_tree_of_our_own(doctor, rapl_tree):
    done = doctor("--json", "--rapl-root", str(rapl_tree), "--require", "measured")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    cpu = next(state for state in found["components"] if state["component"] == "cpu")
    assert cpu["status"] == "measured"
    assert found["versions"]["joulelab"]
    assert found["fsync"]["median_s"] > 0


def test_doctor_answers_first_and_prints_all_tables_on_request(doctor, rapl_tree):
    text = doctor("--rapl-root", str(rapl_tree)).stdout
    assert text.startswith("Energy on ") and "cpu measured" in text.splitlines()[0]
    assert "of one core" not in text
    assert "uses 0.40 % of one core" in doctor("--rapl-root", str(rapl_tree), "-v").stdout
    assert doctor("--rapl-root", str(rapl_tree), "-q").stdout == text.splitlines()[0] + "\n"


def test_calibrating_keeps_a_profile_and_shows_it(doctor, rapl_tree, tmp_path):
    done = doctor("--calibrate", "--json", "--rapl-root", str(rapl_tree))
    (kept,) = (tmp_path / "config" / "joulelab" / "machines").glob("*.json")
    assert json.loads(kept.read_text())["profile_id"] == json.loads(done.stdout)["profile"]["profile_id"]


def test_requiring_a_measurement_where_there_is_none_is_exit_code_3(doctor, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    done = doctor("--require", "measured", "--rapl-root", str(empty))
    if isinstance(done.exception, SensorMissing):
        assert done.exception.exit_code == 3
    else:
        pytest.skip("this machine has a GPU that can be measured")


@pytest.mark.parametrize("words", [("--require", "everything"), ("--rapl-root", "/no/such/folder")])
def test_what_cannot_be_asked_is_a_usage_error(doctor, words):
    assert isinstance(doctor(*words).exception, UsageError)


def test_the_commands_are_printed_whole_and_work_as_typed(tmp_path, monkeypatch):
    """Each line below `Commands`, as a shell takes it; fixes that need root are only parsed."""
    monkeypatch.setenv("COLUMNS", "60")
    done = CliRunner().invoke(app, ["doctor", "--runs-dir", str(tmp_path)])
    lines = done.stdout.partition("\nCommands\n")[2].splitlines()
    assert lines and lines[0].startswith("  # ") and lines[1].startswith("  joulelab measure -- ")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "joulelab").write_text(f'#!/bin/sh\nexec {sys.executable} -m joulelab "$@"\n')
    (folder / "joulelab").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "JOULELAB_RUNS": str(tmp_path / "runs")}
    for line in lines:
        words = ["bash", "-c", line] if line.startswith("  joulelab measure") else ["bash", "-n", "-c", line]
        typed = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert typed.returncode == 0, (line, typed.stderr)
        assert words[1] == "-n" or "estimated; " in typed.stderr or "energy counter; " in typed.stderr


def test_fixes_of_missing_sensors_are_among_the_commands():
    fix = SensorUnavailable("cpu", "not readable", "x", (("sudo chmod a+r /sys/x", "until the next boot"),))
    found = commands(DiscoveredSensors((ESTIMATE,), (fix,)))
    assert [one.command for one in found][-1] == "sudo chmod a+r /sys/x"
    measured = commands(DiscoveredSensors((H200,), ()))
    assert "measured" in measured[0].purpose and "--scope" not in "".join(one.command for one in measured)
