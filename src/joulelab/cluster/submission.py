"""Submission of planned jobs to Slurm: the runs, their scripts, the jobs and their cancellation."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from joulelab import clock, lookup
from joulelab.cluster import slurm
from joulelab.cluster.job_settings import JobSettings
from joulelab.cluster.jobs import (
    FOLDER,
    JobsFile,
    SubmittedJob,
    close_queued,
    home_of,
    read_jobs,
    write_home,
    write_jobs,
)
from joulelab.cluster.plan import Member, PlannedJob
from joulelab.cluster.script import JobScript, script_text
from joulelab.errors import JoulelabError, NotFoundError, UsageError
from joulelab.runs.attempt import create_run
from joulelab.runs.groups import create_group, load_group, member_paths, queue_members
from joulelab.runs.lock import FolderLocked, holding, is_held, newest_lease
from joulelab.runs.paths import GroupPaths, RunPaths, read_json, slug, write_json
from joulelab.runs.record import RunRecord
from joulelab.runs.spec import RunSpec, check, read_mapping
from joulelab.runs.store import find_folder, load_record

Submit = Callable[[Path, str | None], str]


def job_script(job: PlannedJob, folder: Path, store: Path, name: str, settings: JobSettings) -> str:
    """The script of one job of a run or group directory."""
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
            measured=job.measured,
            restartable=job.restartable,
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
    """Write the scripts and submit them in order. If one is refused, cancel those submitted before and write the
    reason into their runs.
    """
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    submitted: list[SubmittedJob] = []
    ids: dict[str, str] = {}
    try:
        for job in jobs:
            script = place / f"{job.key}.sbatch"
            script.write_text(job_script(job, folder, store, name, settings), encoding="utf-8")
            if job.array:
                _task_list(place, job).write_text("".join(f"{run}\n" for run in job.runs), encoding="utf-8")
            ids[job.key] = submit(script, ids[job.after] if job.after else None)
            submitted.append(_submitted(job, ids[job.key], script))
            # after each submission, because a job may start and fail before the last one is submitted
            found = JobsFile(jobs=tuple(submitted), max_restarts=settings.max_restarts if settings.requeue else 0)
            write_jobs(folder, found)
    except BaseException as error:
        left = ""
        try:
            slurm.cancel(list(ids.values()))
        except JoulelabError as problem:  # Slurm may have stopped answering between two jobs
            left = f"{problem.message}: cancel the jobs submitted before with scancel {' '.join(ids.values())}"
        closed = close_queued({run for job in jobs for run in job.runs}, "failed", f"not submitted: {error}")
        if isinstance(error, JoulelabError) and closed:
            again = f"joulelab submit --resume {folder.name} ..."
            if not all(job.restartable for job in jobs):
                again = "repeat the command (a measured program cannot be resumed)"
            error.hint = "; ".join(filter(None, [error.hint, left, f"to retry with other options: {again}"]))
        raise
    return found


def dry_text(jobs: Sequence[PlannedJob], folder: Path, store: Path, name: str, settings: JobSettings) -> str:
    """For --dry-run: each script under the command that would submit it."""
    return "\n".join(
        f"### {sbatch_line(job, folder)}\n{job_script(job, folder, store, name, settings)}" for job in jobs
    )


def dry_data(
    jobs: Sequence[PlannedJob], folder: Path, store: Path, name: str, settings: JobSettings
) -> dict[str, object]:
    """For --dry-run --json: the settings of the submission, and each job with its command and script."""
    return {
        "name": name,
        "folder": str(folder),
        "settings": settings.model_dump(mode="json"),
        "jobs": [
            {
                "key": job.key,
                "about": job.about,
                "after": job.after,
                "runs": [run.name for run in job.runs],
                "command": sbatch_line(job, folder),
                "script": job_script(job, folder, store, name, settings),
            }
            for job in jobs
        ],
    }


def sbatch_line(job: PlannedJob, folder: Path) -> str:
    """The command that would submit the job."""
    after = f" --dependency=afterok:<id of {job.after}>" if job.after else ""
    return f"sbatch --parsable{after} {shlex.quote(str(folder / FOLDER / f'{job.key}.sbatch'))}"


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


def require_resources(settings: JobSettings, on_gpu: bool) -> None:
    """Refuse a partition or GPU type that the cluster does not have; no check if sinfo does not answer."""
    known = slurm.partitions()
    if not known:
        return
    by_name = {partition.name: partition for partition in known}
    requested = [name for name in settings.partition.split(",") if name]
    for name in [*requested, *filter(None, [settings.cpu_partition])]:
        if name not in by_name:
            raise lookup.unknown("partition", name, by_name, f"partitions of this cluster: {', '.join(by_name)}")
    if not on_gpu or not settings.gpus:
        return
    where = [by_name[name] for name in requested] or [one for one in known if one.is_default] or list(known)
    here = {kind for partition in where for kind in partition.gpu_types}
    places = "partition " + " and ".join(partition.name for partition in where)
    if not here:
        others = _gpu_places(known)
        hint = f"GPUs are in: {others}; choose with --partition" if others else "use --gpus 0 for a job without a GPU"
        raise UsageError(f"{settings.gpus} GPU(s) per node were requested, but {places} has none", hint)
    if settings.gpu_type and settings.gpu_type not in here:
        found = ", ".join(sorted(filter(None, here))) or "GPUs without a type"
        raise UsageError(
            f"GPU type '{settings.gpu_type}' was requested, but {places} has {found}",
            f"choose with --gpu-type (an empty value accepts any GPU); GPU types by partition: {_gpu_places(known)}",
        )


def _gpu_places(known: Sequence[slurm.Partition]) -> str:
    return "; ".join(
        f"{one.name}: {', '.join(kind or 'without a type' for kind in one.gpu_types)}" for one in known if one.gpu_types
    )


@dataclass(frozen=True)
class SubmissionRequest:
    """The runs to submit: one or a group, new or from an earlier submission; checked, directories not yet created."""

    name: str
    specs: tuple[RunSpec, ...]
    about: str = ""
    baseline: str = ""
    is_group: bool = False
    sweep: bool = False
    earlier: Path | None = None
    """Directory of an earlier submission to resume."""
    left: tuple[Path, ...] = ()
    """Its unfinished runs; a placeholder for a run that has no directory yet."""

    def create(self, store: Path, run_dir: Path | None = None) -> CreatedRuns:
        """Create the run directories, queued."""
        if self.earlier is not None:
            return CreatedRuns(self.earlier, self._members(_requeued_runs(self.earlier)))
        if not self.is_group:
            paths = create_run(store, self.specs[0], folder=run_dir)
            return CreatedRuns(paths.folder, self._members([paths.folder]))
        group = create_group(
            store, self.specs, name=self.name, about=self.about, baseline=self.baseline, sweep=self.sweep
        )
        return CreatedRuns(group.folder, self._members([run.folder for run in queue_members(group)]))

    def preview(self, store: Path, run_dir: Path | None = None) -> CreatedRuns:
        """For --dry-run: placeholders for the directories that `create` would make."""
        if self.earlier is not None:
            return CreatedRuns(self.earlier, self._members(self.left))
        folder = run_dir or store / ("groups/<new group>" if self.is_group else "<new run>")
        runs = [store / f"<run {number}>" for number in range(len(self.specs))] if self.is_group else [folder]
        return CreatedRuns(folder, self._members(runs))

    def _members(self, folders: Sequence[Path]) -> tuple[Member, ...]:
        return tuple(
            Member(folder.absolute(), spec.has_teacher, spec.uses_gpu)
            for folder, spec in zip(folders, self.specs, strict=True)
        )


@dataclass(frozen=True)
class CreatedRuns:
    folder: Path
    members: tuple[Member, ...]


def create_shards(store: Path, works: Sequence[Sequence[RunSpec]], home: Path) -> list[list[Path]]:
    """Queue one run per shard of a teacher's work; unfinished ones of an earlier submission are resumed."""
    jobs = read_jobs(home)
    earlier = dict.fromkeys(run for job in (jobs.jobs if jobs else ()) for run in job.runs)
    known = {run: _spec(RunPaths(store / run)) for run in earlier if (store / run / "run.json").exists()}

    def folder_of(spec: RunSpec) -> Path:
        earlier_runs = (RunPaths(store / run) for run, known_spec in known.items() if known_spec == spec)
        paths = next((run for run in earlier_runs if _is_unfinished(run)), None)
        paths = _set_queued(paths) if paths else create_run(store, spec)
        write_home(paths.folder, home)
        return paths.folder.absolute()

    return [[folder_of(spec) for spec in shards] for shards in works]


