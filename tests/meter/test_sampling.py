"""The sampling loop on its own: deadlines, readings between ticks, failing sensors, and that every sink uses it."""

import ast
import time
from pathlib import Path

import pytest

import joulelab
from joulelab.meter.sampling import SamplingLoop, SensorReader, Ticks, open_sensors
from joulelab.meter.sensors import Device, SensorUnavailable, within


class Counting:
    """A sensor that notes which of its readings were asked for, and when."""

    def __init__(self, interval_s=0.05, devices=("gpu:A",), hang_s=0.0):
        self.interval_s = interval_s
        self._devices = devices
        self._hang_s = hang_s
        self.calls = []

    def open(self):
        return [Device(name, "gpu", name) for name in self._devices]

    def read(self):
        return self._noted("read")

    def read_edge(self):
        return self._noted("edge")

    def _noted(self, call):
        self.calls.append((call, time.monotonic()))
        time.sleep(self._hang_s)
        return [{"kind": "gpu", "device": "gpu:A"}]

    def close(self):
        pass


def waiting(seconds):
    """Sleeps as asked, and ends the loop after so many seconds."""
    end = time.monotonic() + seconds

    def wait(timeout_s):
        time.sleep(min(timeout_s, max(0.0, end - time.monotonic())))
        return "SIGTERM" if time.monotonic() >= end else None

    return wait


def opened(loop, **sensors):
    loop.open([SensorReader(name, lambda sensor=sensor: sensor) for name, sensor in sensors.items()])
    return loop


def test_without_ticks_each_sensor_has_its_own_grid_and_the_last_reading_is_an_edge():
    taken = []
    fast, slow = Counting(0.05), Counting(0.2)
    loop = opened(SamplingLoop(taken.append), fast=fast, slow=slow)
    assert loop.run(waiting(0.65)) == "SIGTERM"
    assert len(fast.calls) > 2 * len(slow.calls)
    assert [calls[-1][0] for calls in (fast.calls, slow.calls)] == ["edge", "edge"]
    assert {call for call, _ in fast.calls[:-1]} == {"read"}
    assert [reading.source.name for reading in taken[-1]] == ["fast", "slow"]


def test_a_sensor_that_hangs_misses_deadlines_without_shifting_the_grid():
    sensor = Counting(0.1, hang_s=0.15)
    loop = opened(SamplingLoop(lambda readings: None), hangs=sensor)
    begin = loop.readers[0].due_ns / 1e9
    loop.run(waiting(1.0))
    offsets = [(at - begin) % 0.1 for call, at in sensor.calls if call == "read"]
    assert len(offsets) >= 3
    assert sorted(min(offset, 0.1 - offset) for offset in offsets)[len(offsets) // 2] < 0.03


def test_between_two_ticks_only_sensors_of_energy_that_ask_for_it_are_read():
    between, ticks = [], []
    loop = SamplingLoop(
        between.extend, Ticks(2.0, lambda readings, late_s: ticks.append(readings), lambda missed: None)
    )
    energy, host, slow = Counting(1.0), Counting(1.0, devices=()), Counting(2.0)
    opened(loop, energy=energy, host=host, slow=slow)
    assert loop.run(waiting(10), duration_s=2.0) is None
    assert [[reading.source.name for reading in tick] for tick in ticks] == [["energy", "host", "slow"]] * 2
    assert {reading.source.name for reading in between} == {"energy"}
    assert [call for call, _ in slow.calls] == ["edge", "edge"]


def test_missed_ticks_are_counted():
    missed = []
    loop = SamplingLoop(lambda readings: None, Ticks(0.05, lambda readings, late_s: None, missed.append))
    opened(loop, hangs=Counting(1.0, hang_s=0.18))
    loop.run(waiting(10), duration_s=0.4)
    assert missed
    assert min(missed) >= 3


def test_a_sensor_that_cannot_open_names_its_component_and_leaves_the_others():
    class Broken(Counting):
        def open(self):
            raise KeyError("libamd_smi.so")

    class Absent(Counting):
        def open(self):
            raise SensorUnavailable("cpu", "no RAPL domains")

    readers = [SensorReader(name, made) for name, made in (("amd", Broken), ("rapl", Absent), ("host", Counting))]
    working, devices, missing = open_sensors(readers)
    assert [reader.name for reader in working] == ["host"]
    assert [device.device for device in devices] == ["gpu:A"]
    assert [(gone.component, gone.reason) for gone in missing] == [
        ("gpu", "amd: KeyError: 'libamd_smi.so'"),
        ("cpu", "no RAPL domains"),
    ]


def test_a_failing_sensor_yields_a_gap_and_is_read_again_without_being_opened_anew():
    class Failing(Counting):
        def read(self):
            super().read()
            raise RuntimeError("GPU is lost")

    sensor = Failing(0.05)
    taken = []
    loop = opened(SamplingLoop(taken.extend), nvml=sensor)
    loop.run(waiting(0.3))
    assert len(sensor.calls) > 3
    assert all(reading.failed for reading in taken[:-1])
    assert taken[0].lines == [{"kind": "gap", "device": "nvml", "reason": "RuntimeError: GPU is lost"}]


def test_no_other_module_of_the_meter_opens_and_reads_sensors_in_a_loop_of_its_own():
    """One owner: whoever calls `.read()` on a sensor goes through the sampling loop."""
    meter = Path(joulelab.__file__).parent / "meter"
    callers = set()
    for path in meter.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if name == "open" and ast.unparse(node.func.value).endswith("sensor"):
                callers.add(path.relative_to(meter).as_posix())
    assert callers == {"calibrate.py", "sampling.py"}


def test_a_driver_that_hangs_at_start_is_missing_and_the_others_are_opened(monkeypatch):
    class Hanging:
        name = "nvml"

        def open(self):
            time.sleep(60)

    class Working:
        name = "host"

        def open(self):
            return []

    monkeypatch.setattr("joulelab.meter.sampling.OPEN_LIMIT_S", 0.2)
    working = Working()
    begin = time.monotonic()
    opened, devices, (missing,) = open_sensors([Hanging(), working])
    assert time.monotonic() - begin < 10
    assert (opened, devices, missing.component) == ([working], [], "gpu")
    assert "did not answer within 0.2 s" in missing.reason


def test_a_call_into_a_driver_gives_its_result_or_its_error():
    assert within(5, lambda: 3) == 3
    with pytest.raises(KeyError):
        within(5, lambda: {}["x"])
    with pytest.raises(TimeoutError):
        within(0.05, lambda: time.sleep(5))
