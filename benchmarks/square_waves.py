"""Accuracy of recorded energy under loads that mislead polling.

Square waves of power run on the GPU while our recorder samples it. Before and after each wave the energy counter is
read directly when it changes, so the true energy between the two readings is known to the millijoule. The recorded
trace must give the same joules for that window, within its stated interval; 1 s and 5 s polling of power are shown for
contrast. The counter is also read at its ticks about once a second during the load, so that windows of about 1 s are
compared one by one, and 0.1 s windows as the sum of all that tile the load.

    python benchmarks/square_waves.py --seconds 20 --repeats 3 --keep traces/
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import torch

from joulelab.meter.config import EnergyConfig
from joulelab.meter.figures import EnergyFigure
from joulelab.meter.integrate import TwoPaths, both_paths, component_energy
from joulelab.meter.series import Trace, load_trace
from joulelab.meter.session import Meter

# (period in seconds, share of it under load), a steady load, and a training loop with a pause every two seconds
Wave = tuple[float, float] | str
WAVES: tuple[Wave, ...] = ((0.02, 0.5), (0.1, 0.5), (0.5, 0.5), (2.0, 0.25), "steady", "training")
INSTANT_FIELD = 186
REFRESH_S = 0.1
SHORTEST_CALL_S = 0.0026


def burn_until(deadline_s: float, matrix: torch.Tensor) -> None:
    """Matrix products of about a millisecond until the deadline, the device never far behind the host."""
    while time.monotonic() < deadline_s:
        for _ in range(2):
            matrix @ matrix
        torch.cuda.synchronize()


def train_until(deadline_s: float) -> None:
    """A real step: a transformer encoder in bf16, forward, backward, AdamW, with a short stop as for an evaluation."""
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 6).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    pause_s = time.monotonic() + 2
    while time.monotonic() < deadline_s:
        batch = torch.randn(32, 256, 1024, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        if time.monotonic() > pause_s:
            time.sleep(0.3)
            pause_s = time.monotonic() + 2


def run_wave(wave: Wave, seconds: float, matrix: torch.Tensor) -> list[tuple[float, float]]:
    """The load; returns when it was on, for looking at the sensor's lag afterwards."""
    start = time.monotonic()
    if isinstance(wave, str):
        train_until(start + seconds) if wave == "training" else burn_until(start + seconds, matrix)
        return [(start, time.monotonic())]
    period, duty = wave
    bursts = []
    for number in range(round(seconds / period)):
        begin = start + number * period
        time.sleep(max(0.0, begin - time.monotonic()))
        on = time.monotonic()
        burn_until(begin + duty * period, matrix)
        bursts.append((on, time.monotonic()))
    return bursts


def tick(handle: object) -> tuple[int, float]:
    """Wait for the counter to change: its value is then of a moment up to a few milliseconds ago (`refresh_times`)."""
    first = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    while True:
        value = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        if value != first:
            return time.monotonic_ns(), value / 1000


def refresh_times(rows: list[dict[str, Any]]) -> None:
    """Move all ticks to the refresh before them.

    A change is noticed late by the call that reads it, and later by a busy interpreter. The refresh itself is periodic:
    its phase is that of the promptest tick, less half of the shortest call.
    """
    phase_s = min(tick_ns / 1e9 % REFRESH_S for row in rows for tick_ns, _ in row["ticks"]) - SHORTEST_CALL_S / 2
    for row in rows:
        row["ticks"] = [(round(t - (t / 1e9 - phase_s) % REFRESH_S * 1e9), joules) for t, joules in row["ticks"]]
        row["window_ns"] = (row["ticks"][0][0], row["ticks"][-1][0])


class TickLog(threading.Thread):
    """The counter at its ticks, about once a second."""

    def __init__(self, handle: object) -> None:
        super().__init__(daemon=True)
        self.handle = handle
        self.ticks: list[tuple[int, float]] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(1.0):
            self.ticks.append(tick(self.handle))


class Poller(threading.Thread):
    """What a simple power logger would have: a field, read every so often."""

    def __init__(self, handle: object, period_s: float, instant: bool) -> None:
        super().__init__(daemon=True)
        self.handle, self.period_s, self.instant = handle, period_s, instant
        self.rows: list[tuple[float, float]] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        due = time.monotonic()
        while not self.stopped.is_set():
            self.rows.append((time.monotonic(), self.power_w()))
            due += self.period_s
            self.stopped.wait(max(0.0, due - time.monotonic()))

    def power_w(self) -> float:
        if self.instant:
            return float(pynvml.nvmlDeviceGetFieldValues(self.handle, [INSTANT_FIELD])[0].value.uiVal) / 1000
        return float(pynvml.nvmlDeviceGetPowerUsage(self.handle)) / 1000

    def energy_j(self, start_s: float, end_s: float) -> float:
        """Trapezoid rule, with the first and last reading held to the window's ends."""
        t = np.array([row[0] for row in self.rows])
        w = np.array([row[1] for row in self.rows])
        grid = np.unique(np.clip(np.concatenate([[start_s], t, [end_s]]), start_s, end_s))
        return float(np.trapezoid(np.interp(grid, t, w), grid))


