"""The tally, the Prometheus text and the live table, from records made here."""

import subprocess
import sys

import pytest

from joulelab.clock import NS
from joulelab.meter.monitor.exposition import exposition
from joulelab.meter.monitor.tally import Tally, sparkline
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


def test_the_prometheus_text_is_what_prometheus_reads():
    tally = tallied(
        [gpu(0, 100, gpu_utilization_percent=50, memory_used_MB=2), rapl(0, 0.0)], [gpu(2, 100), rapl(2, 9)]
    )
    tally.fail("rapl", ["rapl:package-0"])
    text = exposition(tally)
    assert 'joulelab_gpu_power_watts{gpu="3",uuid="A",name="Fake \\"H200\\""} 100.0\n' in text
    assert 'name="Fake \\"H200\\"",method="integrated"} 200.0\n' in text
    assert 'joulelab_cpu_energy_joules_total{domain="package-0",counted="true"} 9.0\n' in text
    assert 'joulelab_monitor_sensor_errors_total{sensor="rapl"} 1.0\n' in text
    for line in text.splitlines():
        assert line.startswith(("# HELP joulelab_", "# TYPE joulelab_", "joulelab_"))


def test_a_failing_sensor_leaves_no_old_reading_behind():
    tally = tallied([gpu(0, 100)])
    tally.fail("nvml", ["gpu:A"])
    assert "joulelab_gpu_power_watts" not in exposition(tally)
    assert "joulelab_gpu_energy_joules_total" in exposition(tally)


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
