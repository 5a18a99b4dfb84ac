"""The tally, the Prometheus text and the live table, from records made here."""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from joulelab.clock import NS
from joulelab.errors import UsageError
from joulelab.meter.monitor import exposition
from joulelab.meter.monitor.exposition import PrometheusPage, parse_address
from joulelab.meter.monitor.tally import DeviceTally, Tally, sparkline
from joulelab.meter.sampling import REOPEN_AFTER, SensorReader
from joulelab.meter.sensors import Device

GPU = Device(device="gpu:A", component="gpu", name='Fake "H200"', facts={"gpu_index": 3})
PACKAGE = Device(device="rapl:package-0", component="cpu", name="package-0", wrap_j=100.0)


def gpu(second, power_w, **more):
    return {"kind": "gpu", "device": "gpu:A", "mono_ns": second * NS, "power_watts": power_w, **more}


def rapl(second, joules):
    return {"kind": "rapl", "device": "host", "mono_ns": second * NS, "rapl": {"package-0": joules}}


def tallied(*ticks):
    tally = Tally([GPU, PACKAGE])
    for records in ticks:
        tally.take(records, wall_s=1.5)
    return tally


def test_joules_come_from_the_counter_where_there_is_one():
    tally = tallied([gpu(0, 100, energy_counter_j=7.0)], [gpu(10, 300, energy_counter_j=1507.0)])
    assert (tally.devices["gpu:A"].energy_j, tally.devices["gpu:A"].method) == (1500.0, "counter")


def test_joules_come_from_the_trapezoid_where_there_is_none():
    tally = tallied([gpu(0, 100)], [gpu(10, 300)])
    assert (tally.devices["gpu:A"].energy_j, tally.devices["gpu:A"].method) == (2000.0, "integrated")


def test_a_domain_that_wraps_continues_counting():
    tally = tallied([rapl(1, 90.0)], [rapl(2, 20.0)], [rapl(3, 50.0)])
    assert tally.devices["rapl:package-0"].energy_j == 60.0
    assert tally.devices["rapl:package-0"].power_w == 30.0


def test_a_gpu_counter_that_restarts_with_its_driver_counts_from_0():
    tally = tallied([gpu(0, 100, energy_counter_j=1e6)], [gpu(1, 100, energy_counter_j=40.0)])
    assert tally.devices["gpu:A"].energy_j == 40.0


def page_text(tally, openmetrics=False):
    """What a client receives, parsed by prometheus-client's own parser: {sample name: [(labels, value)]}."""
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
    from prometheus_client.parser import text_string_to_metric_families

    page = PrometheusPage("0")
    try:
        page.show(tally)
        request = urllib.request.Request(page.url)
        if openmetrics:
            request.add_header("Accept", "application/openmetrics-text; version=1.0.0")
        with urllib.request.urlopen(request, timeout=5) as answer:
            kind, text = answer.headers["Content-Type"], answer.read().decode()
    finally:
        page.close()
    assert kind.startswith("application/openmetrics-text" if openmetrics else "text/plain")
    assert text.endswith("# EOF\n") == openmetrics
    samples = {}
    for family in (parse_openmetrics if openmetrics else text_string_to_metric_families)(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


@pytest.mark.parametrize("openmetrics", [False, True])
def test_prometheus_own_parser_reads_both_formats(openmetrics):
    tally = tallied(
        [gpu(0, 100, gpu_utilization_percent=50, memory_used_MB=2), rapl(0, 0.0)], [gpu(2, 100), rapl(2, 9)]
    )
    tally.fail("rapl", ["rapl:package-0"])
    node = Device("node:ipmi", "node", "IPMI", counted=False)
    tally.devices["node:ipmi"] = DeviceTally(node)
    tally.devices["node:ipmi"].take_power(0, 400.0)
    found = page_text(tally, openmetrics)
    labels = {"gpu": "3", "uuid": "A", "name": 'Fake "H200"'}
    assert found["joulelab_gpu_power_watts"] == [(labels, 100.0)]
    assert found["joulelab_gpu_energy_joules_total"] == [({**labels, "method": "integrated"}, 200.0)]
    assert found["joulelab_cpu_energy_joules_total"] == [({"domain": "package-0", "counted": "true"}, 9.0)]
    assert found["joulelab_monitor_sensor_errors_total"] == [({"sensor": "rapl"}, 1.0)]
    assert found["joulelab_node_power_watts"] == [({"device": "node:ipmi"}, 400.0)]


def test_a_failing_sensor_leaves_no_old_reading_behind():
    tally = tallied([gpu(0, 100)])
    tally.fail("nvml", ["gpu:A"])
    found = page_text(tally)
    assert "joulelab_gpu_power_watts" not in found
    assert "joulelab_gpu_energy_joules_total" in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [("9101", ("127.0.0.1", 9101)), ("0.0.0.0:1", ("0.0.0.0", 1)), ("[::1]:80", ("::1", 80)), ("host:x", None)],
)
def test_the_address_is_local_unless_another_is_named(text, expected):
    if expected is None:
        with pytest.raises(UsageError, match="not an address"):
            parse_address(text)
    else:
        assert parse_address(text) == expected


