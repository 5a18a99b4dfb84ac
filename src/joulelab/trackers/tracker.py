"""What a tracker is: another tool that the metrics of a run also go to, while it runs or afterwards.

A tracker is a class with `log` and `end`; it opens its tool when it is made. One file each, and a line in
`lookup.TRACKERS`. What it raises never reaches the run: `live.py` sees to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from joulelab import clock, lookup
from joulelab.errors import DependencyMissing, JoulelabError
from joulelab.meter.trace import read_lines
from joulelab.runs.environment import redact
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord
from joulelab.runs.summary import flat_summary

# Fields of a line of metrics.jsonl that say when and where it was, not what was measured.
_NOT_METRICS = ("step", "attempt", "mono_ns", "stage", "timestamp")
PACKAGES = {
    "tensorboard": ("tensorboard", "joulelab[trackers]"),
    "wandb": ("wandb", "joulelab[trackers]"),
    "mlflow": ("mlflow", "joulelab[trackers]"),
    "trackio": ("trackio", "joulelab[trackio]"),
}
"""Tracker -> the module it needs and where that comes from."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker presents it."""

    run_id: str
    name: str
    label: str
    group: str | None
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    again: bool = False
    """True where a finished run is exported: what an earlier export left is replaced."""

    @property
    def store(self) -> Path:
        """Where databases that hold many runs are kept."""
        return self.folder.absolute().parent

    @property
    def flat_settings(self) -> dict[str, Any]:
        """`training.learning_rate` -> 0.0003; what looks like a secret stays here."""
        return {name: redact("", value) if isinstance(value, str) else value for name, value in _flat(self.settings)}


def _flat(settings: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


@dataclass(frozen=True)
class Point:
    """The metrics of one step of one stage. Steps begin anew with every stage."""

    stage: str
    step: int
    wall_s: float
    values: Mapping[str, float]
    """By full name, as `student.train/loss`."""


def point_of(line: Mapping[str, Any], more: Mapping[str, float] | None = None) -> Point | None:
    """A line of metrics.jsonl; None where it holds no number. `more` are values that belong to no stage."""
    stage = str(line.get("stage", "run"))
    numbers = {
        f"{stage}/{name}": float(value)
        for name, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in _NOT_METRICS
    }
    if not numbers or "step" not in line:
        return None
    wall_s = clock.wall_seconds(str(line["timestamp"])) if "timestamp" in line else 0.0
    return Point(stage, int(line["step"]), wall_s, {**numbers, **(more or {})})


class Tracker(Protocol):
    def log(self, point: Point) -> None: ...

    def end(self, summary: Mapping[str, Any], status: str) -> None:
        """The run is over: its flat summary (numbers, words and nulls), and how it ended."""


def numbers_of(summary: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in summary.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def words_of(summary: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in summary.items() if isinstance(value, str)}


def require_installed(names: tuple[str, ...] | list[str]) -> None:
    """Before a run or an export: what was asked for must be there."""
    for name in names:
        lookup.TRACKERS.require(name)
        package, extra = PACKAGES[name]
        if find_spec(package) is None:
            raise DependencyMissing(f"the tracker '{name}' needs the package {package}", f"pip install '{extra}'")


# A finished run handed to a tracker: its metrics step by step, then its summary, from what lies in the folder.


def export_run(paths: RunPaths, record: RunRecord, to: str) -> int:
    """How many steps were handed over. Raises where the tracker does."""
    run = TrackedRun(
        run_id=record.run_id,
        name=record.name,
        label=record.label,
        group=record.group,
        folder=paths.folder,
        settings=record.spec,
        again=True,
    )
    points = list(points_of(paths))
    opened: Any = lookup.TRACKERS.resolve(to)
    try:
        tracker: Tracker = opened(run)
        for point in points:
            tracker.log(point)
        tracker.end(flat_summary(record), record.status)
    except Exception as error:
        raise JoulelabError(
            f"{to} did not take {record.run_id}: {type(error).__name__}: {error}", "the run's folder is unharmed"
        ) from error
    return len(points)


def points_of(paths: RunPaths) -> Iterator[Point]:
    """The metrics in the order of time; where a step was done twice, the later attempt's."""
    latest: dict[tuple[str, int], Point] = {}
    for line in read_lines(paths.metrics) if paths.metrics.exists() else ():
        point = point_of(line)
        if point is not None:
            before = latest.pop((point.stage, point.step), None)
            values = {**before.values, **point.values} if before else point.values
            latest[point.stage, point.step] = Point(point.stage, point.step, point.wall_s, values)
    yield from latest.values()
