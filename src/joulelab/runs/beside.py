"""What CodeCarbon said while it ran beside our meter, read back from `<run>/codecarbon/` and kept under its own name.

Its tracker tells cumulative energy every few seconds (`readings.<host>.<attempt>.jsonl`, written by
`trackers/codecarbon.py`). A stage's share is the difference of that curve at the stage's edges, taken as even between
two readings. What it means is CodeCarbon's affair: GPU counters where it finds them, constants for RAM and often CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from joulelab.clock import NS
from joulelab.meter.figure_text import CODECARBON
from joulelab.meter.figures import EnergyFigure, missing, total
from joulelab.meter.trace import read_lines
from joulelab.runs.record import NO_CODECARBON

FOLDER = "codecarbon"
SOURCE = CODECARBON
OWN_FIGURE = "CodeCarbon's own figure"

Window = tuple[int, int]


def readings_path(run_folder: Path, host: str, attempt: int) -> Path:
    return run_folder / FOLDER / f"readings.{host}.{attempt}.jsonl"


@dataclass(frozen=True)
class CodecarbonReadings:
    """Cumulative joules at monotonic times; `problem` says why there are none."""

    stamps_ns: tuple[int, ...] = ()
    energy_j: tuple[float, ...] = ()
    version: str = ""
    problem: str | None = None

    def energy(self, windows: Sequence[Window]) -> EnergyFigure:
        if not windows:
            return missing("the stage never ran")
        if len(self.stamps_ns) < 2:
            return missing(f"CodeCarbon reported nothing: {self.problem}") if self.problem else NO_CODECARBON
        durations = [(end - start) / NS for start, end in windows]
        return total([self._window(window) for window in windows], durations)

    def _window(self, window: Window) -> EnergyFigure:
        start, end = max(window[0], self.stamps_ns[0]), min(window[1], self.stamps_ns[-1])
        if end <= start:
            return missing("CodeCarbon has no reading in this window")
        stamps = np.array(self.stamps_ns, dtype=float)
        at_edges = np.interp([start, end], stamps, self.energy_j)
        # an edge lies somewhere between two readings: at worst all of that step's joules fall on one side of it
        largest_step_j = float(np.max(np.diff(self.energy_j)))
        return EnergyFigure(
            energy_j=float(at_edges[1] - at_edges[0]),
            method="estimated",
            coverage=min(1.0, (end - start) / max(window[1] - window[0], 1)),
            half_width_j=largest_step_j / 2,
            sources=(SOURCE,),
            reason=f"{OWN_FIGURE} ({self.version})" if self.version else OWN_FIGURE,
        )


def load_codecarbon(run_folder: Path, host: str, attempt: int) -> CodecarbonReadings:
    path = readings_path(run_folder, host, attempt)
    if not path.exists():
        return CodecarbonReadings()
    stamps, joules, version, problem = [], [], "", "it wrote no reading"
    for line in read_lines(path):
        if line.get("kind") == "codecarbon":
            stamps.append(int(line["mono_ns"]))
            joules.append(float(line["energy_j"]))
        elif line.get("kind") == "problem":
            problem = str(line["text"])
        version = str(line.get("codecarbon_version", version))
    return CodecarbonReadings(tuple(stamps), tuple(joules), version, problem)
