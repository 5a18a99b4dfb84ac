"""`joulelab submit`: the same experiment on a Slurm cluster."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.cli.options import AsJson, RunsDir
from joulelab.errors import JoulelabError, NotFoundError, UsageError

if TYPE_CHECKING:
    from joulelab.cluster.jobs import JobsFile
    from joulelab.cluster.submission import SubmissionRequest
    from joulelab.cluster.watch import WatchedJobs, Watcher


# Options that are settings of the same name.
_PLAIN = (
    *("partition", "cpu_partition", "time", "gpus", "gpu_type", "nodes", "ranks_per_node", "cpus", "memory"),
    *("account", "qos", "constraint", "warn_s", "hf_home", "cache_dir", "scratch"),
)


def submit(
    context: typer.Context,
    experiment: Annotated[
        str | None, typer.Argument(help="Name of an experiment (`joulelab experiments`) or a YAML file.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings that replace the experiment's; commas sweep."),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="`h100`, `l40s`, or one of the site file's.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition of the GPU jobs.")] = None,
    cpu_partition: Annotated[str | None, typer.Option(help="Partition of jobs without a GPU.")] = None,
    time: Annotated[str | None, typer.Option(help="Limit of each job: minutes, H:MM:SS, D-HH:MM:SS.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs on each node, a process each.")] = None,
    gpu_type: Annotated[str | None, typer.Option(help="The cluster's name of the GPU.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of each job.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Processes on each node (default: its GPUs).")] = None,
    cpus: Annotated[int | None, typer.Option(help="CPU cores on each node.")] = None,
    memory: Annotated[str | None, typer.Option("--mem", help="Memory of each node, as in 64G.")] = None,
    account: Annotated[str | None, typer.Option(help="Whom the hours are charged to.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Features the nodes must have.")] = None,
    exclusive: Annotated[bool, typer.Option("--exclusive", help="Whole nodes, so that RAPL is this job's.")] = False,
    warn_s: Annotated[int | None, typer.Option("--warn", help="Seconds before the limit to save at.")] = None,
    no_requeue: Annotated[bool, typer.Option("--no-requeue", help="Do not come back after the limit.")] = False,
    sbatch: Annotated[list[str] | None, typer.Option("--sbatch", help="Another option of sbatch, verbatim.")] = None,
    venv: Annotated[str | None, typer.Option(help="Virtual environment of the job.")] = None,
    conda: Annotated[str | None, typer.Option(help="Conda environment of the job.")] = None,
    module: Annotated[list[str] | None, typer.Option(help="Module to load first; repeat it for several.")] = None,
    hf_home: Annotated[str | None, typer.Option(help="HF_HOME of the job.")] = None,
    cache_dir: Annotated[str | None, typer.Option(help="XDG_CACHE_HOME of the job.")] = None,
    scratch: Annotated[str | None, typer.Option(help="TMPDIR of the job.")] = None,
    array: Annotated[str | None, typer.Option(metavar="0-3", help="One run for each of these seeds.")] = None,
    repeats: Annotated[int, typer.Option(metavar="N", help="Runs of each configuration, by seed.")] = 1,
    steps: Annotated[
        str | None,
        typer.Option(metavar="data,teacher,students,evaluation,report", help="Which have a job of their own."),
    ] = None,
    both: Annotated[bool, typer.Option("--both", help="Preprocess in a CPU job, then distil, for seeds 0-3.")] = False,
    shards: Annotated[int, typer.Option(metavar="N", help="Tasks that the teacher's work is split over.")] = 1,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN|GROUP", help="Submit what is left of an earlier one.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run directory.", show_default=False)] = None,
    no_check: Annotated[bool, typer.Option("--no-check", help="Do not try the environment here first.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the scripts; write and submit nothing.")] = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Submit an experiment to Slurm: readable scripts in the run folder, chained so that each waits for the one before.

    Account, partition and environment can be written down once, in ~/.config/joulelab/slurm.yaml (docs/slurm.md). A run
    that reaches its time limit saves, goes back to the queue, and goes on. Several runs (a group, --array, --repeats, a
    value with commas) are an array, with data and teacher made once before it. --shards splits what a teacher says,
    writes and judges over an array of tasks, each on whichever node is free; the students join what they made.

    Examples:

      joulelab submit demo-kd --preset h100 --time 2:00:00 --dry-run

      joulelab submit demo --partition gpu --cpu-partition cpu

      joulelab submit distilbert --both --preset h100

      joulelab submit my.yaml --nodes 2 --gpus 4

      joulelab submit kd-small --shards 8 --repeats 3 --preset h100

      joulelab watch last
    """
    from joulelab.cluster import submission as choosing
    from joulelab.cluster.job_settings import job_settings
    from joulelab.cluster.plan import plan, read_steps, require_kept_model, require_ranks, require_shards, usual_steps
    from joulelab.cluster.script import check_activation
    from joulelab.cluster.submission import dry_text, submit_plan
    from joulelab.distill.causal.phases import shard_specs
    from joulelab.runs.paths import require_no_runs
    from joulelab.runs.store import store_root

    settings = job_settings(preset, _asked(context.params))
    store = store_root(runs_dir).absolute()
    if resume is not None:
        if experiment is not None or array is not None or repeats > 1 or both or run_dir is not None:
            raise UsageError(
                "--resume takes its settings from the run itself",
                "leave the experiment, its settings, --array, --repeats, --both and --run-dir out",
            )
        wanted = choosing.again(store, resume)
    else:
        wanted = chosen(experiment, overrides or [], array, repeats, both)
    wanted_steps = read_steps(steps) if steps else usual_steps(wanted.specs, both, shards)
    require_shards(shards, wanted_steps)
    works = shard_specs(wanted.specs, shards) if shards > 1 else []
    for spec in wanted.specs:
        require_ranks(spec, settings.nodes, settings.ranks)
        require_kept_model(spec, wanted_steps)
    if run_dir is not None and wanted.is_group:
        raise UsageError("--run-dir names the folder of one run, and this is a group", "--runs-dir names a store")
    if run_dir is not None:
        require_no_runs(run_dir)
    if not no_check and not dry_run:
        require_files(wanted)
        check_activation(settings.environment)
    made = wanted.imagined(store, run_dir) if dry_run else wanted.made(store, run_dir)
    shares = choosing.imagined_shares(store, works) if dry_run else choosing.made_shares(store, works, made.folder)
    jobs = plan(
        made.members, wanted_steps, report_on=made.folder, nodes=settings.nodes, ranks=settings.ranks, shares=shares
    )
    if dry_run:
        print(dry_text(jobs, made.folder, store, wanted.name, settings), end="")
        return
    submitted = submit_plan(jobs, made.folder.absolute(), store, wanted.name, settings)
    tell(made.folder, submitted, as_json)


