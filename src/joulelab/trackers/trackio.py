"""trackio: a local SQLite database in `trackio/` of the store, unless TRACKIO_DIR names another directory.

`TRACKIO_DIR=runs/trackio trackio show` opens it. Its GPU and CPU sampling is off: the meter records both.
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
        # trackio reads the variable on import
        os.environ.setdefault("TRACKIO_DIR", str(run.store / FOLDER))
        self._trackio: Any = importlib.import_module("trackio")
        if run.is_export:
            self._delete(slug(run.name), run.run_id)
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
    def _delete(project: str, name: str) -> None:
        """Delete an earlier export; trackio would append the same steps to it."""
        with suppress(Exception):  # no such project, or a version with another storage layout
            storage: Any = importlib.import_module("trackio.sqlite_storage")
            storage.SQLiteStorage.delete_run(project, name)

    def log(self, point: Point) -> None:
        """trackio's step must increase, and steps restart with every stage: the stage's step is logged as a value."""
        self._run.log({**point.values, f"{point.stage}/step": point.step})

    def end(self, summary: Mapping[str, Any], status: str) -> None:
        values = {f"summary/{name}": value for name, value in summary.items() if value is not None}
        self._run.log({**values, "summary/status": status})
        self._trackio.finish()
