"""`joulelab export`: finished runs for W&B, MLflow, TensorBoard or trackio."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from joulelab.cli.options import RunsDir, SeveralRuns
from joulelab.errors import UsageError


def export(
    names: SeveralRuns,
    to: Annotated[str, typer.Option("--to", metavar="TRACKER", help="tensorboard, wandb, mlflow or trackio.")],
    runs_dir: RunsDir = None,
) -> None:
    """Hand finished runs to another tracker: metrics by step, settings, and the summary with the joules.

    tensorboard and wandb (offline) write into the run's folder, mlflow and trackio into a database in the store. To
    have a tracker fed while a run runs: joulelab run NAME trackers=[tensorboard]

    Examples:

      joulelab export last --to tensorboard && tensorboard --logdir runs

      joulelab export 'demo-kd-*' --to wandb

      joulelab export last --to mlflow && mlflow ui --backend-store-uri sqlite:///runs/mlflow.db
    """
    from contextlib import redirect_stdout

    from joulelab.runs.paths import RunPaths
    from joulelab.runs.selection import run_folders_of
    from joulelab.runs.store import load_record, store_root
    from joulelab.trackers.export import export_run
    from joulelab.trackers.tracker import require_installed

    require_installed([to])
    found = [(folder, load_record(folder)) for folder in run_folders_of(store_root(runs_dir), names)]
    for folder, record in found:
        if record.status in ("queued", "running"):
            raise UsageError(
                f"{folder.name} has not ended: it is {record.status}",
                f"wait for its end; to feed {to} meanwhile: joulelab run ... trackers=[{to}]",
            )
    for folder, record in found:
        with redirect_stdout(sys.stderr):  # trackers greet
            steps = export_run(RunPaths(folder), record, to)
        print(f"{folder.name}: {steps} {'step' if steps == 1 else 'steps'} and its summary are in {to}")
