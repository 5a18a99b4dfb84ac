"""Experiment trackers: other tools that receive the metrics of a run, live or by export after it has ended.

A tracker is a class with `log` and `end`, whose constructor opens its tool: one file each, and a line in
`lookup.TRACKERS`. Its exceptions never reach a live run: `live.py` catches them.
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
from joulelab.runs.record import RunRecord, flat_summary

# Fields of a line of metrics.jsonl that identify the line and are not metrics.
_NOT_METRICS = ("step", "attempt", "mono_ns", "stage", "timestamp")
PACKAGES = {
    "tensorboard": ("tensorboard", "joulelab[trackers]"),
    "wandb": ("wandb", "joulelab[trackers]"),
    "mlflow": ("mlflow", "joulelab[trackers]"),
    "trackio": ("trackio", "joulelab[trackio]"),
}
"""Tracker -> the module that it needs, and the extra that installs it."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker presents it."""

    run_id: str
    name: str
    label: str
    group: str | None
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_export: bool = False
    """Whether a finished run is exported: an earlier export is replaced."""

    @property
    def store(self) -> Path:
        """Directory of databases that hold many runs."""
        return self.folder.absolute().parent

    @property
    def flat_settings(self) -> dict[str, Any]:
        """`training.learning_rate` -> 0.0003; values that look like secrets are redacted."""
        return {name: redact("", value) if isinstance(value, str) else value for name, value in _flat(self.settings)}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


@dataclass(frozen=True)
class Point:
    """The metrics of one step of one stage. Every stage counts its steps from the beginning."""

    stage: str
    step: int
    wall_s: float
    values: Mapping[str, float]
    """By full name, e.g. `student.train/loss`."""


def point_of(line: Mapping[str, Any], extra: Mapping[str, float] | None = None) -> Point | None:
    """The point of a line of metrics.jsonl; None if it has no number. `extra` are values that belong to no stage."""
    stage = str(line.get("stage", "run"))
    numbers = {
        f"{stage}/{name}": float(value)
        for name, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in _NOT_METRICS
    }
    if not numbers or "step" not in line:
        return None
    wall_s = clock.wall_seconds(str(line["timestamp"])) if "timestamp" in line else 0.0
    return Point(stage, int(line["step"]), wall_s, {**numbers, **(extra or {})})


class Tracker(Protocol):
    def log(self, point: Point) -> None: ...

    def end(self, summary: Mapping[str, Any], status: str) -> None:
        """Receive the flat summary (numbers, strings and nulls) and the final status of the run."""


def numbers_of(summary: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in summary.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def require_installed(names: tuple[str, ...] | list[str]) -> None:
    """Before a run or an export: refuse unknown trackers and missing packages."""
    for name in names:
        lookup.TRACKERS.require(name)
        package, extra = PACKAGES[name]
        if find_spec(package) is None:
            raise DependencyMissing(f"tracker '{name}' requires the package {package}", f"pip install '{extra}'")


def export_run(paths: RunPaths, record: RunRecord, to: str) -> int:
    """Export a finished run: its metrics step by step, then its summary. Returns the number of steps.

    Unlike in a live run, an exception of the tracker is an error.
    """
    run = TrackedRun(
        run_id=record.run_id,
        name=record.name,
        label=record.label,
        group=record.group,
        folder=paths.folder,
        settings=record.spec,
        is_export=True,
    )
    points = list(points_of(paths))
    tracker_class: Any = lookup.TRACKERS.resolve(to)
    try:
        tracker: Tracker = tracker_class(run)
        for point in points:
            tracker.log(point)
        tracker.end(flat_summary(record), record.status)
    except Exception as error:
        raise JoulelabError(
            f"export of {record.run_id} to {to} failed: {type(error).__name__}: {error}", "the run itself is unchanged"
        ) from error
    return len(points)


def points_of(paths: RunPaths) -> Iterator[Point]:
    """The metrics in order of time; a step that was repeated has the values of the later attempt."""
    latest: dict[tuple[str, int], Point] = {}
    for line in read_lines(paths.metrics) if paths.metrics.exists() else ():
        point = point_of(line)
        if point is not None:
            earlier = latest.pop((point.stage, point.step), None)
            values = {**earlier.values, **point.values} if earlier else point.values
            latest[point.stage, point.step] = Point(point.stage, point.step, point.wall_s, values)
    yield from latest.values()
