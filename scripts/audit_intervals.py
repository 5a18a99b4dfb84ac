"""Do the stated intervals contain the truth? Simulated cards whose true power is known, seen through an H200's sensors.

For every cell of (cards) x (load) x (window length) x (lag of the samples), windows at random moments are compared with
the true energy. Printed per (cards, load, window), pooled over the lags: the coverage of the 95 % interval, its lowest
value for a single lag, the 95th percentile of the error and the median half-width, both relative to the figure.

    python scripts/audit_intervals.py                 # the whole table, minutes on two cores
    python scripts/audit_intervals.py --windows 100   # a quick look
    python scripts/audit_intervals.py --loads "0.1 s" steady --window-s 0.02 0.3   # these rows only
    python scripts/audit_intervals.py --seed 10000    # other traces than those that constants were tuned on

The card is modeled on the trace in tests/meter/recorded: the counter is refreshed every 100 ms at a random phase
and read every 1.027 s (the read call takes 2.5 ms on average); samples are means between stamps about 20 ms apart, with
1.5 % noise and a scale that is off by up to 1.5 %; all cards run the load in step and share the lag.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
from numpy.typing import NDArray

from joulelab.clock import NS
from joulelab.meter.figures import EnergyFigure, total
from joulelab.meter.integrate import device_energy
from joulelab.meter.sensors.nvml import OUT_OF_STEP
from joulelab.meter.series import DeviceSeries, SharedLag

Floats = NDArray[np.float64]

CARDS = (1, 2, 8)
LOADS: dict[str, float | None] = {"steady": None, "20 ms": 0.02, "0.1 s": 0.1, "0.3 s": 0.3, "0.5 s": 0.5, "2 s": 2.0}
WINDOWS_S = (0.02, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)
LAGS_S = (0.0, 0.005, 0.010, 0.015, 0.020)
TRACES_S = (12.0, 30.0, 66.0)
LOW_W, HIGH_W = 120.0, 650.0
STEP_S = 0.001
REFRESH_S = 0.1
LEAST_COVERAGE = 0.93
MOST_COVERAGE = 0.98
# An interval this narrow is harmless even where it is wider than the errors.
NARROW_REL = 0.001


@dataclass
class SimulatedCard:
    """True power in steps of a millisecond, and what a recorder gets to see of it."""

    power_w: Floats
    random: np.random.Generator
    lag_s: float = 0.01
    noise_rel: float = 0.015
    stamp_jitter_s: float = 0.0017
    read_interval_s: float = 1.0 * OUT_OF_STEP
    read_call_s: float = 0.0025

    def __post_init__(self) -> None:
        self.length_s = len(self.power_w) * STEP_S
        self._times = np.arange(len(self.power_w) + 1) * STEP_S
        self._energy = np.concatenate([[0.0], np.cumsum(self.power_w * STEP_S)])
        self._latch_phase = self.random.uniform(0, REFRESH_S)
        self._scale = self.random.uniform(0.985, 1.015)

    def energy_until(self, moment_s: Floats | float) -> Floats:
        found: Floats = np.interp(moment_s, self._times, self._energy)
        return found

    def true_energy(self, start_s: float, end_s: float) -> float:
        return float(self.energy_until(end_s) - self.energy_until(start_s))

    def counter(self) -> tuple[Floats, Floats, Floats]:
        """When it was read (the middle of the call), its value at the last refresh before, how long the call took."""
        due = np.append(np.arange(0.2, self.length_s - 0.05, self.read_interval_s), self.length_s - 0.05)
        call_s = self.random.exponential(self.read_call_s, len(due))
        read = due + self.random.exponential(0.0005, len(due)) + call_s * self.random.uniform(0, 1, len(due))
        latched = np.floor((read - self._latch_phase) / REFRESH_S) * REFRESH_S + self._latch_phase
        return due + call_s / 2, self.energy_until(latched), call_s

    def samples(self) -> tuple[Floats, Floats]:
        stamps = np.arange(self.random.uniform(0, 0.02) + 0.06, self.length_s, 0.02)
        ends = stamps + self.random.normal(0, self.stamp_jitter_s, len(stamps))
        begins = np.concatenate([[ends[0] - 0.02], ends[:-1]])
        watts = (self.energy_until(ends - self.lag_s) - self.energy_until(begins - self.lag_s)) / (ends - begins)
        return ends, watts * self._scale * (1 + self.random.normal(0, self.noise_rel, len(watts)))

    def series(self, driver: SharedLag | None = None) -> DeviceSeries:
        read_s, energy_j, call_s = self.counter()
        stamps, watts = self.samples()
        series = DeviceSeries(
            device="gpu:simulated",
            component="gpu",
            name="simulated",
            counted=True,
            refresh_s=REFRESH_S,
            gain_error_rel=0.05,
            counter_ns=(read_s * NS).astype(np.int64),
            counter_j=energy_j,
            power_ns=np.zeros(0, dtype=np.int64),
            power_w=np.zeros(0),
            samples_ns=(stamps * NS).astype(np.int64),
            samples_w=watts,
            facts={"power_limit_w": 700.0},
            counter_read_s=call_s,
            driver=driver,
        )
        if driver is not None:
            driver.devices.append(series)
        return series


def square_wave(period_s: float | None, length_s: float, phase: float) -> Floats:
    times = np.arange(round(length_s / STEP_S)) * STEP_S
    if period_s is None:
        return np.full(len(times), HIGH_W)
    return np.where((times / period_s + phase) % 1 < 0.5, HIGH_W, LOW_W)


@dataclass(frozen=True)
class Trial:
    """One window: its figure for so many cards against the truth, both in joules."""

    cards: int
    load: str
    window_s: float
    lag_s: float
    error_j: float
    half_width_j: float
    true_j: float


def trials_of_trace(load: str, lag_s: float, length_s: float, per_window: dict[float, int], seed: int) -> list[Trial]:
    """Windows at random moments in one trace of eight cards that run the same load in step."""
    random = np.random.default_rng(seed)
    power_w = square_wave(LOADS[load], length_s, random.uniform())
    driver = SharedLag()
    cards = [SimulatedCard(power_w, random, lag_s) for _ in range(max(CARDS))]
    series = [card.series(driver) for card in cards]
    found = []
    for window_s, count in per_window.items():
        for start_s in random.uniform(0.6, length_s - window_s - 0.8, count):
            window = (round(start_s * NS), round((start_s + window_s) * NS))
            figures: list[EnergyFigure] = [device_energy(one, [window]) for one in series]
            true_j = cards[0].true_energy(window[0] / NS, window[1] / NS)
            for number in CARDS:
                figure = total(figures[:number])
                assert figure.energy_j is not None and figure.half_width_j is not None
                error_j = figure.energy_j - number * true_j
                found.append(Trial(number, load, window_s, lag_s, error_j, figure.half_width_j, number * true_j))
    return found


def plan(
    windows: int,
    traces: int,
    loads: Sequence[str] = tuple(LOADS),
    windows_s: Sequence[float] = WINDOWS_S,
    seed: int = 0,
) -> Iterator[tuple[str, float, float, dict[float, int], int]]:
    """The traces to simulate, so that every cell has at least `windows` windows, of several trace lengths."""
    for load in LOADS:
        for lag_s in LAGS_S:
            for number in range(traces):
                length_s = TRACES_S[number % len(TRACES_S)]
                seed += 1
                fits = [window_s for window_s in windows_s if window_s <= length_s - 2]
                if load not in loads or not fits:
                    continue
                hosts = {w: sum(TRACES_S[n % len(TRACES_S)] - 2 >= w for n in range(traces)) for w in fits}
                yield load, lag_s, length_s, {w: math.ceil(windows / hosts[w]) for w in fits}, seed


def _run(arguments: tuple[str, float, float, dict[float, int], int]) -> list[Trial]:
    return trials_of_trace(*arguments)


@dataclass(frozen=True)
class Row:
    """One (cards, load, window), pooled over the lags."""

    cards: int
    load: str
    window_s: float
    windows: int
    coverage: float
    lowest_coverage: float
    """Of a single lag."""
    p95_error_rel: float
    median_half_width_rel: float

    @property
    def overconfident(self) -> bool:
        per_lag = self.windows / len(LAGS_S)
        single = self.lowest_coverage < LEAST_COVERAGE - tolerance(per_lag)
        return single or self.coverage < LEAST_COVERAGE - tolerance(self.windows)

    @property
    def too_wide(self) -> bool:
        return self.median_half_width_rel > max(3 * self.p95_error_rel, NARROW_REL)

    @property
    def cautious(self) -> bool:
        """More often right than 98 %: wider than needed."""
        return self.coverage > MOST_COVERAGE + tolerance(self.windows, MOST_COVERAGE)

    @property
    def narrow(self) -> bool:
        """So narrow that more caution than needed does no harm."""
        return self.median_half_width_rel <= NARROW_REL

    @property
    def ok(self) -> bool:
        return not (self.overconfident or self.too_wide or (self.cautious and not self.narrow))

    @property
    def remark(self) -> str:
        if not self.ok:
            return "  <- out of bounds"
        return "  above 98 %, half-width below 0.1 %" if self.cautious else ""


def tolerance(windows: float, rate: float = LEAST_COVERAGE) -> float:
    """Two standard deviations of a coverage of this rate over so many windows."""
    return 2 * math.sqrt(rate * (1 - rate) / windows)


def rows(trials: list[Trial]) -> list[Row]:
    groups: dict[tuple[int, str, float], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.cards, trial.load, trial.window_s), []).append(trial)
    found = []
    order = list(LOADS)
    for key in sorted(groups, key=lambda key: (key[0], order.index(key[1]), key[2])):
        (cards, load, window_s), group = key, groups[key]
        hits = np.array([abs(trial.error_j) <= trial.half_width_j for trial in group])
        lags = np.array([trial.lag_s for trial in group])
        errors = np.array([abs(trial.error_j) / trial.true_j for trial in group])
        widths = np.array([trial.half_width_j / trial.true_j for trial in group])
        found.append(
            Row(
                cards,
                load,
                window_s,
                len(group),
                float(hits.mean()),
                min(float(hits[lags == lag].mean()) for lag in np.unique(lags)),
                float(np.quantile(errors, 0.95)),
                float(np.median(widths)),
            )
        )
    return found


def simulate(
    windows: int,
    traces: int,
    jobs: int,
    loads: Sequence[str] = tuple(LOADS),
    windows_s: Sequence[float] = WINDOWS_S,
    seed: int = 0,
) -> list[Row]:
    planned = plan(windows, traces, loads, windows_s, seed)
    # Not forked: a copy of a process with threads (a test runner that has imported torch) can wait for a lock forever.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return rows([trial for trials in pool.map(_run, planned, chunksize=2) for trial in trials])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=500, help="windows per cell (default: 500)")
    parser.add_argument("--traces", type=int, default=24, help="simulated traces per load and lag (default: 24)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="loads (default: all)")
    parser.add_argument(
        "--window-s", nargs="+", type=float, choices=WINDOWS_S, default=WINDOWS_S, help="window lengths (default: all)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="number before the first trace's seed; another one, such as 10000, gives other traces (default: 0)",
    )
    options = parser.parse_args()
    found = simulate(options.windows, options.traces, options.jobs, options.loads, options.window_s, seed=options.seed)
    print(f"95 % intervals of simulated cards, {options.windows} windows per cell; rows pool {len(LAGS_S)} lags")
    titles = ("cards", "load", "window", "coverage", "lowest lag", "p95 error", "half-width")
    print("".join(f"{title:>12}" for title in titles))
    for row in found:
        rates = (row.coverage, row.lowest_coverage, row.p95_error_rel, row.median_half_width_rel)
        texts = [f"{100 * rate:.{digits}f} %" for rate, digits in zip(rates, (1, 1, 3, 3), strict=True)]
        cells = (str(row.cards), row.load, f"{row.window_s:g} s", *texts)
        print("".join(f"{cell:>12}" for cell in cells) + row.remark)
    good = sum(row.ok for row in found)
    tolerances = (tolerance(options.windows), tolerance(options.windows * len(LAGS_S), MOST_COVERAGE))
    print(
        f"{good} of {len(found)} rows in bounds: at least 93 % for every lag (within "
        f"{100 * tolerances[0]:.1f} points, two binomial standard deviations), 93 to 98 % pooled (within "
        f"{100 * tolerances[1]:.1f} points) unless the half-width is below 0.1 %, half-width at most 3 times the p95 "
        "error or 0.1 %"
    )
    print(json.dumps({"script": "audit_intervals", "rows": len(found), "in_bounds": good}))


if __name__ == "__main__":
    main()
