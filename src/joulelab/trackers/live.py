"""Trackers beside a run: fed from threads of their own, so that neither their slowness nor their failure is the run's.

A tracker that raises is told once and gets nothing more; one that hangs is left behind at the end. Either becomes a
warning of the run, and the run goes on.
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
from joulelab.runs.record import RunRecord
from joulelab.runs.spec import RunSpec
from joulelab.runs.summary import flat_summary
from joulelab.trackers.tracker import Point, TrackedRun, point_of

START_S, END_S = 30.0, 30.0
_MOST_WAITING = 100_000
_JOULES_EVERY_S = 1.0
_FAILED = object()


class LiveTrackers:
    """All trackers of one attempt."""

    def __init__(self, names: Sequence[str], run: TrackedRun, trace: Path) -> None:
        self._joules = LiveEnergy(trace)
        self._joules_due_s = 0.0
        self._told: list[str] = []
        with contextlib.redirect_stdout(sys.stderr):  # some greet; results alone go to stdout
            self._feeds = [_Feed(name, run, self._told.append) for name in names]
            _wait(self._feeds, START_S, lambda feed: feed.ready.is_set())

    def log(self, line: Mapping[str, Any]) -> None:
        point = point_of(line, self._joules_so_far())
        for feed in self._feeds if point is not None else ():
            feed.put(point)

    def _joules_so_far(self) -> dict[str, float]:
        """At most once a second; an estimate under its own name, and never added to what was measured."""
        if time.monotonic() < self._joules_due_s:
            return {}
        self._joules_due_s = time.monotonic() + _JOULES_EVERY_S
        measured = self._joules.read()
        if measured is not None:
            return {"energy/joules_so_far": measured}
        estimated = self._joules.read(estimates=True)
        return {} if estimated is None else {"energy/joules_so_far_estimated": estimated}

    def problems(self) -> list[str]:
        """What has gone wrong since the last time somebody asked."""
        told, self._told[:] = list(self._told), []
        return told

    def end(self, record: RunRecord) -> None:
        """Hand the summary over and wait, for a while."""
        with contextlib.redirect_stdout(sys.stderr):
            for feed in self._feeds:
                feed.put((flat_summary(record), record.status))
            _wait(self._feeds, END_S, lambda feed: not feed.is_alive())
        for feed in self._feeds:
            if feed.is_alive():
                self._told.append(f"the tracker {feed.name} had not finished after {END_S:g} s and was left behind")


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


def _wait(feeds: Sequence[_Feed], patience_s: float, done: Any) -> None:
    end_s = time.monotonic() + patience_s
    while time.monotonic() < end_s and not all(done(feed) for feed in feeds):
        time.sleep(0.01)


class _Feed(threading.Thread):
    """One tracker, in a thread that the end of the program does not wait for."""

    def __init__(self, name: str, run: TrackedRun, tell: Any) -> None:
        super().__init__(name=name, daemon=True)
        self.ready = threading.Event()
        self._tracked = run
        self._tell = tell
        self._waiting: queue.Queue[Any] = queue.Queue(_MOST_WAITING)
        self._lost = 0
        self.start()

    def put(self, item: Any) -> None:
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self._lost += 1

    def run(self) -> None:
        tracker = self._try("did not start", lambda: lookup.TRACKERS.resolve(self.name)(self._tracked))
        self.ready.set()
        listening = tracker is not _FAILED
        while isinstance(item := self._waiting.get(), Point):
            listening = listening and self._try("took no more metrics", tracker.log, item) is not _FAILED
        if tracker is not _FAILED:
            self._try("did not end cleanly", tracker.end, *item)
        if self._lost:
            self._tell(f"the tracker {self.name} was too slow: {self._lost} lines did not reach it")

    def _try(self, what: str, call: Any, *given: Any) -> Any:
        try:
            return call(*given)
        except BaseException as error:  # a library's SystemExit must not pass for an end of ours
            self._tell(f"the tracker {self.name} {what}: {type(error).__name__}: {error}")
            return _FAILED
