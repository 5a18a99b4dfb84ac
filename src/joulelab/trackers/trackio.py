"""trackio: a local SQLite database under `trackio/` of the store, unless TRACKIO_DIR names another place.

`TRACKIO_DIR=runs/trackio trackio show` shows it. Its own sampling of GPU and CPU is off: the meter does that.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from joulelab.runs.paths import slug
from joulelab.trackers.tracker import Point, TrackedRun

FOLDER = "trackio"


class TrackioTracker:
    def __init__(self, run: TrackedRun) -> None:
        # it reads the variable once, when it is imported
        os.environ.setdefault("TRACKIO_DIR", str(run.store / FOLDER))
        self._trackio: Any = importlib.import_module("trackio")
        if run.again:
            self._forget(slug(run.name), run.run_id)
        self._run: Any = self._trackio.init(
            project=slug(run.name),
            name=run.run_id,
            group=run.group,
            config=run.flat_settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    @staticmethod
    def _forget(project: str, name: str) -> None:
        """What an earlier export left; trackio would add the same steps to it once more."""
        with suppress(Exception):  # no project yet, or a version that keeps runs in another way
            storage: Any = importlib.import_module("trackio.sqlite_storage")
            storage.SQLiteStorage.delete_run(project, name)

    def log(self, point: Point) -> None:
        """Its own step only grows, and steps begin anew with every stage: the stage's step goes along as a value."""
        self._run.log({**point.values, f"{point.stage}/step": point.step})

    def end(self, summary: Mapping[str, Any], status: str) -> None:
        told = {f"summary/{name}": value for name, value in summary.items() if value is not None}
        self._run.log({**told, "summary/status": status})
        self._trackio.finish()
