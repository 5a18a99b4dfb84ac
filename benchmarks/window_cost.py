"""What does one window cost the measured program? Ours, CodeCarbon's tasks and Zeus's windows, in one process.

    python benchmarks/window_cost.py

Packages that are not installed are left out and said so. CodeCarbon gets fewer rounds: it is slower by a factor of
hundreds and a long run would only repeat that.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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


def ours() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        meter = Meter(Path(folder) / "trace.jsonl", Path(folder) / "events.jsonl", EnergyConfig())
        meter.start()
        phase = meter.phase("step")

        def window() -> None:
            with phase:
                pass

        cost = pair_cost_us(window, 20_000)
        meter.stop()
    return cost


def codecarbon() -> dict[str, float]:
    from codecarbon import OfflineEmissionsTracker

    tracker = OfflineEmissionsTracker(country_iso_code="FRA", log_level="critical", save_to_file=False)
    tracker.start()
    numbers = iter(range(10**6))

    def task() -> None:
        name = f"task{next(numbers)}"
        tracker.start_task(name)
        tracker.stop_task(name)

    cost = pair_cost_us(task, 200)
    tracker.stop()
    return cost


def zeus() -> dict[str, float]:
    from zeus.monitor import ZeusMonitor

    monitor = ZeusMonitor()

    def window() -> None:
        monitor.begin_window("step", sync_execution=False)
        monitor.end_window("step", sync_execution=False)

    return pair_cost_us(window, 2_000)


def main() -> None:
    results: dict[str, object] = {}
    for name, run in (("joulelab", ours), ("CodeCarbon", codecarbon), ("Zeus", zeus)):
        try:
            results[name] = run()
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
