"""Which jobs a run or group was given to, kept in its folder: `slurm/jobs.json`, with scripts and logs beside it."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from joulelab.errors import JoulelabError, NotFoundError
from joulelab.meter.figures import Frozen
from joulelab.runs.json_file import read_json, write_json
from joulelab.runs.paths import GROUPS_FOLDER

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
