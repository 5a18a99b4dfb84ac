"""Runs that wait for a job, and what they are told when it will never come."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from joulelab.cluster.jobs_file import FOLDER, read_jobs
from joulelab.runs.json_file import read_json, write_json
from joulelab.runs.lock import FolderLocked, holding
from joulelab.runs.paths import GROUPS_FOLDER, RunPaths
from joulelab.runs.record import ErrorRecord, RunRecord, Status

_HOME = "home.json"


def home_of(folder: Path) -> Path:
    """Where a run's jobs are written down: in its group or in the run it works for where it was submitted with one,
    else in its own folder."""
    if read_jobs(folder) is not None or not RunPaths(folder).record.exists():
        return folder
    if (folder / FOLDER / _HOME).exists():
        return folder.absolute().parent / str(read_json(folder / FOLDER / _HOME)["home"])
    group = read_json(RunPaths(folder).record).get("group")
    return folder.absolute().parent / GROUPS_FOLDER / str(group) if group else folder


def write_home(folder: Path, home: Path) -> None:
    """A run that does a share of the work for others names the run or group that it was submitted with."""
    write_json(folder / FOLDER / _HOME, {"home": os.path.relpath(home.absolute(), folder.absolute().parent)})


def tell_waiting(folder: Path, why: str) -> None:
    """This job failed: Slurm cancels those that wait for it, and their runs say why they never began."""
    job_id = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID")
    jobs = read_jobs(home_of(folder))
    job = next((job for job in jobs.jobs if job.job_id == job_id), None) if jobs else None
    if job is None or jobs is None:
        return
    waiting = [run for later in jobs.after(job.key) for run in later.runs]
    store = folder.absolute().parent
    close_queued((store / run for run in waiting), "failed", f"not started: job {job.key} failed ({why})")


def close_queued(folders: Iterable[Path], status: Status, message: str) -> list[str]:
    """Runs that are still queued, now with the reason why they will not run; their ids."""
    closed = []
    for folder in folders:
        paths = RunPaths(folder)
        if not paths.record.exists():
            continue
        with suppress(FolderLocked), holding(folder):  # a locked one has just begun
            record = RunRecord.model_validate(read_json(paths.record))
            if record.status == "queued":
                error = ErrorRecord(kind="NotStarted", message=message, hint=f"joulelab submit --resume {paths.run_id}")
                write_json(paths.record, record.model_copy(update={"status": status, "error": error}))
                closed.append(record.run_id)
    return closed