def measure(wave: Wave, seconds: float, matrix: torch.Tensor, handle: object) -> dict[str, Any]:
    pollers = {
        f"{name} @{period:g} s": Poller(handle, period, instant)
        for name, instant in (("average", False), ("instant", True))
        for period in (1.0, 5.0)
    }
    for poller in pollers.values():
        poller.start()
    start_ns, start_j = tick(handle)
    log = TickLog(handle)
    log.start()
    bursts = run_wave(wave, seconds, matrix)
    log.stopped.set()
    log.join()
    end_ns, end_j = tick(handle)
    for poller in pollers.values():
        poller.stopped.set()
    window_s = (start_ns / 1e9, end_ns / 1e9)
    return {
        "wave": wave if isinstance(wave, str) else f"{1000 * wave[0]:.0f} ms, {100 * wave[1]:.0f} %",
        "window_ns": (start_ns, end_ns),
        "true_j": end_j - start_j,
        "polled_j": {name: poller.energy_j(*window_s) for name, poller in pollers.items()},
        "bursts": bursts[:200],
        "ticks": [(start_ns, start_j), *log.ticks, (end_ns, end_j)],
    }


def compare(figure: EnergyFigure, truth_j: float) -> tuple[float, float, bool]:
    """Relative error, relative half-width, and whether the truth is inside the interval."""
    assert figure.energy_j is not None and figure.half_width_j is not None
    error_j = figure.energy_j - truth_j
    return error_j / truth_j, figure.half_width_j / truth_j, abs(error_j) <= figure.half_width_j


def short_windows(trace: Trace, ticks: list[tuple[int, float]]) -> dict[str, Any]:
    """Windows between two ticks, and the sum of 0.1 s windows that tile all of them: error, half-width, inside."""

    def compared(windows: list[tuple[int, int]], truth_j: float) -> tuple[float, float, bool]:
        return compare(component_energy(trace, "gpu", windows), truth_j)

    pairs = [(a, b) for a, b in pairwise(ticks) if b[0] - a[0] >= 0.95e9]
    edges = [*range(ticks[0][0], ticks[-1][0], 100_000_000), ticks[-1][0]]
    return {
        "second_windows": [compared([(a[0], b[0])], b[1] - a[1]) for a, b in pairs],
        "tiles": compared(list(pairwise(edges)), ticks[-1][1] - ticks[0][1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each wave")
    parser.add_argument("--repeats", type=int, default=1, help="how often all waves are run")
    parser.add_argument("--keep", type=Path, help="folder for the trace and the true energies")
    options = parser.parse_args()
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    burn_until(time.monotonic() + 3, matrix)
    with tempfile.TemporaryDirectory() as folder:
        trace_path = Path(folder) / "trace.jsonl"
        meter = Meter(trace_path, Path(folder) / "events.jsonl", EnergyConfig())
        meter.start()
        rows = []
        for wave in WAVES * options.repeats:
            time.sleep(1.0)
            rows.append(measure(wave, options.seconds, matrix, handle))
        meter.stop()
        trace = load_trace(trace_path)
        refresh_times(rows)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(trace_path, options.keep / "square-waves.jsonl")
            (options.keep / "square-waves.truth.json").write_text(json.dumps(rows))
    print(
        f"{torch.cuda.get_device_name(0)}, {options.seconds:g} s per wave; errors against the counter read at its ticks"
    )
    names = list(rows[0]["polled_j"])
    print(
        f"{'wave':<14}{'mean W':>8}{'recorded':>10}{'± 95 %':>8}{'counter':>9}{'20 ms':>8}"
        + "".join(f"{n:>15}" for n in names)
    )
    results = []
    for row in rows:
        window, truth = row["window_ns"], row["true_j"]
        error, half_width, inside = compare(component_energy(trace, "gpu", [window]), truth)
        paths = both_paths(trace, "gpu", [window])
        assert isinstance(paths, TwoPaths)
        result = {
            "wave": row["wave"],
            "mean_w": truth / ((window[1] - window[0]) / 1e9),
            "recorded_error": error,
            "half_width": half_width,
            "counter_error": compare(paths.counter, truth)[0],
            "samples_error": compare(paths.integrated, truth)[0],
            "inside": inside,
            "polled_error": {name: value / truth - 1 for name, value in row["polled_j"].items()},
            **short_windows(trace, row["ticks"]),
        }
        results.append(result)
        print(
            f"{result['wave']:<14}{result['mean_w']:>8.0f}{100 * result['recorded_error']:>+9.2f}%"
            f"{100 * result['half_width']:>7.2f}%{100 * result['counter_error']:>+8.2f}%"
            f"{100 * result['samples_error']:>+7.2f}%"
            + "".join(f"{100 * error:>+14.1f}%" for error in result["polled_error"].values())
        )
    loads_inside = sum(row["inside"] for row in results)
    windows = [window for row in results for window in row["second_windows"]]
    print(f"{loads_inside} of {len(results)} loads inside their 95 % interval")
    errors = sorted(abs(error) for error, _, _ in windows)
    covered = sum(is_inside for _, _, is_inside in windows)
    print(
        f"windows of about 1 s: {covered} of {len(windows)} inside, 95 % of errors below "
        f"{100 * errors[int(0.95 * len(errors))]:.2f} %, "
        f"median half-width {100 * np.median([half_width for _, half_width, _ in windows]):.2f} %"
    )
    tiles = [row["tiles"] for row in results]
    print(
        f"sums of 0.1 s windows: {sum(tile[2] for tile in tiles)} of {len(tiles)} inside, largest error "
        f"{100 * max(abs(tile[0]) for tile in tiles):.2f} %"
    )
    print(json.dumps({"benchmark": "square_waves", "results": results}))


if __name__ == "__main__":
    main()
