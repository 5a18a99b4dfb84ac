"""A card whose true power is known, seen through an H200's sensors: latched counter, late and biased 20 ms samples."""

import numpy as np

from joulelab.clock import NS
from joulelab.meter.series import DeviceSeries

STEP_S = 0.001
REFRESH_S = 0.1


class SimulatedCard:
    def __init__(self, power_w, random):
        self.length_s = len(power_w) * STEP_S
        self._t = np.arange(len(power_w) + 1) * STEP_S
        self._energy = np.concatenate([[0.0], np.cumsum(power_w * STEP_S)])
        self._latch_phase = random.uniform(0, REFRESH_S)
        self._lag = random.uniform(0.0, 0.02)
        self._sample_phase = random.uniform(0, 0.02)
        self._random = random

    def true_energy(self, start_s, end_s):
        return float(self._at(end_s) - self._at(start_s))

    def _at(self, moment):
        return np.interp(moment, self._t, self._energy)

    def counter(self, every_s=1.0):
        """Readings with a scheduler's jitter; each tells the energy at the last refresh before it."""
        read = np.arange(0.3, self.length_s, every_s)
        read = read + self._random.uniform(0, 0.05) + self._random.normal(0, 0.002, len(read))
        latched = np.floor((read - self._latch_phase) / REFRESH_S) * REFRESH_S + self._latch_phase
        return read, self._at(latched)

    def samples(self):
        stamps = np.arange(self._sample_phase + 0.08, self.length_s, 0.02)
        ends = stamps - self._lag
        return stamps, 1.01 * (self._at(ends) - self._at(ends - 0.02)) / 0.02

    def series(self, with_samples=True):
        read, energy = self.counter()
        stamps, watts = self.samples() if with_samples else (np.array([]), np.array([]))
        empty = np.array([])
        return DeviceSeries(
            "gpu:sim", "gpu", "simulated", True, REFRESH_S, 0.05,
            (read * NS).astype(np.int64), energy, empty.astype(np.int64), empty, (stamps * NS).astype(np.int64), watts,
        )  # fmt: skip


def random_waveform(random, length_s):
    """Square waves of 20 ms to 2 s, bursts, ramps."""
    t = np.arange(round(length_s / STEP_S)) * STEP_S
    low, high = random.uniform(60, 130), random.uniform(250, 720)
    kind = random.choice(["square", "square", "bursts", "ramp"])
    if kind == "square":
        period = np.exp(random.uniform(np.log(0.02), np.log(2.0)))
        duty, phase = random.uniform(0.2, 0.8), random.uniform(0, period)
        return np.where((t + phase) % period < duty * period, high, low)
    if kind == "bursts":
        power = np.full(len(t), low)
        for _ in range(random.integers(3, 25)):
            start = random.uniform(0, length_s)
            power[(t >= start) & (t < start + np.exp(random.uniform(np.log(0.02), np.log(3.0))))] = high
        return power
    return low + (high - low) * ((t / random.uniform(0.5, 8)) % 1)
