"""The 20 ms buffer while somebody sets the clock: a sample lands where it was taken, or nowhere."""

import pytest

from joulelab.meter.sensors import nvml
from joulelab.meter.sensors.nvml import SampleBuffer

HOUR_S = 3600


class World:
    """A driver that stamps 20 ms samples by a wall clock which can be stepped; power tells the true second."""

    def __init__(self, monkeypatch):
        self.mono_s = 1000.0
        self.wall_minus_mono_s = 1.7e9
        self.taken = []
        self.follows_clock = True
        self._stamp_offset_s = self.wall_minus_mono_s
        monkeypatch.setattr(nvml.time, "monotonic_ns", lambda: round(self.mono_s * 1e9))
        self.buffer = SampleBuffer(self._fetch, wall_ns=lambda: round((self.mono_s + self.wall_minus_mono_s) * 1e9))

    def run(self, seconds):
        """Let time pass in readings of half a second; the samples read, as pairs of believed and true time."""
        pairs = []
        for _ in range(round(seconds / 0.5)):
            for _ in range(25):
                self.mono_s += 0.02
                offset = self.wall_minus_mono_s if self.follows_clock else self._stamp_offset_s
                self.taken.append((round((self.mono_s + offset) * 1e6), round(self.mono_s * 1000)))
            self.taken = self.taken[-119:]
            line = self.buffer.read()
            for stamp, power in zip(line.get("sample_us", ()), line.get("sample_mw", ()), strict=True):
                pairs.append((line["wall_us_mono_ns"] / 1e9 - (line["wall_us"] - stamp) / 1e6, power / 1000))
        return pairs

    def _fetch(self, last_us):
        return [row for row in self.taken if row[0] > last_us]


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


def assert_right(pairs):
    assert all(believed == pytest.approx(true, abs=0.002) for believed, true in pairs)
    assert [true for _, true in pairs] == sorted({true for _, true in pairs})


def test_each_sample_comes_once_and_at_its_time(world):
    pairs = world.run(5)
    assert_right(pairs)
    assert len(pairs) == 250


@pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S, 5.0, -5.0, 0.3, -0.3])
def test_a_stepped_clock_loses_little_and_misplaces_nothing(world, step_s):
    world.run(5)
    world.wall_minus_mono_s += step_s
    pairs = world.run(10)
    assert_right(pairs)
    assert len(pairs) >= 500 - 50
    assert not world.buffer.problem


def test_a_buffer_that_gets_no_new_samples_says_so_until_it_does(world, monkeypatch):
    world.run(5)
    assert not world.buffer.problem
    fetch = world.buffer._fetch
    monkeypatch.setattr(world.buffer, "_fetch", lambda last_us: [])
    assert world.run(2) == []
    assert world.buffer.problem == "20 ms samples: no new ones from the driver"
    monkeypatch.setattr(world.buffer, "_fetch", fetch)
    assert_right(world.run(2))
    assert not world.buffer.problem


def test_a_driver_that_keeps_the_old_clock_is_given_up_for_polling(world):
    world.run(5)
    world.follows_clock = False
    world.wall_minus_mono_s += HOUR_S
    assert world.run(10) == []
    assert world.buffer.usable
    assert world.buffer.problem == "20 ms samples: timestamped by a clock other than this machine's"
    world.run(10)
    assert not world.buffer.usable


def test_slow_drift_of_the_clock_is_not_a_step(world):
    world.run(2)
    pairs = []
    for _ in range(10):
        world.wall_minus_mono_s += 0.0005
        pairs += world.run(0.5)
    assert len(pairs) == 250
