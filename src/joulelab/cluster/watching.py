"""What a submitted run or group looks like now: its runs from the folder, its jobs from Slurm where there is one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from joulelab.cluster import slurm
from joulelab.cluster.accounting import AccountedJob, import_accounting
from joulelab.cluster.jobs_file import SubmittedJob, folder_of_job, read_jobs
from joulelab.cluster.live_run import LiveRun, RunWatcher
from joulelab.cluster.waiting_runs import home_of
from joulelab.errors import JoulelabError
from joulelab.meter.figure_text import relative_text
from joulelab.meter.sensors.cpu import FAMILY_GAIN_ERROR_REL, KNOWN_MODEL_GAIN_ERROR_REL
from joulelab.report.grid import Grid, make_grid
from joulelab.report.wording import NOTHING, rate
from joulelab.runs.groups import load_group
from joulelab.runs.store import find_folder
from joulelab.units import duration_text, energy_text, percent_text, power_text

UNASKED = "UNASKED"
"""In the place of a job's state where Slurm could not be asked, as on a machine without it."""


@dataclass(frozen=True)
class JobLine:
    """One job of the chain, or one task of an array."""

    key: str
    job_id: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Watched:
    name: str
    runs: tuple[LiveRun, ...]
    jobs: tuple[JobLine, ...] = ()

    @property
    def over(self) -> bool:
        """A run that waits is over where no job is left, or ever was, to begin it; off the cluster nobody knows."""
        states = {job.state for job in self.jobs}
        if not states.isdisjoint(slurm.ALIVE):
            return False
        return all(run.over or (run.status == "queued" and UNASKED not in states) for run in self.runs)

    @property
    def well(self) -> bool:
        return all(run.status == "done" for run in self.runs)

    def data(self) -> dict[str, Any]:
        runs, jobs = [asdict(run) for run in self.runs], [asdict(job) for job in self.jobs]
        return {"name": self.name, "over": self.over, "runs": runs, "jobs": jobs}


class Watcher:
    """A run, a group, or whatever was submitted as a job."""

    def __init__(self, store: Path, name: str) -> None:
        self.folder = find_watched(store, name)
        self._home = home_of(self.folder)
        self._whole = self.folder == self._home
        """Not a run that was submitted with others."""
        self._runs: dict[str, RunWatcher] = {}

    def look(self) -> Watched:
        folders = self._run_folders()
        for folder in folders:
            self._runs.setdefault(folder.name, RunWatcher(folder))
        runs = tuple(self._runs[folder.name].look() for folder in folders)
        return Watched(self.folder.name, runs, self._jobs())

    def accounts(self) -> tuple[AccountedJob, ...]:
        """What Slurm says the jobs took, once they are over; kept in the folder."""
        return import_accounting(self._home)

    def _run_folders(self) -> list[Path]:
        """The run or the group's members, and before them the runs that do shares of a teacher's work for them."""
        store, found = self.folder.absolute().parent, [self.folder.absolute()]
        if (self.folder / "group.json").exists():
            store, members = store.parent, load_group(self.folder).members
            found = [store / member.run_id for member in members if member.run_id is not None]
        jobs = read_jobs(self._home) if self._whole else None
        submitted = [store / run for job in (jobs.jobs if jobs else ()) for run in job.runs]
        helping = [folder for folder in dict.fromkeys(submitted) if folder not in found]
        return [folder for folder in (*helping, *found) if (folder / "run.json").exists()]

    def _jobs(self) -> tuple[JobLine, ...]:
        jobs = self._submitted()
        try:
            known = slurm.states([job.job_id for job in jobs])
        except JoulelabError as error:  # the folder alone is enough to watch the runs themselves
            return tuple(JobLine(job.key, job.job_id, UNASKED, error.message) for job in jobs)
        lines = []
        for job in jobs:
            own = [state for state in known.values() if self._concerns(job, state.job_id)]
            lines += [JobLine(job.key, state.job_id, state.state, state.reason) for state in own]
            if not own:
                lines.append(JobLine(job.key, job.job_id, "UNKNOWN", "Slurm does not know it any more"))
        return tuple(lines)

    def _submitted(self) -> list[SubmittedJob]:
        """All jobs of what is watched; of a run that was submitted with others, those that work on it."""
        jobs = read_jobs(self._home)
        return [job for job in (jobs.jobs if jobs else ()) if self._whole or self.folder.name in job.runs]

    def _concerns(self, job: SubmittedJob, job_id: str) -> bool:
        if self._whole or not job.array:
            return job_id.partition("_")[0] == job.job_id
        return job_id == f"{job.job_id}_{job.runs.index(self.folder.name)}"


def find_watched(store: Path, name: str) -> Path:
    """A job's number is told from a run's name by its digits."""
    if name.replace("_", "").isdigit() and not (store / name).exists():
        return folder_of_job(store, name)
    found = find_folder(store, name)
    return home_of(found) if name == "last" else found  # a chain's runs and its group are of the same second


def watch_grids(watched: Watched) -> tuple[Grid, ...]:
    grids = [_runs_grid(watched)]
    if watched.jobs:
        rows = [(job.key, job.job_id, job.state, job.reason or NOTHING) for job in watched.jobs]
        grids.append(make_grid("Jobs", "Job!|Id!|State!|Reason", rows))
    return tuple(grids)


def _runs_grid(watched: Watched) -> Grid:
    titles = "Run|Status!|Stage|Loss>|Now>|So far>|tokens\nper s>|Done>|Time\nleft>|Energy\nleft>"
    estimated = any(run.estimated for run in watched.runs)
    scale = f"±{relative_text(KNOWN_MODEL_GAIN_ERROR_REL)} to ±{relative_text(FAMILY_GAIN_ERROR_REL)}"
    note = f"Estimated: from CPU time, {scale}; no sensor measured it." if estimated else ""
    reasons = [f"{run.run_id}: {run.why}" for run in watched.runs if run.why]
    return make_grid(watched.name, titles, [_cells(run) for run in watched.runs], "\n".join([*reasons, note]).strip())


def _energy_cell(run: LiveRun) -> str:
    """Without an interval: that takes the whole trace, which is not read while the run goes on."""
    if run.energy_j is None:
        return NOTHING
    return f"{energy_text(run.energy_j)}, estimated" if run.estimated else energy_text(run.energy_j)


def _cells(run: LiveRun) -> tuple[str, ...]:
    return (
        run.run_id,
        run.status,
        run.stage or NOTHING,
        NOTHING if run.loss is None else f"{run.loss:.4f}",
        NOTHING if run.power_w is None else power_text(run.power_w),
        _energy_cell(run),
        rate(run.tokens_per_s or run.samples_per_s, "") if run.tokens_per_s or run.samples_per_s else NOTHING,
        percent_text(run.fraction, 0) if run.fraction is not None else NOTHING,
        NOTHING if run.left_s is None else duration_text(run.left_s),
        NOTHING if run.left_j is None else energy_text(run.left_j),
    )
