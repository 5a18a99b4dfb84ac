"""End what was submitted: jobs that run are told to save and write their record, runs that wait are closed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from joulelab import clock
from joulelab.cluster import slurm
from joulelab.cluster.jobs_file import read_jobs, write_jobs
from joulelab.cluster.waiting_runs import close_queued, home_of
from joulelab.errors import NotFoundError
from joulelab.runs.paths import GroupPaths


@dataclass(frozen=True)
class Cancelled:
    job_ids: tuple[str, ...]
    runs: tuple[str, ...]
    """Runs that had not begun."""


def cancel_jobs(folder: Path) -> Cancelled:
    """All jobs of a run or group; a run of a group takes the whole chain along, for its jobs are shared."""
    home = home_of(folder)
    jobs = read_jobs(home)
    if jobs is None:
        raise NotFoundError(
            f"{folder.name} was not submitted to Slurm", "a run on this machine is ended by Ctrl-C or SIGTERM"
        )
    states = slurm.states([job.job_id for job in jobs.jobs])
    # before they end: a job that is ended looks here before it goes back to the queue
    write_jobs(home, jobs.model_copy(update={"cancelled_at": clock.iso(clock.now().wall_s)}))
    alive = tuple(dict.fromkeys(job_id.partition("_")[0] for job_id, state in states.items() if state.alive))
    slurm.cancel(alive)
    store = GroupPaths(home).store if (home / "group.json").exists() else home.absolute().parent
    waiting = dict.fromkeys(run for job in jobs.jobs for run in job.runs)
    closed = close_queued((store / run for run in waiting), "truncated", "cancelled before it began")
    return Cancelled(alive, tuple(closed))
