"""Trackers during a run: each one has its own thread, so that a slow or failing tracker does not affect the run.

A tracker that raises is reported once and receives nothing more; one that hangs is abandoned at the end. Both become
warnings of the run.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from joulelab import lookup
from joulelab.meter.monitor.tally import LiveEnergy
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord, flat_summary
from joulelab.runs.spec import RunSpec
from joulelab.trackers.tracker import Point, TrackedRun, point_of

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
