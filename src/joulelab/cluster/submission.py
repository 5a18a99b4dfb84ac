"""From a plan to waiting jobs: scripts into the folder, each submitted after the one it waits for."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from joulelab import clock
from joulelab.cluster import slurm
from joulelab.cluster.jobs_file import FOLDER, JobsFile, SubmittedJob, write_jobs
from joulelab.cluster.plan import PlannedJob
from joulelab.cluster.script import JobScript, script_text
from joulelab.cluster.settings import JobSettings
from joulelab.cluster.waiting_runs import close_queued
from joulelab.errors import JoulelabError
from joulelab.runs.paths import slug

Submit = Callable[[Path, str | None], str]


def script_of(job: PlannedJob, folder: Path, store: Path, name: str, settings: JobSettings) -> str:
    """The text of one job of a folder."""
    place = folder / FOLDER
    return script_text(
        JobScript(
            name=f"{slug(name)}-{job.key}",
            about=job.about,
            command=job.command,
            log_folder=place,
            store=store,
            needs_gpu=job.needs_gpu,
            array=len(job.runs) if job.array else None,
            run=_task_list(place, job) if job.array else next(iter(job.runs), None),
            one_node=job.one_node,
        ),
        settings,
    )


def submit_plan(
    jobs: Sequence[PlannedJob],
    folder: Path,
    store: Path,
    name: str,
    settings: JobSettings,
    submit: Submit = slurm.submit,
) -> JobsFile:
    """Write the scripts and submit them in order. What was submitted before one is refused is cancelled again, and its
    runs say in Slurm's words why they never began.
    """
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    submitted: list[SubmittedJob] = []
    ids: dict[str, str] = {}
    try:
        for job in jobs:
            script = place / f"{job.key}.sbatch"
            script.write_text(script_of(job, folder, store, name, settings), encoding="utf-8")
            if job.array:
                _task_list(place, job).write_text("".join(f"{run}\n" for run in job.runs), encoding="utf-8")
            ids[job.key] = submit(script, ids[job.after] if job.after else None)
            submitted.append(_submitted(job, ids[job.key], script))
            # after each: a job may begin, and fail, before the last one is submitted
            found = JobsFile(jobs=tuple(submitted), max_restarts=settings.max_restarts if settings.requeue else 0)
            write_jobs(folder, found)
    except BaseException as error:
        slurm.cancel(list(ids.values()))
        closed = close_queued({run for job in jobs for run in job.runs}, "failed", f"never submitted: {error}")
        if isinstance(error, JoulelabError) and closed:
            error.hint = f"{error.hint}; with other options: joulelab submit --resume {folder.name} ..."
        raise
    return found


def dry_text(jobs: Sequence[PlannedJob], folder: Path, store: Path, name: str, settings: JobSettings) -> str:
    """What would be submitted, to read: each script under the command that would submit it."""
    parts = []
    for job in jobs:
        after = f" --dependency=afterok:<id of {job.after}>" if job.after else ""
        script = shlex.quote(str(folder / FOLDER / f"{job.key}.sbatch"))
        parts.append(f"### sbatch --parsable{after} {script}\n{script_of(job, folder, store, name, settings)}")
    return "\n".join(parts)


def _task_list(place: Path, job: PlannedJob) -> Path:
    return place / f"{job.key}.runs"


def _submitted(job: PlannedJob, job_id: str, script: Path) -> SubmittedJob:
    return SubmittedJob(
        key=job.key,
        about=job.about,
        job_id=job_id,
        script=str(script),
        runs=tuple(run.name for run in job.runs),
        array=job.array,
        after=job.after,
        submitted_at=clock.iso(clock.now().wall_s),
    )
