"""How busy the machine was during a stage, by the trace's own readings of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joulelab.meter.trace import read_lines
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import StageRecord


@dataclass(frozen=True)
class Utilisation:
    gpu_percent: float | None
    """Share of the time in which some kernel ran, mean over the cards; it says nothing of how full the card was."""
    cpu_percent: float | None
    """Of all hardware threads of the host."""


def utilisation(folder: Path, stage: StageRecord) -> Utilisation:
    found: dict[str, list[float]] = {"gpu": [], "host": []}
    for host, attempt, path in RunPaths(folder).traces():
        windows = [(s.start_ns, s.end_ns) for s in stage.segments if (s.host, s.attempt) == (host, attempt)]
        for line in read_lines(path) if windows else ():
            value = _percent(line)
            if value is not None and any(start <= line["mono_ns"] <= end for start, end in windows):
                found[line["kind"]].append(value)
    return Utilisation(_mean(found["gpu"]), _mean(found["host"]))


def _percent(line: dict[str, Any]) -> float | None:
    names = {"gpu": "gpu_utilization_percent", "host": "cpu_utilization_percent"}
    return line.get(names.get(str(line.get("kind")), ""))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
