"""The submitted jobs of a run or group, stored in its directory as `slurm/jobs.json`, with scripts and logs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from joulelab.errors import JoulelabError, NotFoundError
from joulelab.meter.figures import Frozen
from joulelab.runs.lock import FolderLocked, holding
from joulelab.runs.paths import GROUPS_FOLDER, RunPaths, read_json, write_json
from joulelab.runs.record import ErrorRecord, RunRecord, Status

FOLDER, FILE = "slurm", "jobs.json"


class SubmittedJob(Frozen):
    key: str
    about: str
    job_id: str
    script: str
    runs: tuple[str, ...] = ()
    """Ids of the runs it executes, one per task of an array."""
    array: bool = False
    after: str | None = None
    """Key of the job that must succeed first."""
    submitted_at: str

    def executes(self, run: str, job_id: str) -> bool:
        """Whether the job with this id, or this task of an array, executes the run."""
        return run in self.runs and job_id == (f"{self.job_id}_{self.runs.index(run)}" if self.array else self.job_id)


class JobsFile(Frozen):
    schema_version: int = 1
    jobs: tuple[SubmittedJob, ...] = ()
    cancelled_at: str | None = None
    max_restarts: int = 0
    """How often a job may be requeued."""

    def dependents(self, key: str) -> list[SubmittedJob]:
        """The jobs that depend on this one, directly or indirectly."""
        found, keys = [], {key}
        for job in self.jobs:
            if job.after in keys:
                found.append(job)
                keys.add(job.key)
        return found


def jobs_path(folder: Path) -> Path:
    return folder / FOLDER / FILE


def read_jobs(folder: Path) -> JobsFile | None:
    """None if the folder was never submitted."""
    path = jobs_path(folder)
    if not path.exists():
        return None
    try:
        return JobsFile.model_validate(read_json(path))
    except ValidationError as error:
        raise JoulelabError(
            f"{path} cannot be read by this version of joulelab: {error.error_count()} invalid fields"
        ) from None


def write_jobs(folder: Path, jobs: JobsFile) -> None:
    write_json(jobs_path(folder), jobs)


def folder_of_job(store: Path, job_id: str) -> Path:
    """The run or group of a job id, `123` or `123_4`."""
    number = job_id.partition("_")[0]
    for path in (*store.glob(f"*/{FOLDER}/{FILE}"), *store.glob(f"{GROUPS_FOLDER}/*/{FOLDER}/{FILE}")):
        jobs = read_jobs(path.parent.parent)
        if jobs is not None and any(job.job_id == number for job in jobs.jobs):
            return path.parent.parent
    raise NotFoundError(
        f"no run under {store.absolute()} was submitted as job {job_id}",
        "set --runs-dir or JOULELAB_RUNS to search another store",
    )


_HOME = "home.json"


def home_of(folder: Path) -> Path:
    """The folder that has the `jobs.json` of a run: its group, the run or group it does a shard for, or itself."""
    if read_jobs(folder) is not None or not RunPaths(folder).record.exists():
        return folder
    if (folder / FOLDER / _HOME).exists():
        return folder.absolute().parent / str(read_json(folder / FOLDER / _HOME, home=str)["home"])
    group = read_json(RunPaths(folder).record).get("group")
    return folder.absolute().parent / GROUPS_FOLDER / str(group) if group else folder


def write_home(folder: Path, home: Path) -> None:
    """Record in a shard's run the run or group that it was submitted with."""
    write_json(folder / FOLDER / _HOME, {"home": os.path.relpath(home.absolute(), folder.absolute().parent)})


def fail_dependent_runs(folder: Path, reason: str) -> None:
    """This job failed, so Slurm cancels the jobs that depend on it; write the reason into their queued runs."""
    job_id = os.environ.get("SLURM_ARRAY_JOB_ID") or os.environ.get("SLURM_JOB_ID")
    jobs = read_jobs(home_of(folder))
    job = next((job for job in jobs.jobs if job.job_id == job_id), None) if jobs else None
    if job is None or jobs is None:
        return
    dependent = [run for later in jobs.dependents(job.key) for run in later.runs]
    store = folder.absolute().parent
    close_queued((store / run for run in dependent), "failed", f"not started: job {job.key} failed ({reason})")


def close_queued(folders: Iterable[Path], status: Status, message: str) -> list[str]:
    """Set status and reason of the runs that are still queued; returns their ids."""
    closed = []
    for folder in folders:
        paths = RunPaths(folder)
        if not paths.record.exists():
            continue
        with suppress(FolderLocked), holding(folder):  # a locked run has just started
            record = RunRecord.model_validate(read_json(paths.record))
            if record.status == "queued":
                error = ErrorRecord(kind="NotStarted", message=message, hint=f"joulelab submit --resume {paths.run_id}")
                write_json(paths.record, record.model_copy(update={"status": status, "error": error}))
                closed.append(record.run_id)
    return closed