def test_every_query_of_the_dashboard_names_a_metric_that_is_served():
    dashboard = json.loads((Path(__file__).parents[3] / "examples" / "grafana-dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    source = Path(exposition.__file__).read_text()
    names = {name for query in queries for name in re.findall(r"joulelab_\w+", query)}
    assert len(queries) >= 6
    assert all(f'"{name.removesuffix("_total")}"' in source for name in names), names


@pytest.mark.parametrize(("values", "expected"), [([], ""), ([0, 0], "▁▁"), ([0, 50, 100], "▁▅█"), ([80, 80], "██")])
def test_a_sparkline_starts_at_zero(values, expected):
    assert sparkline(values) == expected


def test_the_live_table_shows_watts_joules_use_and_memory():
    from joulelab.cli.machine import live_grid
    from joulelab.report.tables.grid import render_text, to_rich

    tally = tallied([gpu(0, 100, gpu_utilization_percent=50, memory_used_MB=2048, temperature_C=40)], [gpu(60, 100)])
    text = render_text(to_rich(live_grid(tally, 60)), width=140)
    assert "100 W" in text
    assert "6.00 kJ" in text
    assert "██" in text


class Flaky:
    """A sensor whose driver was reloaded: old handles fail for ever, a fresh one works."""

    interval_s = 1.0
    made = 0

    def __init__(self):
        Flaky.made += 1
        self.good = Flaky.made > 1

    def open(self):
        return []

    def read(self):
        if not self.good:
            raise RuntimeError("stale handle")
        return [{"kind": "host"}]

    def close(self):
        pass


def test_a_sensor_that_keeps_failing_is_opened_anew():
    reported = []
    reader = SensorReader("flaky", Flaky, reopen=True, report=reported.append)
    reader.open()
    answers = [reader.read().lines[0]["kind"] for _ in range(REOPEN_AFTER + 1)]
    assert answers == ["gap"] * REOPEN_AFTER + ["host"]
    assert len(reported) == 2


@pytest.mark.parametrize(("installed", "expected"), [(True, "amd"), (False, None)])
def test_another_maker_s_gpus_are_read_only_where_its_library_is_there(monkeypatch, installed, expected):
    from joulelab.cli.machine import _amd_sensor
    from joulelab.errors import SensorMissing
    from joulelab.meter.monitor import operator_log
    from joulelab.meter.sensors import amd

    def no_nvidia(wanted):
        raise SensorMissing("NVML does not answer")

    monkeypatch.setattr(amd, "present", lambda: installed)
    monkeypatch.setattr(operator_log, "choose", no_nvidia)
    assert _amd_sensor() == expected


def test_start_up_of_the_three_verbs_imports_nothing_heavy():
    program = "import sys, joulelab.cli.main; print([n for n in ('numpy', 'pydantic', 'altair') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
