"""`joulelab submit`, `watch` and `cancel`: experiments on a Slurm cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.cli.options import (
    AsJson,
    Flag,
    RunsDir,
    complete_experiments,
    complete_runs,
    merged,
    note,
    requested_settings,
)
from joulelab.errors import JoulelabError, NotFoundError, UsageError

if TYPE_CHECKING:
    from joulelab.cluster.job_settings import JobSettings
    from joulelab.cluster.jobs import JobsFile
    from joulelab.cluster.submission import SubmissionRequest
    from joulelab.cluster.watch import WatchedJobs, Watcher


_SAME_NAME = (
    *("partition", "cpu_partition", "time", "gpus", "gpu_type", "nodes", "ranks_per_node", "cpus", "memory"),
    *("account", "qos", "constraint", "warn_s", "hf_home", "cache_dir", "scratch"),
)
FLAGS: Mapping[str, Flag] = {
    **{name: Flag(name) for name in _SAME_NAME},
    "venv": Flag("environment.venv"),
    "conda": Flag("environment.conda"),
    "module": Flag("environment.modules", switch=True),
    "sbatch": Flag("sbatch", switch=True),
    "exclusive": Flag("exclusive", switch=True),
    "no_requeue": Flag("requeue", lambda _: False, switch=True),
}


def submit(
    context: typer.Context,
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="Name of an experiment (`joulelab experiments`) or a YAML file.", autocompletion=complete_experiments
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY.PATH=VALUE]...",
            help="Settings that override the experiment's; commas sweep.",
        ),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="`h100`, `l40s`, or a preset of the site file.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition of GPU jobs.")] = None,
    cpu_partition: Annotated[str | None, typer.Option(help="Partition of CPU jobs.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit per job: minutes, H:MM:SS, D-HH:MM:SS.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs per node, one process each.")] = None,
    gpu_type: Annotated[str | None, typer.Option(help="Slurm's name of the GPU type.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes per job.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Processes per node (default: one per GPU).")] = None,
    cpus: Annotated[int | None, typer.Option(help="CPU cores per node.")] = None,
    memory: Annotated[str | None, typer.Option("--mem", help="Memory per node, as in 64G.")] = None,
    account: Annotated[str | None, typer.Option(help="Account to charge.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Required node features.")] = None,
    exclusive: Annotated[bool, typer.Option("--exclusive", help="Allocate whole nodes (for RAPL).")] = False,
    warn_s: Annotated[int | None, typer.Option("--warn", help="Seconds before the limit to save and stop.")] = None,
    no_requeue: Annotated[bool, typer.Option("--no-requeue", help="Do not requeue at the time limit.")] = False,
    sbatch: Annotated[list[str] | None, typer.Option("--sbatch", help="Additional sbatch option, verbatim.")] = None,
    venv: Annotated[str | None, typer.Option(help="Virtual environment of the job.")] = None,
    conda: Annotated[str | None, typer.Option(help="Conda environment of the job.")] = None,
    module: Annotated[list[str] | None, typer.Option(help="Module to load (repeatable).")] = None,
    hf_home: Annotated[str | None, typer.Option(help="HF_HOME of the job.")] = None,
    cache_dir: Annotated[str | None, typer.Option(help="XDG_CACHE_HOME of the job.")] = None,
    scratch: Annotated[str | None, typer.Option(help="TMPDIR of the job.")] = None,
    array: Annotated[str | None, typer.Option(metavar="0-3", help="Seeds, one run each.")] = None,
    repeats: Annotated[int, typer.Option(metavar="N", help="Runs per configuration (seeds).")] = 1,
    steps: Annotated[
        str | None,
        typer.Option(metavar="data,teacher,students,evaluation,report", help="Steps with separate jobs."),
    ] = None,
    both: Annotated[bool, typer.Option("--both", help="Preprocess in a CPU job, then distill with seeds 0-3.")] = False,
    shards: Annotated[int, typer.Option(metavar="N", help="Split the teacher's work into N tasks.")] = 1,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN|GROUP", help="Resubmit the unfinished runs of an earlier submission.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run directory.", show_default=False)] = None,
    no_check: Annotated[bool, typer.Option("--no-check", help="Skip the check of the environment.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the scripts without submitting.")] = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Submit an experiment to Slurm as job scripts in the run directory, chained by dependencies.

    Account, partition and environment can be set once in ~/.config/joulelab/slurm.yaml (docs/slurm.md). A run that
    reaches its time limit saves a checkpoint, is requeued and resumes. Several runs (a group, --array, --repeats,
    comma-separated values) become an array; data and teacher are prepared once before it. --shards splits the teacher's
    work (logits, completions, judgments) into an array of tasks whose outputs the students merge.

    Examples:

      joulelab submit demo-kd --preset h100 --time 2:00:00 --dry-run

      joulelab submit demo --partition gpu --cpu-partition cpu

      joulelab submit distilbert --both --preset h100

      joulelab submit my.yaml --nodes 2 --gpus 4

      joulelab submit kd-small --shards 8 --repeats 3 --preset h100

      joulelab watch last
    """
    from joulelab.cluster.job_settings import job_settings
    from joulelab.cluster.plan import plan
    from joulelab.cluster.script import check_activation
    from joulelab.cluster.submission import create_shards, dry_text, preview_shards, resubmission, submit_plan
    from joulelab.distill.causal.config import shard_specs
    from joulelab.runs.paths import require_no_runs
    from joulelab.runs.store import store_root

    settings = job_settings(preset, job_options(context.params))
    store = store_root(runs_dir).absolute()
    if resume is not None:
        if experiment is not None or array is not None or repeats > 1 or both or run_dir is not None:
            raise UsageError(
                "--resume uses the settings of the run itself",
                "leave the experiment, its settings, --array, --repeats, --both and --run-dir out",
            )
        request = resubmission(store, resume)
    else:
        request = submission_request(experiment, overrides or [], array, repeats, both)
    planned_steps = checked_steps(request, settings, steps, both, shards)
    works = shard_specs(request.specs, shards) if shards > 1 else []
    if run_dir is not None and request.is_group:
        raise UsageError("--run-dir applies to a single run, but this is a group", "set --runs-dir to choose a store")
    if run_dir is not None:
        require_no_runs(run_dir)
    if not no_check and not dry_run:
        require_files(request)
        check_activation(settings.environment)
    runs = request.preview(store, run_dir) if dry_run else request.create(store, run_dir)
    sharded = preview_shards(store, works) if dry_run else create_shards(store, works, runs.folder)
    jobs = plan(
        runs.members,
        planned_steps,
        report_on=runs.folder,
        nodes=settings.nodes,
        ranks=settings.ranks,
        shards=sharded,
    )
    if dry_run:
        print(dry_text(jobs, runs.folder, store, request.name, settings), end="")
        return
    print_jobs(runs.folder, submit_plan(jobs, runs.folder.absolute(), store, request.name, settings), as_json)


