"""A sensor, a log format and a tracker. They import no framework: `joulelab measure` and `import` use them too."""

import json
import os
from pathlib import Path

from joulelab.meter.importers.power_log import Findings, Row, Source, gather
from joulelab.meter.sensors import Device, SensorUnavailable

COUNTER = "EXAMPLE_METER"
"""Environment variable with the path of a file that holds joules since some moment, as text."""


class FileSensor:
    """A meter whose driver writes its energy counter to a file."""

    def __init__(self, config, pid):
        self.interval_s = config.sample_interval_s
        self._file = Path(os.environ.get(COUNTER, ""))

    def open(self):
        if not self._file.is_file():
            raise SensorUnavailable("gpu", "no example meter", f"set {COUNTER} to the file of its counter")
        facts = {"reason": "example meter"}
        return [Device("example:0", "gpu", "Example meter", refresh_s=0.1, gain_error_rel=0.01, facts=facts)]

    def read(self):
        joules = float(self._file.read_text())
        return [{"kind": "counters", "device": "host", "counters_j": {"example:0": joules}}]

    def close(self): ...


class ExampleLog:
    """Lines `SECONDS WATTS` below a first line `# example meter`."""

    @staticmethod
    def looks_like(opening):
        return opening[0].strip() == "# example meter"

    @staticmethod
    def read(lines, rule):
        cells = [line.split() for line in lines[1:]]
        device = Source("example:0", "Example meter")
        rows = [Row(device, {"power_watts": float(watts)}, stamp=float(seconds)) for seconds, watts in cells]
        return gather(rows, rule, Findings("example meter"))


class LinesTracker:
    """Writes the metrics of a run to `example.jsonl` in its folder."""

    def __init__(self, run):
        self._file = run.folder / "example.jsonl"

    def log(self, point):
        with self._file.open("a") as file:
            file.write(json.dumps({"stage": point.stage, "step": point.step, **point.values}) + "\n")

    def end(self, summary, status):
        with self._file.open("a") as file:
            file.write(json.dumps({"status": status}) + "\n")
