"""A finished run handed to a tracker: its metrics step by step, then its summary, from what lies in the folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from joulelab import lookup
from joulelab.errors import JoulelabError
from joulelab.meter.trace import read_lines
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord
from joulelab.runs.summary import flat_summary
from joulelab.trackers.tracker import Point, TrackedRun, Tracker, point_of


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
