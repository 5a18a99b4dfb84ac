"""MLflow: one SQLite database for the whole store (`mlflow.db`), unless MLFLOW_TRACKING_URI names another place.

`mlflow ui --backend-store-uri sqlite:///runs/mlflow.db` shows it.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from joulelab.trackers.tracker import Point, TrackedRun, numbers_of, words_of

DATABASE = "mlflow.db"
_RUN_ID = "joulelab.run_id"
_ENDED = {"done": "FINISHED", "failed": "FAILED", "truncated": "KILLED"}
# What MLflow accepts at a time, and how long a value may be.
_MOST_AT_ONCE, _MOST_PARAMS, _LONGEST = 1000, 100, 6000


class MlflowTracker:
    def __init__(self, run: TrackedRun) -> None:
        for name in ("alembic", "mlflow"):  # they tell of every table they make
            logging.getLogger(name).setLevel(logging.ERROR)
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        place = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run.store / DATABASE}")
        self._client = mlflow.MlflowClient(tracking_uri=place)
        self._id = self._find(run) or self._make(run)

    def _experiment(self, run: TrackedRun) -> str:
        found = self._client.get_experiment_by_name(run.name)
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(run.name, (run.store / "mlflow-artifacts").as_uri()))

    def _find(self, run: TrackedRun) -> str | None:
        """The run that an earlier attempt or export has made: joules of both belong together."""
        quoted = run.run_id.replace("'", "")
        found = self._client.search_runs([self._experiment(run)], f"tags.`{_RUN_ID}` = '{quoted}'", max_results=1)
        return str(found[0].info.run_id) if found else None

    def _make(self, run: TrackedRun) -> str:
        tags = {_RUN_ID: run.run_id, "joulelab.label": run.label, "joulelab.group": run.group or ""}
        made = self._client.create_run(self._experiment(run), tags=tags, run_name=run.run_id)
        params = [self._entities.Param(_name(name), str(value)[:_LONGEST]) for name, value in run.flat_settings.items()]
        for begin in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(made.info.run_id, params=params[begin : begin + _MOST_PARAMS])
        return str(made.info.run_id)

    def log(self, point: Point) -> None:
        self._log(point.values, point.step, point.wall_s)

    def _log(self, values: Mapping[str, float], step: int, wall_s: float) -> None:
        metrics = [
            self._entities.Metric(_name(name), value, round(1000 * wall_s), step) for name, value in values.items()
        ]
        for begin in range(0, len(metrics), _MOST_AT_ONCE):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _MOST_AT_ONCE])

    def end(self, summary: Mapping[str, Any], status: str) -> None:
        self._log(numbers_of(summary), 0, time.time())
        for name, word in words_of(summary).items():
            self._client.set_tag(self._id, f"joulelab.{_name(name)}", word)
        self._client.set_terminated(self._id, _ENDED.get(status, "FAILED"))


def _name(name: str) -> str:
    """MLflow takes letters, digits, `_`, `-`, `.`, `/` and blanks."""
    return re.sub(r"[^\w\-./ ]", "_", name)[:250]
