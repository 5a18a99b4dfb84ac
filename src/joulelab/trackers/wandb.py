"""Weights & Biases, offline unless WANDB_MODE says otherwise: files in `wandb/` of the run folder.

`wandb sync RUN/wandb/offline-run-*` uploads them later. W&B's system metrics, console capture and git state are off:
they use energy that would be measured, and the record has the same data.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from typing import Any

from joulelab.trackers.tracker import Point, TrackedRun

PROJECT = "joulelab"


class WandbTracker:
    def __init__(self, run: TrackedRun) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._stages: set[str] = set()
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=re.sub(r"[^A-Za-z0-9_-]", "-", run.run_id)[-64:],
            name=run.run_id,
            group=run.group,
            tags=[run.label[:64]] if run.label else None,
            config=run.flat_settings,
            dir=str(run.folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(
                silent=True, console="off", save_code=False, disable_git=True, disable_code=True, x_disable_stats=True
            ),
        )

    def log(self, point: Point) -> None:
        """W&B's step must increase, and steps restart with every stage: each stage gets its own step metric."""
        stage = _name(point.stage)
        if stage not in self._stages:
            self._stages.add(stage)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self._run.log({**{_name(name): value for name, value in point.values.items()}, f"{stage}/step": point.step})

    def end(self, summary: Mapping[str, Any], status: str) -> None:
        self._run.summary.update({name: value for name, value in summary.items() if value is not None})
        self._run.finish(exit_code=0 if status == "done" else 1)


def _name(name: str) -> str:
    """W&B reads a dot as access to a nested value, and would not find a step metric with such a name."""
    return name.replace(".", "/")
