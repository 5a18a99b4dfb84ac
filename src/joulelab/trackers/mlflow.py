"""MLflow: one SQLite database for the whole store (`mlflow.db`), unless MLFLOW_TRACKING_URI names another server.

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

from joulelab.trackers.tracker import Point, TrackedRun, numbers_of

DATABASE = "mlflow.db"
_RUN_ID = "joulelab.run_id"
_STATUS = {"done": "FINISHED", "failed": "FAILED", "truncated": "KILLED"}
# Limits of MLflow: metrics and parameters per call, characters per value.
_MAX_METRICS, _MAX_PARAMS, _MAX_CHARACTERS = 1000, 100, 6000


class MlflowTracker:
    def __init__(self, run: TrackedRun) -> None:
        for name in ("alembic", "mlflow"):  # they log every table that they create
            logging.getLogger(name).setLevel(logging.ERROR)
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{run.store / DATABASE}")
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._id = self._find(run) or self._create(run)

    def _experiment(self, run: TrackedRun) -> str:
        experiment = self._client.get_experiment_by_name(run.name)
        if experiment is not None:
            return str(experiment.experiment_id)
        return str(self._client.create_experiment(run.name, (run.store / "mlflow-artifacts").as_uri()))

    def _find(self, run: TrackedRun) -> str | None:
        """The MLflow run of an earlier attempt or export of the same run."""
        quoted = run.run_id.replace("'", "")
        matches = self._client.search_runs([self._experiment(run)], f"tags.`{_RUN_ID}` = '{quoted}'", max_results=1)
        return str(matches[0].info.run_id) if matches else None

    def _create(self, run: TrackedRun) -> str:
        tags = {_RUN_ID: run.run_id, "joulelab.label": run.label, "joulelab.group": run.group or ""}
        created = self._client.create_run(self._experiment(run), tags=tags, run_name=run.run_id)
        settings = run.flat_settings.items()
        params = [self._entities.Param(_name(name), str(value)[:_MAX_CHARACTERS]) for name, value in settings]
        for begin in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(created.info.run_id, params=params[begin : begin + _MAX_PARAMS])
        return str(created.info.run_id)

    def log(self, point: Point) -> None:
        self._log(point.values, point.step, point.wall_s)

    def _log(self, values: Mapping[str, float], step: int, wall_s: float) -> None:
        metrics = [
            self._entities.Metric(_name(name), value, round(1000 * wall_s), step) for name, value in values.items()
        ]
        for begin in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _MAX_METRICS])

    def end(self, summary: Mapping[str, Any], status: str) -> None:
        self._log(numbers_of(summary), 0, time.time())
        for name, value in summary.items():
            if isinstance(value, str):
                self._client.set_tag(self._id, f"joulelab.{_name(name)}", value)
        self._client.set_terminated(self._id, _STATUS.get(status, "FAILED"))


def _name(name: str) -> str:
    """MLflow allows letters, digits, `_`, `-`, `.`, `/` and spaces."""
    return re.sub(r"[^\w\-./ ]", "_", name)[:250]