def checked_steps(
    request: SubmissionRequest, settings: JobSettings, steps: str | None, both: bool, shards: int
) -> tuple[str, ...]:
    """The steps with separate jobs, checked against what the runs support."""
    from joulelab.cluster.plan import read_steps, require_kept_model, require_ranks, require_shards, usual_steps

    found = read_steps(steps) if steps else usual_steps(request.specs, both, shards)
    require_shards(shards, found)
    for spec in request.specs:
        require_ranks(spec, settings.nodes, settings.ranks)
        require_kept_model(spec, found)
    return found


def submission_request(
    experiment: str | None, overrides: list[str], array: str | None, repeats: int, both: bool
) -> SubmissionRequest:
    """The requested runs, checked; --both means seeds 0 to 3, as in the original pair of scripts."""
    from joulelab.cli.sweep import sweep_members
    from joulelab.cluster.submission import SubmissionRequest, parse_seeds
    from joulelab.runs.groups import check_group, is_group
    from joulelab.runs.spec import check, parse_overrides, read_layers

    if experiment is None:
        raise UsageError("no experiment was named", "`joulelab experiments` lists them")
    if array is not None and repeats > 1:
        raise UsageError("--array and --repeats both set the number of runs", "give one of them")
    layers = read_layers(experiment)
    if is_group(layers):
        if array is not None or repeats > 1:
            raise UsageError(f"{experiment} is a group, which defines its own seeds", "leave --array and --repeats out")
        group, specs = check_group(layers, parse_overrides(overrides))
        return SubmissionRequest(group.name, tuple(specs), group.about, group.baseline, is_group=True)
    name, specs = sweep_members(["run", experiment, *overrides], repeats)
    if both and array is None and len(specs) == 1:
        array = "0-3"
    if array is not None:
        seeds = parse_seeds(array)
        specs = [check({**spec.model_dump(mode="json"), "seed": seed}) for seed in seeds for spec in specs]
    several = len(specs) > 1
    about = f"{len(specs)} runs of {name}" if several else ""
    return SubmissionRequest(name, tuple(specs), about, is_group=several, sweep=several)


