"""Random loads, random windows: the figure is right, and where it is not exact its interval says so."""

import itertools

import numpy as np
import pytest
from simulated_card import SimulatedCard, random_waveform

from joulelab.clock import NS
from joulelab.meter.integrate import device_energy

RUNS = 150


def figures(duration_s, seed, with_samples=True, windows=6):
    random = np.random.default_rng(seed)
    for _ in range(RUNS):
        length_s = random.uniform(max(4.0, duration_s + 2), 60)
        card = SimulatedCard(random_waveform(random, length_s), random)
        series = card.series(with_samples)
        for _ in range(windows):
            start = random.uniform(0.5, length_s - duration_s - 1.0)
            window = (round(start * NS), round((start + duration_s) * NS))
            yield device_energy(series, [window]), card.true_energy(start, start + duration_s)


@pytest.mark.parametrize("duration_s", [0.02, 0.05, 0.1, 0.3, 1.0, 3.0, 10.0])
def test_the_truth_is_in_the_interval_at_least_95_times_in_100(duration_s):
    hits = [abs(figure.energy_j - truth) <= figure.half_width_j for figure, truth in figures(duration_s, seed=1)]
    assert np.mean(hits) >= 0.95


def test_windows_of_10_s_are_within_1_percent():
    errors = [abs(figure.energy_j / truth - 1) for figure, truth in figures(10.0, seed=2)]
    assert max(errors) < 0.01


def test_intervals_are_not_needlessly_wide():
    widths = [figure.half_width_j / truth for figure, truth in figures(1.0, seed=3)]
    assert np.median(widths) <= 0.04


@pytest.mark.parametrize("duration_s", [1.0, 10.0])
def test_the_counter_alone_is_honest_too(duration_s):
    found = list(figures(duration_s, seed=4, with_samples=False))
    hits = [abs(figure.energy_j - truth) <= figure.half_width_j for figure, truth in found]
    assert np.mean(hits) >= 0.95


def test_windows_that_partition_a_run_sum_to_it():
    random = np.random.default_rng(5)
    for _ in range(30):
        series = SimulatedCard(random_waveform(random, 30.0), random).series()
        cuts = np.sort(random.uniform(1, 28, random.integers(1, 12)))
        edges = [round(cut * NS) for cut in (0.5, *cuts, 29.0)]
        parts = [device_energy(series, [pair]).energy_j for pair in itertools.pairwise(edges)]
        whole = device_energy(series, [(edges[0], edges[-1])]).energy_j
        assert sum(parts) == pytest.approx(whole, rel=1e-9)


def test_a_hole_in_the_samples_is_bridged_by_the_counter():
    random = np.random.default_rng(6)
    card = SimulatedCard(np.concatenate([np.full(10_000, 100.0), np.full(10_000, 500.0)]), random)
    series = card.series()
    kept = (series.samples_ns < 7 * NS) | (series.samples_ns > 14 * NS)
    object.__setattr__(series, "samples_ns", series.samples_ns[kept])
    object.__setattr__(series, "samples_w", series.samples_w[kept])
    figure = device_energy(series, [(2 * NS, 18 * NS)])
    assert figure.energy_j == pytest.approx(card.true_energy(2, 18), rel=0.01)
    assert figure.coverage == pytest.approx(1.0)
