"""TensorBoard: scalars as event files in `tensorboard/` of the run folder. Needs neither torch nor TensorFlow."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

from joulelab.trackers.tracker import Point, TrackedRun, numbers_of

FOLDER = "tensorboard"


class TensorBoardTracker:
    def __init__(self, run: TrackedRun) -> None:
        writer: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        folder = run.folder / FOLDER
        if run.is_export:
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
        self._writer = writer.EventFileWriter(str(folder))

    def log(self, point: Point) -> None:
        self._write(point.values, point.step, point.wall_s)

    def _write(self, values: Mapping[str, float], step: int, wall_s: float) -> None:
        scalars = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = self._summaries.Summary(value=scalars)
        self._writer.add_event(self._events.Event(wall_time=wall_s, step=step, summary=summary))

    def end(self, summary: Mapping[str, Any], status: str) -> None:
        self._write({f"summary/{name}": value for name, value in numbers_of(summary).items()}, 0, time.time())
        self._writer.close()
