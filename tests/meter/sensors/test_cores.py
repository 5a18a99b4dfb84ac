"""Who used the cores meanwhile: told by the kernel's busy time less the program's own."""

import os

import psutil
import pytest

from joulelab.meter.config import EnergyConfig
from joulelab.meter.health import CoreUse, collect_health, mean_use, most_contended
from joulelab.meter.sensors import cpu
from joulelab.meter.sensors.cpu import CoresSensor, allowed_cores


@pytest.fixture
def sensor(monkeypatch):
    """A sensor that reads what the test says: (moment, busy seconds of the cores, own seconds)."""
    made = CoresSensor(EnergyConfig(sample_interval_s=0.1), os.getpid())
    monkeypatch.setattr(cpu, "allowed_cores", lambda pid: [0, 1])

    def read(*readings):
        output_text = iter(readings)
        monkeypatch.setattr(made, "_now", lambda: next(output_text))
        made.open()
        return [line for _ in readings[1:] for line in made.read()]

    return read


def test_what_is_busy_beyond_the_program_and_its_recorder_was_others(sensor):
    assert CoresSensor(EnergyConfig(sample_interval_s=0.1), os.getpid()).interval_s == 1.0
    (line,) = sensor((10.0, 100.0, 5.0), (12.0, 103.8, 6.4))
    assert line == {"kind": "cores", "device": "host", "cores": 2, "others_cores": 1.2, "idle_cores": 0.1}


def test_the_last_moment_and_a_kernel_that_counts_nothing_tell_nothing(sensor):
    assert sensor((10.0, 100.0, 5.0), (10.1, 100.2, 5.0)) == []
    assert sensor((10.0, 0.0, 5.0), (12.0, 0.0, 7.0)) == []


def test_stolen_time_and_low_priority_work_keep_a_core_busy_and_other_cores_are_no_matter(monkeypatch):
    fields = {"user": 1.0, "nice": 2.0, "system": 4.0, "steal": 8.0, "idle": 500.0}
    times = [type("times", (), fields), type("times", (), dict.fromkeys(fields, 100.0))]
    sensor = CoresSensor(EnergyConfig(), os.getpid())
    monkeypatch.setattr(cpu, "allowed_cores", lambda pid: [0])
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: times)
    sensor.open()
    assert sensor._now()[1] == 15.0
    assert set(allowed_cores(os.getpid())) == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("others", "idle", "contended"), [(1.2, 0.0, True), (0.1, 0.0, False), (3.0, 5.0, False), (0.5, 0.5, True)]
)
def test_cores_are_contended_only_if_others_use_them_and_few_are_idle(others, idle, contended):
    size = 16 if others == 3.0 else 2
    assert CoreUse(cores=size, others_cores=others, idle_cores=idle).contended is contended


def test_the_mean_over_a_window_and_the_worst_of_several_hosts():
    line = {"kind": "cores", "device": "host", "cores": 2}
    lines = [{**line, "mono_ns": at, "others_cores": at / 10, "idle_cores": 0.0} for at in (2, 4, 6, 8)]
    use = collect_health(lines).core_use_during([(3, 7)])
    assert (use.cores, use.others_cores, use.idle_cores) == (2, pytest.approx(0.5), 0.0)
    assert collect_health(lines).core_use_during([(9, 10)]) is mean_use([]) is most_contended([None]) is None
    roomy = CoreUse(cores=64, others_cores=40, idle_cores=24)
    assert most_contended([roomy, None, use]) == use
