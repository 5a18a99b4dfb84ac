"""Meters of boards, modules and nodes, from file trees as their drivers write them, and from a fake BMC."""

import http.server
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict

import pytest

from joulelab.meter.config import EnergyConfig
from joulelab.meter.integrate import component_energy, node_energy
from joulelab.meter.sensors import SensorUnavailable, node_meters
from joulelab.meter.sensors.node_meters import CraySensor, HwmonSensor, IpmiSensor, RedfishSensor
from joulelab.meter.series import load_trace
from joulelab.meter.session import sensors_for
from joulelab.meter.trace import LineFile, header

NS = 1_000_000_000


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.fixture
def hwmon(tmp_path, monkeypatch):
    root = tmp_path / "hwmon"
    root.mkdir()
    monkeypatch.setattr(node_meters, "HWMON", root)
    return root


def opened(kind):
    sensor = kind(EnergyConfig(), os.getpid())
    return sensor, {device.device: device for device in sensor.open()}


def readings(sensor):
    lines = sensor.read()
    counters = {name: value for line in lines for name, value in line.get("counters_j", {}).items()}
    return counters, {name: value for line in lines for name, value in line.get("powers_w", {}).items()}


def test_grace_hopper_counts_grace_and_shows_the_module_next_to_it(hwmon):
    """As the kernel's ACPI power meter shows a GH200."""
    meters = {"Module": 430e6, "Grace": 95e6, "CPU": 60e6, "SysIO": 20e6}
    for number, (label, microwatts) in enumerate(meters.items()):
        write(
            hwmon / f"hwmon{number}", name="power_meter", device__power1_oem_info=f"{label} Power Socket 0",
            device__power1_average=int(microwatts), device__power1_average_interval=50,
        )  # fmt: skip
    sensor, devices = opened(HwmonSensor)
    counted = {name: (device.component, device.counted) for name, device in devices.items()}
    assert counted == {
        "hwmon:module-power-socket-0": ("node", False),
        "hwmon:grace-power-socket-0": ("cpu", True),
        "hwmon:cpu-power-socket-0": ("cpu", False),
        "hwmon:sysio-power-socket-0": ("cpu", False),
    }
    assert "NVML's counter is inside it" in devices["hwmon:module-power-socket-0"].facts["reason"]
    assert devices["hwmon:grace-power-socket-0"].refresh_s == 0.05
    assert readings(sensor)[1]["hwmon:module-power-socket-0"] == pytest.approx(430)


def test_jetson_multiplies_volts_and_amperes_and_takes_the_input_as_the_module(hwmon):
    write(
        hwmon / "hwmon3", name="ina3221", in1_label="VDD_IN", in1_input=5000, curr1_input=3000,
        in2_label="VDD_CPU_GPU_CV", in2_input=5000, curr2_input=1200, in7_label="sum of shunt voltages",
    )  # fmt: skip
    sensor, devices = opened(HwmonSensor)
    assert {name: device.component for name, device in devices.items()} == {
        "jetson:VDD_IN": "node",
        "jetson:VDD_CPU_GPU_CV": "rail",
    }
    assert readings(sensor)[1] == pytest.approx({"jetson:VDD_IN": 15.0, "jetson:VDD_CPU_GPU_CV": 6.0})


def test_a_plain_hwmon_meter_prefers_its_counter_and_chips_of_other_sensors_are_left_out(hwmon):
    write(hwmon / "hwmon0", name="board", energy1_input=12_000_000, energy1_label="total", power1_input=80_000_000)
    write(hwmon / "hwmon1", name="amdgpu", power1_average=100_000_000)
    sensor, devices = opened(HwmonSensor)
    assert list(devices) == ["hwmon:board:total"]
    assert readings(sensor) == ({"hwmon:board:total": 12.0}, {})
    (hwmon / "hwmon0" / "energy1_input").unlink()
    assert sensor.read() == [{"kind": "gap", "device": "hwmon:board:total", "reason": "the meter did not answer"}]


def test_cray_counters_are_read_and_only_the_nodes_is_the_node(tmp_path, monkeypatch):
    write(
        tmp_path, energy="123456 J 1700000000000000 us", cpu_energy="50000 J 1700000000000000 us",
        memory_energy="7000 J 1700000000000000 us", accel0_energy="40000 J 1700000000000000 us",
        power="300 W 1700000000000000 us",
    )  # fmt: skip
    monkeypatch.setattr(node_meters, "CRAY", tmp_path)
    sensor, devices = opened(CraySensor)
    assert {name for name, device in devices.items() if device.component == "node"} == {"cray:node"}
    assert not any(device.counted for device in devices.values())
    assert readings(sensor)[0]["cray:node"] == 123456.0
    assert "cray" in sensors_for(EnergyConfig())


