"""Experiment trackers: MLflow, TensorBoard, Trackio and Weights & Biases.

Each class imports its library when it is constructed. By default a tracker writes below the store, without a server:
MLflow into `mlflow.db` (`mlflow ui --backend-store-uri sqlite:///runs/mlflow.db` shows it) unless MLFLOW_TRACKING_URI
names another server.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from joulelab.runs.paths import slug
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
        params = [
            self._entities.Param(_mlflow_metric_name(name), str(value)[:_MAX_CHARACTERS]) for name, value in settings
        ]
        for begin in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(created.info.run_id, params=params[begin : begin + _MAX_PARAMS])
        return str(created.info.run_id)

    def log(self, point: Point) -> None:
        self._log(point.values, point.step, point.wall_s)

    def _log(self, values: Mapping[str, float], step: int, wall_s: float) -> None:
        metrics = [
            self._entities.Metric(_mlflow_metric_name(name), value, round(1000 * wall_s), step)
            for name, value in values.items()
        ]
        for begin in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _MAX_METRICS])

    def end(self, summary: Mapping[str, Any], status: str) -> None:
        self._log(numbers_of(summary), 0, time.time())
        for name, value in summary.items():
            if isinstance(value, str):
                self._client.set_tag(self._id, f"joulelab.{_mlflow_metric_name(name)}", value)
        self._client.set_terminated(self._id, _STATUS.get(status, "FAILED"))


def _mlflow_metric_name(name: str) -> str:
    """MLflow allows letters, digits, `_`, `-`, `.`, `/` and spaces."""
    return re.sub(r"[^\w\-./ ]", "_", name)[:250]


# TensorBoard: scalars as event files in `tensorboard/` of the run folder. Needs neither torch nor TensorFlow.


TENSORBOARD_FOLDER = "tensorboard"


class TensorBoardTracker:
    def __init__(self, run: TrackedRun) -> None:
        writer: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        folder = run.folder / TENSORBOARD_FOLDER
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


# trackio: a local SQLite database in `trackio/` of the store, unless TRACKIO_DIR names another directory.
#
# `TRACKIO_DIR=runs/trackio trackio show` opens it. Its GPU and CPU sampling is off: the meter records both.


TRACKIO_FOLDER = "trackio"


class TrackioTracker:
    def __init__(self, run: TrackedRun) -> None:
        # trackio reads the variable on import
        os.environ.setdefault("TRACKIO_DIR", str(run.store / TRACKIO_FOLDER))
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


# Weights & Biases, by the settings `trackers.wandb`, else by the user's login and the variables of W&B.
#
# Without a login it is offline: files in `wandb/` of the run folder, which `wandb sync RUN/wandb/offline-run-*` uploads
# later. W&B's system metrics, console capture and git state are
# off: they use energy that would be measured, and the record has the same data.


PROJECT = "joulelab"


class WandbTracker:
    def __init__(self, run: TrackedRun) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._stages: set[str] = set()
        chosen = run.settings.get("wandb") or {}
        self._run: Any = wandb.init(
            project=chosen.get("project") or os.environ.get("WANDB_PROJECT", PROJECT),
            entity=chosen.get("entity"),  # None: W&B reads WANDB_ENTITY, else takes the default of the login
            id=re.sub(r"[^A-Za-z0-9_-]", "-", run.run_id)[-64:],
            name=chosen.get("name") or run.run_id,
            group=run.group,
            tags=[run.label[:64]] if run.label else None,
            config=run.flat_settings,
            dir=str(run.folder),
            mode=chosen.get("mode") or os.environ.get("WANDB_MODE") or _wandb_mode(wandb),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(
                silent=True, console="off", save_code=False, disable_git=True, disable_code=True, x_disable_stats=True
            ),
        )

    def log(self, point: Point) -> None:
        """W&B's step must increase, and steps restart with every stage: each stage gets its own step metric."""
        stage = _wandb_metric_name(point.stage)
        if stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self._run.log(
            {**{_wandb_metric_name(name): value for name, value in point.values.items()}, f"{stage}/step": point.step}
        )

    def end(self, summary: Mapping[str, Any], status: str) -> None:
        self._run.summary.update({name: value for name, value in summary.items() if value is not None})
        self._run.finish(exit_code=0 if status == "done" else 1)


def _wandb_mode(wandb: Any) -> str:
    """Online if the user has logged in on this machine. Without a login, W&B would ask for one and block the run."""
    return "online" if getattr(getattr(wandb, "api", None), "api_key", None) else "offline"


def _wandb_metric_name(name: str) -> str:
    """W&B reads a dot as access to a nested value, and would not find a step metric with such a name."""
    return name.replace(".", "/")
