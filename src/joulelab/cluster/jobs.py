"""Which jobs a run or group was given to, kept in its folder: `slurm/jobs.json`, with scripts and logs beside it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from joulelab.errors import JoulelabError, NotFoundError
from joulelab.meter.figures import Frozen
from joulelab.runs.lock import FolderLocked, holding
from joulelab.runs.paths import GROUPS_FOLDER, RunPaths
from joulelab.runs.record import ErrorRecord, RunRecord, Status
from joulelab.runs.storage import read_json, write_json

FOLDER, FILE = "slurm", "jobs.json"


class SubmittedJob(Frozen):
    key: str
    about: str
    job_id: str
    script: str
    runs: tuple[str, ...] = ()
    """Ids of the runs it works on, one per task of an array."""
    array: bool = False
    after: str | None = None
    """Key of the job that must end well before it."""
    submitted_at: str


class JobsFile(Frozen):
    schema_version: int = 1
    jobs: tuple[SubmittedJob, ...] = ()
    cancelled_at: str | None = None
    max_restarts: int = 0
    """How often a job may go back to the queue; 0: never."""

    def after(self, key: str) -> list[SubmittedJob]:
        """The jobs that wait for this one, directly or not."""
        waiting, keys = [], {key}
        for job in self.jobs:
            if job.after in keys:
                waiting.append(job)
                keys.add(job.key)
        return waiting


def jobs_path(folder: Path) -> Path:
    return folder / FOLDER / FILE


def read_jobs(folder: Path) -> JobsFile | None:
    """None where the folder was never submitted."""
    path = jobs_path(folder)
    if not path.exists():
        return None
    try:
        return JobsFile.model_validate(read_json(path))
    except ValidationError as error:
        raise JoulelabError(
            f"{path} does not fit this version of joulelab: {error.error_count()} fields differ"
        ) from None


def write_jobs(folder: Path, jobs: JobsFile) -> None:
    write_json(jobs_path(folder), jobs)


def folder_of_job(store: Path, job_id: str) -> Path:
    """The run or group that was submitted as this job; `123` and `123_4` both find it."""
    number = job_id.partition("_")[0]
    for path in (*store.glob(f"*/{FOLDER}/{FILE}"), *store.glob(f"{GROUPS_FOLDER}/*/{FOLDER}/{FILE}")):
        jobs = read_jobs(path.parent.parent)
        if jobs is not None and any(job.job_id == number for job in jobs.jobs):
            return path.parent.parent
    raise NotFoundError(
        f"no run under {store.absolute()} was submitted as job {job_id}",
        "--runs-dir or JOULELAB_RUNS names another store",
    )


# Runs that wait for a job, and what they are told when it will never come.


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