def preview_shards(store: Path, works: Sequence[Sequence[RunSpec]]) -> list[list[Path]]:
    return [[(store / f"<{spec.name}>").absolute() for spec in shards] for shards in works]


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds from `0-3` or `0,2,5`, the syntax of Slurm arrays."""
    seeds: list[int] = []
    for piece in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", piece.strip())
        if not found:
            raise UsageError(f"--array {text}: '{piece}' is not a number or range", "write 0-3 or 0,2,5")
        low, high = int(found.group(1)), int(found.group(2) or found.group(1))
        seeds += range(low, high + 1)
    if len(set(seeds)) < len(seeds) or not seeds:
        raise UsageError(f"--array {text} has a duplicate seed or none", "write 0-3 or 0,2,5: one run per seed")
    return tuple(seeds)


def resubmission(store: Path, name: str) -> SubmissionRequest:
    """The unfinished runs of an earlier run or group. Nothing is written yet."""
    folder = find_folder(store, name).absolute()
    if (folder / "group.json").exists():
        group, paths = load_group(folder), GroupPaths(folder)
        runs = [member_paths(paths, member) for member in group.members]
        left = [number for number, run in enumerate(runs) if run is None or _is_unfinished(run)]
        folders = [run.folder if (run := runs[number]) else paths.store / f"<run {number}>" for number in left]
        specs = [_spec(run) if (run := runs[number]) else check(group.members[number].spec) for number in left]
        request = SubmissionRequest(group.name, tuple(specs), is_group=True, earlier=folder, left=tuple(folders))
    else:
        run = RunPaths(folder)
        specs = [_spec(run)] if _is_unfinished(run) else []
        request = SubmissionRequest(load_record(folder).name, tuple(specs), earlier=folder, left=(folder,))
    if not request.specs:
        raise UsageError(f"{folder.name} is already done; nothing to submit", f"joulelab show {folder.name}")
    return request


def refuse_if_jobs_left(earlier: Path) -> None:
    """Refuse to submit runs again while a job of the earlier submission can still execute them: two jobs would have one
    run, and `watch` and `cancel` would not find the earlier one."""
    home = home_of(earlier)
    jobs = read_jobs(home)
    own = [job for job in (jobs.jobs if jobs else ()) if job.runs and (home == earlier or earlier.name in job.runs)]
    known = slurm.states([job.job_id for job in own]).values()
    left = [
        state.job_id
        for state in known
        if state.executes and (home == earlier or any(job.executes(earlier.name, state.job_id) for job in own))
    ]
    if left:
        raise UsageError(
            f"{earlier.name} still has jobs: {', '.join(left)}",
            f"wait for them (joulelab watch {earlier.name}), or cancel them first: joulelab cancel {earlier.name}",
        )


def _requeued_runs(folder: Path) -> list[Path]:
    is_group = (folder / "group.json").exists()
    runs = queue_members(GroupPaths(folder)) if is_group else [RunPaths(folder)]
    return [_set_queued(run).folder for run in runs if _is_unfinished(run)]


def _spec(run: RunPaths) -> RunSpec:
    return check(read_mapping(run.config))


def _is_unfinished(run: RunPaths) -> bool:
    """Whether the run is not done; raises if it is running."""
    status = load_record(run.folder).status
    if status == "running":
        raise FolderLocked(run.folder, newest_lease(run.folder)[1])
    return status != "done"


def _set_queued(run: RunPaths) -> RunPaths:
    with holding(run.folder):
        record = RunRecord.model_validate(read_json(run.record))
        write_json(run.record, record.model_copy(update={"status": "queued", "error": None}))
    return run


@dataclass(frozen=True)
class Cancelled:
    job_ids: tuple[str, ...]
    runs: tuple[str, ...]
    """Runs that had not started."""


def cancel_jobs(folder: Path) -> Cancelled:
    """Cancel all jobs of a run or group; for a member of a group the whole chain, because its jobs are shared."""
    home = home_of(folder)
    jobs = read_jobs(home)
    if jobs is None:
        raise NotFoundError(f"{folder.name} was not submitted to Slurm", "stop a local run with Ctrl-C or SIGTERM")
    states = slurm.states([job.job_id for job in jobs.jobs])
    # before cancelling: a stopping job reads this before it requeues itself
    write_jobs(home, jobs.model_copy(update={"cancelled_at": clock.iso(clock.now().wall_s)}))
    alive = tuple(dict.fromkeys(job_id.partition("_")[0] for job_id, state in states.items() if state.alive))
    slurm.cancel(alive)
    store = GroupPaths(home).store if (home / "group.json").exists() else home.absolute().parent
    waiting = dict.fromkeys(run for job in jobs.jobs for run in job.runs)
    closed = close_queued((store / run for run in waiting), "truncated", "cancelled before it started")
    return Cancelled(alive, tuple(closed))


def stop_text(folder: Path) -> str:
    """What `stop_run` would do, for a confirmation."""
    if read_jobs(home_of(folder)) is not None:
        home = home_of(folder)
        whole = f" of {home.name}, to which this run belongs" if home.name != folder.name else ""
        return (
            f"Cancels the Slurm jobs{whole}. Runs in progress save a checkpoint and a record with the energy so far; "
            "queued runs are closed."
        )
    return (
        "Sends SIGTERM to its process. Training saves a checkpoint, and the energy so far stays recorded. Runs that "
        "the same command would start next are not started."
    )


def stop_run(folder: Path) -> str:
    """Ask a running run to save its work and end: SIGTERM to a process of this machine, scancel for Slurm's jobs."""
    if read_jobs(home_of(folder)) is not None:
        cancelled = cancel_jobs(folder)
        return f"cancelled jobs: {', '.join(cancelled.job_ids) or 'none left'}"
    _, lease = newest_lease(folder)
    if lease is None or not is_held(folder):
        raise UsageError(f"{folder.name} is not running", "there is nothing to stop")
    if not lease.on_this_node:
        raise UsageError(
            f"{folder.name} runs on {lease.host}, and not in a Slurm job of joulelab",
            f"stop it there: kill {lease.pid}",
        )
    try:
        # The lease is the holder's and its lock is held, so the number cannot belong to another process.
        os.kill(lease.pid, signal.SIGTERM)
    except OSError as error:
        raise UsageError(f"cannot signal process {lease.pid}: {error.strerror}", "it belongs to another user") from None
    return f"sent SIGTERM to process {lease.pid}"
