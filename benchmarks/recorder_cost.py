"""CPU use of the recorder at default settings.

python benchmarks/recorder_cost.py --seconds 60
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import psutil

from joulelab.meter.config import EnergyConfig
from joulelab.meter.session import Meter


def recorder_share(seconds: float, config: EnergyConfig) -> dict[str, float]:
    """CPU time of the recorder over wall time, after its start; 1,000 marks a second keep it as busy as a fast loop."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        meter = Meter(trace, Path(folder) / "events.jsonl", config)
        meter.start()
        recorder = psutil.Process(json.loads(trace.read_text().splitlines()[0])["pid"])
        phase = meter.phase("step")
        time.sleep(1.0)
        before, start = recorder.cpu_times(), time.monotonic()
        while time.monotonic() - start < seconds:
            with phase:
                time.sleep(0.001)
        after, wall_s = recorder.cpu_times(), time.monotonic() - start
        memory = recorder.memory_info().rss
        meter.stop()
        size = trace.stat().st_size
    busy_s = after.user + after.system - before.user - before.system
    return {"share": busy_s / wall_s, "rss_mb": memory / 2**20, "trace_bytes_per_s": size / wall_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    results = {}
    for name, config in (("defaults", EnergyConfig()), ("with the CPU estimate", EnergyConfig(estimate_cpu=True))):
        found = results[name] = recorder_share(options.seconds, config)
        print(
            f"{name:<24}{100 * found['share']:>7.2f} % of one core, {found['rss_mb']:.0f} MiB, "
            f"{found['trace_bytes_per_s']:.0f} B/s of trace"
        )
    print(json.dumps({"benchmark": "recorder_cost", "results": results}))


if __name__ == "__main__":
    main()