def chosen(
    experiment: str | None, overrides: list[str], array: str | None, repeats: int, both: bool
) -> SubmissionRequest:
    """The runs that were asked for, all checked; the classic pair of scripts distils for the seeds 0 to 3."""
    from joulelab.cli.sweep import sweep_members
    from joulelab.cluster.submission import SubmissionRequest, seeds_of
    from joulelab.runs.groups import check_group, is_group
    from joulelab.runs.spec import check, parse_overrides, read_layers

    if experiment is None:
        raise UsageError("no experiment was named", "`joulelab experiments` lists them")
    if array is not None and repeats > 1:
        raise UsageError("--array and --repeats both say how many runs", "give one of them")
    layers = read_layers(experiment)
    if is_group(layers):
        if array is not None or repeats > 1:
            raise UsageError(f"{experiment} is a group and says its seeds itself", "leave --array and --repeats out")
        group, specs = check_group(layers, parse_overrides(overrides))
        return SubmissionRequest(group.name, tuple(specs), group.about, group.baseline, is_group=True)
    name, specs = sweep_members(["run", experiment, *overrides], repeats)
    if both and array is None and len(specs) == 1:
        array = "0-3"
    if array is not None:
        seeds = seeds_of(array)
        specs = [check({**spec.model_dump(mode="json"), "seed": seed}) for seed in seeds for spec in specs]
    several = len(specs) > 1
    about = f"{len(specs)} runs of {name}" if several else ""
    return SubmissionRequest(name, tuple(specs), about, is_group=several, sweep=several)


def require_files(wanted: SubmissionRequest) -> None:
    """A file that is not there is told now rather than by a job in an hour; packages and GPUs are the job's matter."""
    for spec in wanted.specs:
        try:
            spec.preflight()
        except NotFoundError:
            raise
        except UsageError:
            continue


