"""Cost of one window for the measured program: joulelab, CodeCarbon's tasks and Zeus's windows, in one process.

    python benchmarks/window_cost.py

Packages that are not installed are skipped with a message. CodeCarbon gets fewer rounds: it is slower by a factor of
hundreds and a long run would only repeat that.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from joulelab.meter.config import EnergyConfig
from joulelab.meter.session import Meter


def pair_cost_us(begin_end: Callable[[], None], rounds: int) -> dict[str, float]:
    begin_end()
    costs = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        begin_end()
        costs.append((time.perf_counter_ns() - start) / 1000)
    return {"median_us": statistics.median(costs), "p99_us": sorted(costs)[int(0.99 * len(costs))], "rounds": rounds}


def ours(rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        meter = Meter(Path(folder) / "trace.jsonl", Path(folder) / "events.jsonl", EnergyConfig())
        meter.start()
        phase = meter.phase("step")

        def window() -> None:
            with phase:
                pass

        cost = pair_cost_us(window, rounds)
        meter.stop()
    return cost


def codecarbon(rounds: int) -> dict[str, float]:
    module: Any = importlib.import_module("codecarbon")
    tracker = module.OfflineEmissionsTracker(country_iso_code="FRA", log_level="critical", save_to_file=False)
    tracker.start()
    numbers = iter(range(10**6))

    def task() -> None:
        name = f"task{next(numbers)}"
        tracker.start_task(name)
        tracker.stop_task(name)

    cost = pair_cost_us(task, max(1, rounds // 100))
    tracker.stop()
    return cost


def zeus(rounds: int) -> dict[str, float]:
    module: Any = importlib.import_module("zeus.monitor")
    monitor = module.ZeusMonitor()

    def window() -> None:
        monitor.begin_window("step", sync_execution=False)
        monitor.end_window("step", sync_execution=False)

    return pair_cost_us(window, max(1, rounds // 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=20_000, help="windows of ours; a tenth for Zeus, a hundredth for CodeCarbon"
    )
    options = parser.parse_args()
    results: dict[str, object] = {}
    for name, run in (("joulelab", ours), ("CodeCarbon", codecarbon), ("Zeus", zeus)):
        try:
            results[name] = run(options.rounds)
        except ImportError as error:
            results[name] = f"not installed ({error.name})"
        except Exception as error:  # a competitor that does not run on this machine is a result too
            results[name] = f"does not run here: {type(error).__name__}: {error}"
    base = results["joulelab"]
    assert isinstance(base, dict)
    print(f"{'tool':<12}{'begin+end, median':>20}{'p99':>12}{'x ours':>10}")
    for name, found in results.items():
        if isinstance(found, dict):
            ratio = found["median_us"] / base["median_us"]
            print(f"{name:<12}{found['median_us']:>17.2f} us{found['p99_us']:>9.2f} us{ratio:>9.1f}x")
        else:
            print(f"{name:<12}{found}")
    print(json.dumps({"benchmark": "window_cost", "results": results}))


if __name__ == "__main__":
    main()
