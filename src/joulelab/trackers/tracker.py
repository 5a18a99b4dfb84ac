"""Experiment trackers: other tools that receive the metrics of a run, live or by export after it has ended.

A tracker is a class with `log` and `end`, whose constructor opens its tool: one file each, and a line in
`lookup.TRACKERS`. Its exceptions never reach a live run: `LiveTrackers` catches them.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from joulelab import clock, lookup
from joulelab.errors import JoulelabError
from joulelab.meter.monitor.tally import LiveEnergy
from joulelab.redaction import redact
from joulelab.runs.paths import RunPaths, read_metrics
from joulelab.runs.record import RunRecord, flat_summary
from joulelab.runs.spec import RunSpec

# Fields of a line of metrics.jsonl that identify the line and are not metrics.
_NOT_METRICS = ("step", "attempt", "mono_ns", "stage", "timestamp")


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
        return {name: redact(name, value) if isinstance(value, str) else value for name, value in _flat(self.settings)}


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
        if lookup.TRACKERS.origin(name) is None:  # a plugin's package requires what its tracker needs
            lookup.require_packages(f"the tracker {name}", name)  # each has the name of its package


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
    for line in read_metrics(paths.metrics):
        point = point_of(line)
        if point is not None:
            earlier = latest.pop((point.stage, point.step), None)
            values = {**earlier.values, **point.values} if earlier else point.values
            latest[point.stage, point.step] = Point(point.stage, point.step, point.wall_s, values)
    yield from latest.values()


# Trackers during a run: each one has its own thread, so that a slow or failing tracker does not affect the run.
#
# A tracker that raises is reported once and receives nothing more; one that hangs is abandoned at the end. Both
# become warnings of the run.


START_S, END_S = 30.0, 30.0
_QUEUE_LINES = 100_000
_ENERGY_INTERVAL_S = 1.0
_FAILED = object()


class LiveTrackers:
    """All trackers of one attempt."""

    def __init__(self, names: Sequence[str], run: TrackedRun, trace: Path) -> None:
        self._energy = LiveEnergy(trace)
        self._energy_due_s = 0.0
        self._problems: list[str] = []
        with contextlib.redirect_stdout(sys.stderr):  # some print a banner; stdout is for results
            self._feeds = [_Feed(name, run, self._problems.append) for name in names]
            _wait(self._feeds, START_S, lambda feed: feed.ready.is_set())

    def log(self, line: Mapping[str, Any]) -> None:
        point = point_of(line, self._energy_so_far())
        for feed in self._feeds if point is not None else ():
            feed.put(point)

    def _energy_so_far(self) -> dict[str, float]:
        """At most once a second. An estimate has its own name and is never added to a measurement."""
        if time.monotonic() < self._energy_due_s:
            return {}
        self._energy_due_s = time.monotonic() + _ENERGY_INTERVAL_S
        measured = self._energy.read()
        if measured is not None:
            return {"energy/joules_so_far": measured}
        estimated = self._energy.read(estimates=True)
        return {} if estimated is None else {"energy/joules_so_far_estimated": estimated}

    def problems(self) -> list[str]:
        """Problems since the previous call."""
        problems, self._problems[:] = list(self._problems), []
        return problems

    def end(self, record: RunRecord) -> None:
        """Pass on the summary and wait up to `END_S` for the trackers to finish."""
        with contextlib.redirect_stdout(sys.stderr):
            for feed in self._feeds:
                feed.put((flat_summary(record), record.status))
            _wait(self._feeds, END_S, lambda feed: not feed.is_alive())
        for feed in self._feeds:
            if feed.is_alive():
                self._problems.append(f"tracker {feed.name} did not finish within {END_S:g} s and was abandoned")


def start(paths: RunPaths, spec: RunSpec, group: str | None, trace: Path) -> LiveTrackers:
    run = TrackedRun(
        run_id=paths.run_id,
        name=spec.name,
        label=spec.label or spec.name,
        group=group,
        folder=paths.folder,
        settings=spec.model_dump(mode="json"),
    )
    return LiveTrackers(spec.trackers, run, trace)


def _wait(feeds: Sequence[_Feed], timeout_s: float, done: Any) -> None:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s and not all(done(feed) for feed in feeds):
        time.sleep(0.01)


class _Feed(threading.Thread):
    """One tracker, in a daemon thread."""

    def __init__(self, name: str, run: TrackedRun, report: Any) -> None:
        super().__init__(name=name, daemon=True)
        self.ready = threading.Event()
        self._tracked = run
        self._report = report
        self._queue: queue.Queue[Any] = queue.Queue(_QUEUE_LINES)
        self._dropped = 0
        self.start()

    def put(self, item: Any) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._dropped += 1

    def run(self) -> None:
        tracker = self._try("did not start", lambda: lookup.TRACKERS.resolve(self.name)(self._tracked))
        self.ready.set()
        working = tracker is not _FAILED
        while isinstance(item := self._queue.get(), Point):
            working = working and self._try("stopped accepting metrics", tracker.log, item) is not _FAILED
        if tracker is not _FAILED:
            self._try("did not end cleanly", tracker.end, *item)
        if self._dropped:
            self._report(f"tracker {self.name} was too slow: {self._dropped} lines were dropped")

    def _try(self, failure: str, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except BaseException as error:  # a library's SystemExit must not end the thread silently
            self._report(f"tracker {self.name} {failure}: {type(error).__name__}: {error}")
            return _FAILED
