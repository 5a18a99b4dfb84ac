"""A long recording in a short time: `python tests/attack/soak.py --hours 168` simulates a week of eight GPUs.

The clocks of this process are replaced: waiting for the next reading moves them, reading the sensors takes no simulated
time. Sensor, sampling loop and trace are the recorder's own, at the default cadence, with a driver that has an energy
counter and a buffer of 20 ms samples. Prints CPU seconds, bytes and resident memory of simulated hours.

`--measures 200 --at-once 50` runs that many real measurements in one store instead.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

CARDS = 8
SAMPLE_US = 20_000
real_cpu_s = time.process_time


class SimulatedClock:
    def __init__(self):
        self.mono_ns = time.monotonic_ns()
        self.wall_minus_mono_ns = time.time_ns() - self.mono_ns

    def replace(self):
        """Before joulelab is imported: some of its modules keep references to these functions."""
        time.monotonic_ns = lambda: self.mono_ns
        time.monotonic = lambda: self.mono_ns / 1e9
        time.time_ns = lambda: self.mono_ns + self.wall_minus_mono_ns
        time.time = lambda: time.time_ns() / 1e9


def simulated_driver():
    sys.path.insert(0, str(Path(__file__).parent.parent / "meter"))
    from fake_nvml import FakeNvml

    class EightCards(FakeNvml):
        def nvmlDeviceGetCount(self):  # noqa: N802
            return CARDS

        def nvmlDeviceGetUUID(self, handle):  # noqa: N802
            return f"GPU-{handle:08d}"

        def nvmlDeviceGetTotalEnergyConsumption(self, handle):  # noqa: N802
            return time.monotonic_ns() // 10_000_000  # 100 W in mJ

        def nvmlDeviceGetSamples(self, handle, kind, last_seen):  # noqa: N802
            now_us = time.time_ns() // 1000
            begin_us = max(last_seen, now_us - 120 * SAMPLE_US) // SAMPLE_US + 1
            stamps = (place * SAMPLE_US for place in range(begin_us, (now_us - 70_000) // SAMPLE_US + 1))
            return 1, [SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=100_000)) for at in stamps]

    return EightCards()


def soak(hours, folder):
    """One row per simulated hour: CPU seconds, bytes of the trace, MB of resident memory."""
    clock = SimulatedClock()
    clock.replace()
    import psutil

    from joulelab.meter.config import EnergyConfig
    from joulelab.meter.recorder import trace_lines
    from joulelab.meter.sampling import SamplingLoop, SensorReader
    from joulelab.meter.sensors.nvml import NvmlSensor
    from joulelab.meter.trace import LineFile

    trace = LineFile(folder / "trace.jsonl")
    driver, process, rows = simulated_driver(), psutil.Process(), []

    def take(readings):
        trace.append(*(line for reading in readings for line in trace_lines(reading)))

    loop = SamplingLoop(take)
    loop.open([SensorReader("nvml", lambda: NvmlSensor(EnergyConfig(), os.getpid(), driver))])
    begin_ns, cpu_s, size = clock.mono_ns, real_cpu_s(), 0

    def wait(timeout_s):
        nonlocal cpu_s, size
        clock.mono_ns += max(1_000_000, round(timeout_s * 1e9))
        if clock.mono_ns - begin_ns >= (len(rows) + 1) * 3600 * 10**9:
            written = (folder / "trace.jsonl").stat().st_size
            memory_mb = process.memory_info().rss / 1e6
            rows.append({"cpu_s": real_cpu_s() - cpu_s, "bytes": written - size, "memory_mb": memory_mb})
            cpu_s, size = real_cpu_s(), written
            if len(rows) in (1, 2) or len(rows) % 24 == 0:
                print(f"hour {len(rows)}: {row_text(rows[-1])}", flush=True)
        return "over" if len(rows) >= hours else None

    loop.run(wait)
    loop.close()
    return rows


def row_text(row):
    return f"{row['cpu_s']:.1f} s of CPU, {row['bytes'] / 1e6:.1f} MB, {row['memory_mb']:.0f} MB of memory"


def measures(number, at_once, store):
    """How many of `number` measurements, `at_once` at a time, end well and are listed with their energy."""
    words = [sys.executable, "-m", "joulelab", "measure", "-q", "--estimate-cpu", "--runs-dir", str(store), "--"]
    running, ended_well = [], 0
    for started in range(number + at_once):
        if started >= at_once and running:
            ended_well += running.pop(0).wait(timeout=600) == 0
        if started < number:
            running.append(
                subprocess.Popen([*words, sys.executable, "-c", "sum(range(10**7))"], stderr=subprocess.DEVNULL)
            )
    ended_well += sum(process.wait(timeout=600) == 0 for process in running)
    listed = subprocess.run(
        [sys.executable, "-m", "joulelab", "runs", "--json", "--runs-dir", str(store)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(listed.stdout)
    return ended_well, len(found["runs"] if isinstance(found, dict) else found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hours", type=int, default=168, help="Simulated hours.")
    parser.add_argument("--measures", type=int, default=0, help="Real measurements in one store instead.")
    parser.add_argument("--at-once", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="joulelab-soak-") as work:
        if options.measures:
            ended_well, listed = measures(options.measures, options.at_once, Path(work) / "runs")
            print(f"{ended_well} of {options.measures} measurements ended well, {listed} are listed")
            return 0 if ended_well == listed == options.measures else 1
        rows = soak(options.hours, Path(work))
    most = {name: max(row[name] for row in rows) for name in rows[0]}
    print(f"most of {len(rows)} hours: {row_text(most)}; {sum(row['bytes'] for row in rows) / 1e9:.1f} GB in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