def _asked(params: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, as settings of a job; the rest is left to preset and site file."""
    asked = {name: params[name] for name in _PLAIN if params[name] is not None}
    environment = {name: params[name] for name in ("venv", "conda") if params[name] is not None}
    if params["module"]:
        environment["modules"] = params["module"]
    if environment:
        asked["environment"] = environment
    if params["sbatch"]:
        asked["sbatch"] = params["sbatch"]
    return {**asked, **({"exclusive": True} if params["exclusive"] else {}), **_requeue(params)}


def _requeue(params: dict[str, Any]) -> dict[str, Any]:
    return {"requeue": False} if params["no_requeue"] else {}


def tell(folder: Path, jobs: JobsFile, as_json: bool) -> None:
    if as_json:
        print(jobs.model_dump_json(indent=2))
        return
    for job in jobs.jobs:
        tasks = f" x {len(job.runs)}" if job.array and job.runs else ""
        after = f"  after {job.after}" if job.after else ""
        print(f"{job.job_id}  {job.key}{tasks}  {job.about}{after}")
    print(f"\nscripts and logs: {folder / 'slurm'}", file=sys.stderr)
    print(f"watch:  joulelab watch {folder.name}", file=sys.stderr)
    print(f"cancel: joulelab cancel {folder.name}", file=sys.stderr)


# `joulelab watch`: a run, a group or a Slurm job while it runs, from the shared folder.


def watch(
    name: Annotated[str, typer.Argument(help="Run or group by id, part of it, folder or `last`; or a job's number.")],
    interval_s: Annotated[float, typer.Option("--interval", min=0.2, help="Seconds between looks.")] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Show state, stage, watts, joules so far, speed, and what time and energy are left, until the run is over.

    It reads the run's folder and asks Slurm for its jobs where there is a Slurm; it needs no GPU and no torch, and
    works on any machine that sees the folder. Ends with 1 where a run did not end well.

    Examples:

      joulelab watch last

      joulelab watch 4711 --once --json
    """
    from joulelab.cluster.watch import Watcher
    from joulelab.runs.store import store_root

    watcher = Watcher(store_root(runs_dir), name)
    watched = _look(watcher, as_json) if once else _follow(watcher, interval_s, as_json)
    if watched.over and not as_json:
        for row in watcher.accounts():
            print(row.text)
    if watched.over and not watched.well:
        first = next(run for run in watched.runs if run.status != "done")
        if first.status == "queued":
            raise JoulelabError(
                f"{first.run_id} waits, and no job is left to begin it", f"joulelab submit --resume {watched.name}"
            )
        why = f"{first.run_id}: {first.why or first.status}"
        raise JoulelabError(f"not all of {watched.name} ended well ({why})", f"joulelab show {watched.name}")


def _look(watcher: Watcher, as_json: bool) -> WatchedJobs:
    import json

    from joulelab.cli.console import print_result
    from joulelab.cluster.watch import watch_grids
    from joulelab.report.tables.grid import to_rich

    watched = watcher.look()
    if as_json:
        print(json.dumps(watched.data()), flush=True)
    else:
        print_result(*(to_rich(grid) for grid in watch_grids(watched)))
    return watched


def _follow(watcher: Watcher, interval_s: float, as_json: bool) -> WatchedJobs:
    """In place on a terminal; one table, or one line of JSON, after the other elsewhere."""
    if as_json or not sys.stdout.isatty():
        while not (watched := _look(watcher, as_json)).over:
            time.sleep(interval_s)
        return watched
    from rich.console import Group
    from rich.live import Live

    from joulelab.cluster.watch import watch_grids
    from joulelab.report.tables.grid import to_rich

    with Live(auto_refresh=False) as live:
        while True:
            watched = watcher.look()
            live.update(Group(*(to_rich(grid) for grid in watch_grids(watched))), refresh=True)
            if watched.over:
                return watched
            time.sleep(interval_s)


# `joulelab cancel`: end what was submitted, with its record and joules kept.


def cancel(
    name: Annotated[str, typer.Argument(help="Run or group by id, part of it, folder or `last`; or a job's number.")],
    runs_dir: RunsDir = None,
) -> None:
    """Cancel the Slurm jobs of a run or group.

    A run that is under way saves a checkpoint and writes its record with the joules spent; one that waits is closed.
    `joulelab submit --resume RUN` takes it up again.

    Examples:

      joulelab cancel last

      joulelab cancel 4711
    """
    from joulelab.cluster.submission import cancel_jobs
    from joulelab.cluster.watch import find_watched
    from joulelab.runs.store import store_root

    found = cancel_jobs(find_watched(store_root(runs_dir), name))
    print(f"cancelled jobs: {', '.join(found.job_ids) or 'none were left'}")
    if found.runs:
        print(f"not begun: {', '.join(found.runs)}")