def require_files(request: SubmissionRequest) -> None:
    """Check files and data before submitting; packages and GPUs may exist only on the nodes."""
    from joulelab.errors import ConfigError, SeveralProblems, find_problems

    found = find_problems(spec.preflight for spec in request.specs)
    refused = [problem for problem in found if isinstance(problem, NotFoundError | ConfigError)]
    if refused:
        raise refused[0] if len(refused) == 1 else SeveralProblems(refused)


def job_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """The options given on the command line as settings of a job."""
    return merged({}, requested_settings(FLAGS, {name: params[name] for name in FLAGS}))


def print_jobs(folder: Path, jobs: JobsFile, as_json: bool) -> None:
    if as_json:
        print(jobs.model_dump_json(indent=2))
        return
    from joulelab.cli.console import print_lines

    lines = []
    for job in jobs.jobs:
        tasks = f" x {len(job.runs)}" if job.array and job.runs else ""
        after = f"  after {job.after}" if job.after else ""
        lines.append(f"{job.job_id}  {job.key}{tasks}  {job.about}{after}")
    print_lines(lines)
    note(f"scripts and logs: {folder / 'slurm'}")
    note(f"watch:  joulelab watch {folder.name}")
    note(f"cancel: joulelab cancel {folder.name}")


def watch(
    name: Annotated[
        str,
        typer.Argument(
            help="Run or group: id, part of it, directory or `last`; or a job id.", autocompletion=complete_runs
        ),
    ],
    interval_s: Annotated[float, typer.Option("--interval", min=0.2, help="Seconds between updates.")] = 5.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Show state, stage, power, energy so far, speed, and remaining time and energy, until the run is over.

    Reads the run directory and, if available, queries Slurm for the jobs. Needs no GPU and no torch, and works on any
    machine with access to the directory. Exit code 1 if a run did not succeed.

    Examples:

      joulelab watch last

      joulelab watch 4711 --once --json
    """
    from joulelab.cluster.watch import Watcher
    from joulelab.runs.store import store_root

    watcher = Watcher(store_root(runs_dir), name)
    watched = _print_state(watcher, as_json) if once else _follow(watcher, interval_s, as_json)
    if watched.over and not as_json:
        for row in watcher.accounts():
            print(row.text)
    if watched.over and not watched.succeeded:
        first = next(run for run in watched.runs if run.status != "done")
        if first.status == "queued":
            raise JoulelabError(
                f"{first.run_id} is queued, but no job is left to start it", f"joulelab submit --resume {watched.name}"
            )
        reason = f"{first.run_id}: {first.why or first.status}"
        raise JoulelabError(f"not all runs of {watched.name} succeeded ({reason})", f"joulelab show {watched.name}")


def _print_state(watcher: Watcher, as_json: bool) -> WatchedJobs:
    import json

    from joulelab.cli.console import print_answer
    from joulelab.cluster.watch import watch_grids, watch_line

    watched = watcher.poll()
    if as_json:
        print(json.dumps(watched.data()), flush=True)
    else:
        print_answer(watch_line(watched), watch_grids(watched))
    return watched


def _follow(watcher: Watcher, interval_s: float, as_json: bool) -> WatchedJobs:
    """Update in place on a terminal; elsewhere print a table or a line of JSON per update."""
    if as_json or not sys.stdout.isatty():
        while not (watched := _print_state(watcher, as_json)).over:
            time.sleep(interval_s)
        return watched
    from rich.console import Group
    from rich.live import Live

    from joulelab.cluster.watch import watch_grids
    from joulelab.report.tables.grid import to_rich

    with Live(auto_refresh=False) as live:
        while True:
            watched = watcher.poll()
            live.update(Group(*(to_rich(grid) for grid in watch_grids(watched))), refresh=True)
            if watched.over:
                return watched
            time.sleep(interval_s)


def cancel(
    name: Annotated[
        str,
        typer.Argument(
            help="Run or group: id, part of it, directory or `last`; or a job id.", autocompletion=complete_runs
        ),
    ],
    runs_dir: RunsDir = None,
) -> None:
    """Cancel the Slurm jobs of a run or group.

    A running run saves a checkpoint and its record with the energy so far; a queued run is closed.
    `joulelab submit --resume RUN` resumes it.

    Examples:

      joulelab cancel last

      joulelab cancel 4711
    """
    from joulelab.cluster.submission import cancel_jobs
    from joulelab.cluster.watch import find_watched
    from joulelab.runs.store import store_root

    cancelled = cancel_jobs(find_watched(store_root(runs_dir), name))
    print(f"cancelled jobs: {', '.join(cancelled.job_ids) or 'none left'}")
    if cancelled.runs:
        print(f"not started: {', '.join(cancelled.runs)}")