def test_ipmi_reads_the_bmc_by_its_tool(tmp_path, monkeypatch):
    tool = tmp_path / "ipmitool"
    tool.write_text('#!/bin/sh\necho "    Instantaneous power reading:                   412 Watts"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    sensor, _ = opened(IpmiSensor)
    assert readings(sensor)[1] == {"node:ipmi": 412.0}
    assert sensor.interval_s == 1.0
    tool.write_text('#!/bin/sh\necho "Could not open device" >&2; exit 1\n')
    with pytest.raises(SensorUnavailable) as refused:
        opened(IpmiSensor)
    assert "ipmitool dcmi power reading" in refused.value.fix


@pytest.fixture
def bmc(monkeypatch):
    """A BMC whose answer a test sets; `seen` has the logins."""

    class Bmc(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.seen.append(self.headers.get("Authorization"))
            body = json.dumps(self.server.resource).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *ignored): ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bmc)
    server.seen, server.resource = [], {"PowerControl": [{"PowerConsumedWatts": 388}]}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JOULELAB_REDFISH", f"http://127.0.0.1:{server.server_port}/redfish/v1/Chassis/1/Power")
    yield server
    server.shutdown()


@pytest.mark.parametrize(
    "resource", [{"PowerControl": [{"PowerConsumedWatts": 388}]}, {"PowerWatts": {"Reading": 388.0}}]
)
def test_redfish_reads_either_resource_with_the_login(bmc, monkeypatch, resource):
    bmc.resource = resource
    monkeypatch.setenv("JOULELAB_REDFISH_LOGIN", "reader:word")
    sensor, _ = opened(RedfishSensor)
    assert readings(sensor)[1] == {"node:redfish": 388.0}
    assert bmc.seen[0] == "Basic cmVhZGVyOndvcmQ="
    assert "redfish" in sensors_for(EnergyConfig())


def test_a_run_shows_the_node_meter_and_does_not_add_it(bmc, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-c", "from joulelab.cli.main import main; main()", "measure", "--runs-dir", "runs",
                    "--interval", "0.2", "--", "sleep", "4"], check=True)  # fmt: skip
    (run,) = (tmp_path / "runs").glob("sleep-*")
    record = json.loads((run / "run.json").read_text())
    assert record["totals"]["node"]["method"] == "integrated"
    assert record["totals"]["node"]["energy_j"] == pytest.approx(388 * record["totals"]["duration_s"], rel=0.5)
    assert (record["totals"]["best"]["energy_j"] or 0) < 388
    (note,) = [note["text"] for note in record["validity"]["notes"] if note["text"].startswith("node meter")]
    assert "not added" in note
    (trace,) = (run / "trace").glob("*.[jp]*")
    found = load_trace(trace)  # also after it was compacted
    assert node_energy(found, [(found.first_ns, found.last_ns)]).energy_j > 388


def test_the_node_meter_is_a_figure_of_its_own_and_in_no_sum(hwmon, tmp_path):
    """From a trace: 400 W for 10 s of two modules, 90 W of Grace inside one of them."""
    meters = {"Module Power Socket 0": 300, "Module Power Socket 1": 100, "Grace Power Socket 0": 90}
    for number, (label, watts) in enumerate(meters.items()):
        files = {"device__power1_oem_info": label, "device__power1_average": watts * 1_000_000}
        write(hwmon / f"hwmon{number}", name="power_meter", **files)
    sensor, devices = opened(HwmonSensor)
    trace = LineFile(tmp_path / "trace.jsonl")
    described = [asdict(device) for device in devices.values()]
    trace.append({**header(devices=described, missing=[], wall_minus_mono_s=0.0, interval_s=0.5), "mono_ns": NS})
    for tick in range(25):
        trace.append(*({**line, "mono_ns": NS + tick * NS // 2} for line in sensor.read()))
    trace.close()
    found, windows = load_trace(tmp_path / "trace.jsonl"), [(2 * NS, 12 * NS)]
    assert node_energy(found, windows).energy_j == pytest.approx(4000, rel=0.01)
    assert node_energy(found, windows).method == "integrated"
    assert component_energy(found, "cpu", windows).energy_j == pytest.approx(900, rel=0.01)
    assert component_energy(found, "gpu", windows).energy_j is None
