"""`joulelab submit`, `watch` and `cancel`: experiments, other commands and programs on a Slurm cluster."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.cli.options import (
    AsJson,
    Flag,
    GroupedCommand,
    RequestedSetting,
    RunsDir,
    command_named,
    complete_experiments,
    complete_runs,
    detail,
    merged,
    note,
    options_in_errors,
    prerun_experiment,
    requested_settings,
)
from joulelab.errors import JoulelabError, NotFoundError, UsageError

if TYPE_CHECKING:
    from joulelab.cluster.job_settings import JobSettings
    from joulelab.cluster.jobs import JobsFile
    from joulelab.cluster.plan import PlannedJob
    from joulelab.cluster.submission import SubmissionRequest
    from joulelab.cluster.watch import WatchedJobs, Watcher
    from joulelab.runs.spec import RunSpec


_RESOURCES, _ENVIRONMENT, _EXPERIMENTS = "Resources", "Environment of the job", "Experiments and sweeps"


def _resource(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False, rich_help_panel=_RESOURCES)


def _environment(text: str) -> Any:
    return typer.Option(help=text, show_default=False, rich_help_panel=_ENVIRONMENT)


_SAME_NAME = (
    *("partition", "cpu_partition", "time", "gpus", "gpu_type", "nodes", "ranks_per_node", "cpus", "memory"),
    *("account", "qos", "constraint", "warn_s", "hf_home", "cache_dir", "scratch"),
)
FLAGS: Mapping[str, Flag] = {
    **{name: Flag(name) for name in _SAME_NAME},
    "cpu_job_cpus": Flag("cpu_jobs.cpus"),
    "cpu_job_memory": Flag("cpu_jobs.memory"),
    "cpu_job_time": Flag("cpu_jobs.time"),
    "venv": Flag("environment.venv"),
    "conda": Flag("environment.conda"),
    "module": Flag("environment.modules", switch=True),
    "sbatch": Flag("sbatch", switch=True),
    "exclusive": Flag("exclusive", switch=True),
    "no_requeue": Flag("requeue", lambda _: False, switch=True),
}
# Options of submit and of most verbs; with submit they always apply to the submission.
_ALWAYS_OURS = ("--runs-dir", "--json", "--dry-run", "--run-dir", "--verbose", "-v", "--quiet", "-q")
_PROGRAM = "measure"


class SubmitCommand(GroupedCommand):
    """`submit [OPTIONS] VERB ...`: options after the verb are the verb's, except those that only submit has.

    After `--` there is a program and its arguments; none of them are options of submit.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own, ctx.meta[VERB] = split_command_line(self, args)
        return super().parse_args(ctx, own)


VERB = "joulelab.verb"


def split_command_line(command: Any, args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of submit itself, and the verb with its words (empty if an experiment is named)."""
    ours = options_of(command)
    place = 0
    while place < len(args) and args[place].startswith("-") and args[place] != "--":
        name, equals, _ = args[place].partition("=")
        place += 2 if ours.get(name) and not equals else 1
    own, rest = list(args[:place]), list(args[place:])
    if rest and rest[0] not in ("--", *REQUESTS) and any(word.startswith("--data-script") for word in rest):
        rest = ["run", *rest]  # `submit EXPERIMENT --data-script NAME`: the option is that of `run`
    if not rest or (rest[0] != "--" and rest[0] not in REQUESTS):
        return list(args), []
    if rest[0] == "--":
        return own, [_PROGRAM, *rest]
    verb = [rest.pop(0)]
    theirs = options_of(command_named(verb[0]))
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if word == "--":
            verb += [word, *rest]
            break
        if name in ours and (name in _ALWAYS_OURS or name not in theirs):
            own.append(word)
            if ours[name] and not equals and rest:
                own.append(rest.pop(0))
        else:
            verb.append(word)
    return own, verb


def options_of(command: Any) -> dict[str, bool]:
    """Option -> whether it takes a value; for a command with subcommands, the options of all of them."""
    if hasattr(command, "commands"):
        return {name: value for one in command.commands.values() for name, value in options_of(one).items()}
    options = [param for param in command.params if param.param_type_name == "option"]
    return {name: not param.is_flag for param in options for name in (*param.opts, *param.secondary_opts)}


def submit(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="EXPERIMENT [KEY.PATH=VALUE]... | VERB ... | -- PROGRAM ...",
            help="Name of an experiment (`joulelab experiments`) or a YAML file, with settings (commas sweep); or a "
            "command of joulelab: run, train, infer, evaluate, sweep, prepare, measure; or a program after `--`.",
            autocompletion=complete_experiments,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="`h100`, `l40s`, or a preset of the site file.", rich_help_panel=_RESOURCES),
    ] = None,
    partition: Annotated[str | None, _resource("Partition of GPU jobs.")] = None,
    time: Annotated[str | None, _resource("Time limit per GPU job: minutes, H:MM:SS, D-HH:MM:SS.")] = None,
    gpus: Annotated[int | None, _resource("GPUs per node, one process each.")] = None,
    gpu_type: Annotated[str | None, _resource("Slurm's name of the GPU type.")] = None,
    nodes: Annotated[int | None, _resource("Nodes per job.")] = None,
    ranks_per_node: Annotated[int | None, _resource("Processes per node (default: one per GPU).")] = None,
    cpus: Annotated[int | None, _resource("CPU cores per node of GPU jobs.")] = None,
    memory: Annotated[str | None, _resource("Memory per node of GPU jobs, as in 64G.", "--mem")] = None,
    cpu_partition: Annotated[str | None, _resource("Partition of CPU jobs (data, report).")] = None,
    cpu_job_cpus: Annotated[int | None, _resource("CPU cores of CPU jobs (default: 4).")] = None,
    cpu_job_memory: Annotated[str | None, _resource("Memory of CPU jobs (default: 8G).", "--cpu-job-mem")] = None,
    cpu_job_time: Annotated[str | None, _resource("Time limit of CPU jobs (default: 2:00:00).")] = None,
    account: Annotated[str | None, _resource("Account to charge.")] = None,
    qos: Annotated[str | None, _resource("Quality of service.")] = None,
    constraint: Annotated[str | None, _resource("Required node features.")] = None,
    exclusive: Annotated[bool, _resource("Allocate whole nodes (for RAPL).", "--exclusive")] = False,
    warn_s: Annotated[int | None, _resource("Seconds before the limit to save and stop.", "--warn")] = None,
    no_requeue: Annotated[bool, _resource("Do not requeue at the time limit.", "--no-requeue")] = False,
    sbatch: Annotated[list[str] | None, _resource("Additional sbatch option, verbatim.", "--sbatch")] = None,
    venv: Annotated[str | None, _environment("Virtual environment of the job.")] = None,
    conda: Annotated[str | None, _environment("Conda environment of the job.")] = None,
    module: Annotated[list[str] | None, _environment("Module to load (repeatable).")] = None,
    hf_home: Annotated[str | None, _environment("HF_HOME of the job.")] = None,
    cache_dir: Annotated[str | None, _environment("XDG_CACHE_HOME of the job.")] = None,
    scratch: Annotated[str | None, _environment("TMPDIR of the job.")] = None,
    array: Annotated[
        str | None, typer.Option(metavar="0-3", help="Seeds, one run each.", rich_help_panel=_EXPERIMENTS)
    ] = None,
    repeats: Annotated[
        int, typer.Option(metavar="N", help="Runs per configuration (seeds).", rich_help_panel=_EXPERIMENTS)
    ] = 1,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="data,teacher,students,evaluation,report",
            help="Steps with separate jobs.",
            rich_help_panel=_EXPERIMENTS,
        ),
    ] = None,
    both: Annotated[
        bool,
        typer.Option(
            "--both", help="Preprocess in a CPU job, then distill with seeds 0-3.", rich_help_panel=_EXPERIMENTS
        ),
    ] = False,
    shards: Annotated[
        int,
        typer.Option(metavar="N", help="Split the teacher's work into N tasks.", rich_help_panel=_EXPERIMENTS),
    ] = 1,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN|GROUP", help="Resubmit the unfinished runs of an earlier submission.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Run directory.", show_default=False)] = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Skip the check of environment, files, partition and GPU type.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the scripts without submitting.")] = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Submit an experiment, another command of joulelab, or any program to Slurm, as job scripts in the run directory.

    A program is measured with `joulelab measure`. Options of submit precede a verb; after it, options belong to the
    verb unless only submit has them. Account, partition and environment can be set once in
    ~/.config/joulelab/slurm.yaml (docs/slurm.md). A run that reaches its time limit saves a checkpoint, is requeued and
    resumes. Several runs (a group, --array, --repeats, comma-separated values) become an array; data and teacher are
    prepared once before it. --shards splits the teacher's work (logits, completions, judgments) into an array of tasks
    whose outputs the students merge.

    Examples:

      joulelab submit --preset h100 -- python train.py --epochs 3

      joulelab submit demo-kd --preset h100 --time 2:00:00 --dry-run

      joulelab submit demo --partition gpu --cpu-partition cpu

      joulelab submit train gpt2 --batch_size 8,16 --max_steps 100 --preset l40s

      joulelab submit infer deit-t deit-s --batch-size 1,8 --preset l40s

      joulelab submit prepare dump sample:reviews --dump_file data/dump.txt

      joulelab submit distilbert --both --preset h100

      joulelab submit my.yaml --nodes 2 --gpus 4

      joulelab submit kd-small --shards 8 --repeats 3 --preset h100

      joulelab watch last
    """
    from joulelab.cluster import slurm
    from joulelab.cluster.job_settings import job_settings
    from joulelab.cluster.plan import plan, plan_program
    from joulelab.cluster.script import check_activation
    from joulelab.cluster.submission import (
        create_shards,
        preview_shards,
        refuse_if_jobs_left,
        require_resources,
        resubmission,
        submit_plan,
    )
    from joulelab.distill.causal.config import shard_specs
    from joulelab.runs.paths import require_no_runs
    from joulelab.runs.store import store_root

    store = store_root(runs_dir).absolute()
    verb = context.meta[VERB]
    program: tuple[str, ...] = ()
    if resume is not None:
        if words or verb or array is not None or repeats > 1 or both or run_dir is not None:
            raise UsageError(
                "--resume uses the settings of the run itself",
                "leave the experiment, its settings, --array, --repeats, --both and --run-dir out",
            )
        request = resubmission(store, resume)
        require_restartable(request)
    elif verb:
        refuse_experiment_options(verb[0], context.params)
        request, program = REQUESTS[verb[0]](verb[1:], repeats)
    else:
        request = experiment_request(words or [], array, repeats, both)
    on_gpu = any(spec.uses_gpu for spec in request.specs)
    requested = job_options(context.params, on_gpu)
    with options_in_errors(requested):
        settings = job_settings(preset, merged({}, requested))
    planned_steps: tuple[str, ...] = ()
    if program:
        require_one_node(settings)
        note_options_of_program(context.command, program)
    else:
        planned_steps = checked_steps(request, settings, steps, both, shards)
    works = shard_specs(request.specs, shards) if shards > 1 else []
    if run_dir is not None and request.is_group:
        raise UsageError("--run-dir applies to a single run, but this is a group", "set --runs-dir to choose a store")
    if run_dir is not None:
        require_no_runs(run_dir)
    if not dry_run:
        slurm.require("sbatch")
    if not no_check and not dry_run:
        require_files(request, program)
    if not dry_run:
        slurm.require_controller()
        if request.earlier is not None:
            refuse_if_jobs_left(request.earlier)
    if not no_check and not dry_run:
        require_resources(settings, on_gpu)
        check_activation(settings.environment, needs_torch=on_gpu and not program)
    runs = request.preview(store, run_dir) if dry_run else request.create(store, run_dir)
    if program:
        jobs = plan_program(runs.members[0].folder, program)
    else:
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
        print_scripts(jobs, runs.folder, store, request.name, settings, as_json)
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
        if spec.uses_gpu:
            require_ranks(spec, settings.nodes, settings.ranks)
        require_kept_model(spec, found)
    return found


def experiment_request(words: Sequence[str], array: str | None, repeats: int, both: bool) -> SubmissionRequest:
    """The runs of an experiment or group, checked; --both means seeds 0 to 3, as in the original pair of scripts."""
    from joulelab.cli.sweep import sweep_members
    from joulelab.cluster.submission import SubmissionRequest, parse_seeds
    from joulelab.runs.groups import check_group, is_group
    from joulelab.runs.spec import check, parse_overrides, read_layers

    if not words:
        raise UsageError(
            "nothing to submit was named",
            "name an experiment (`joulelab experiments`), a command such as `train gpt2`, or a program after `--`",
        )
    experiment, *overrides = words
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
    return _sweep_request(name, specs)


def _sweep_request(name: str, specs: Sequence[RunSpec]) -> SubmissionRequest:
    from joulelab.cluster.submission import SubmissionRequest

    several = len(specs) > 1
    about = f"{len(specs)} runs of {name}" if several else ""
    return SubmissionRequest(name, tuple(specs), about, is_group=several, sweep=several)


# `submit VERB ...`: the verb's own command parses its words; the runs are those that the verb would start here.

Requested = tuple["SubmissionRequest", tuple[str, ...]]
"""The runs, and the command line of a measured program (otherwise empty)."""


def _parsed(verb: str, words: Sequence[str]) -> dict[str, Any]:
    command = command_named(verb)
    with command.make_context(f"joulelab {verb}", list(words)) as context:
        return dict(context.params)


def _run_request(words: Sequence[str], repeats: int) -> Requested:
    from joulelab.cli.run import FLAGS as RUN_FLAGS
    from joulelab.cli.run import requested_experiment

    params = _parsed("run", words)
    for name, instead in (
        ("resume", "joulelab submit --resume RUN"),
        ("until", "--steps of submit"),
        ("part", "--steps of submit"),
        ("shard", "--shards of submit"),
    ):
        if params[name] is not None:
            raise UsageError(f"--{name} of `run` has no effect in a job", f"use {instead}")
    if params["data_script"] == "prerun" and params["experiment"] is not None:
        if params["overrides"]:
            raise UsageError("a prerun uses only the energy settings of an experiment", "leave all other options out")
        command = ["joulelab", "prerun", prerun_experiment(params["experiment"])]  # checks the machine of the job
        return _program_request(["--", *command], repeats)
    experiment, changes = requested_experiment(params)
    with options_in_errors(requested_settings("run", RUN_FLAGS, params)):
        return experiment_request([experiment, *changes], None, repeats, both=False), ()


def _train_request(words: Sequence[str], repeats: int) -> Requested:
    from joulelab.cli.sweep import sweep_members

    return _sweep_request(*sweep_members(["train", *words], repeats)), ()


def _evaluate_request(words: Sequence[str], repeats: int) -> Requested:
    from joulelab.cli.evaluate import evaluate_spec

    spec = evaluate_spec(_parsed("evaluate", words))
    return _sweep_request(spec.name, [spec]), ()


def _sweep_verb_request(words: Sequence[str], repeats: int) -> Requested:
    from joulelab.cli.sweep import sweep_members

    params = _parsed("sweep", words)
    if params["resume"] is not None:
        raise UsageError("--resume of `sweep` has no effect in a job", "use joulelab submit --resume GROUP")
    name, specs = sweep_members(params["words"] or [], max(params["repeats"], repeats))
    request = _sweep_request(name, specs)
    return replace(request, name=params["name"] or f"sweep-{name}"), ()


def _infer_request(words: Sequence[str], repeats: int) -> Requested:
    from joulelab.cli.infer import inference_request

    name, specs = inference_request(_parsed("infer", words))
    return _sweep_request(name, specs), ()


def _prepare_request(words: Sequence[str], repeats: int) -> Requested:
    from joulelab.cli.prepare import prepare_spec

    steps = command_named("prepare").commands
    if not words or words[0] not in steps:
        found = f"'{words[0]}'" if words else "nothing"
        raise UsageError(f"prepare: expected one of {', '.join(steps)}, found {found}", "joulelab prepare --help")
    with steps[words[0]].make_context(f"joulelab prepare {words[0]}", list(words[1:])) as context:
        spec = prepare_spec(words[0], context.params)
    return _sweep_request(spec.name, [spec]), ()


def _program_request(words: Sequence[str], repeats: int) -> Requested:
    from joulelab.cli.measure import measure_spec
    from joulelab.redaction import redact_command

    params = _parsed(_PROGRAM, words)
    command = tuple(params["command"] or ())
    if params["json_to"] is not None:
        raise UsageError("--json-to has no effect in a job", "joulelab show RUN --json prints the record")
    spec = measure_spec(params)
    if redact_command(command) != command:
        raise UsageError(
            "the command line contains something that looks like a secret; a job script would store it as plain text",
            "export it as an environment variable before submitting: sbatch passes the environment on to the job",
        )
    if Path(command[0]).name == "srun":
        raise UsageError(
            "tasks of srun are not children of the measured program, so their CPU time would not be recorded",
            "leave srun out, or write a job script with srun in front of `joulelab measure` (docs/slurm.md)",
        )
    return _sweep_request(spec.name, [spec]), command


REQUESTS: Mapping[str, Callable[[Sequence[str], int], Requested]] = {
    "run": _run_request,
    "train": _train_request,
    "infer": _infer_request,
    "evaluate": _evaluate_request,
    "sweep": _sweep_verb_request,
    "prepare": _prepare_request,
    _PROGRAM: _program_request,
}
# Options that apply to experiments with data, teacher and students; `run EXPERIMENT` and sweeps use --repeats.
_FOR_EXPERIMENTS = {"array": None, "steps": None, "both": False, "shards": 1}


def refuse_experiment_options(verb: str, params: Mapping[str, Any]) -> None:
    applies = {**_FOR_EXPERIMENTS} if verb in ("run", "train", "sweep") else {**_FOR_EXPERIMENTS, "repeats": 1}
    for name, absent in applies.items():
        if params[name] != absent and not (verb == "run" and name in ("steps", "shards")):
            option = f"--{name}"
            hint = "joulelab submit EXPERIMENT accepts it"
            if name == "repeats":
                hint = "use --repeat N of measure" if verb == _PROGRAM else "leave it out"
            raise UsageError(f"{option} does not apply to `{verb}`", hint)


def require_restartable(request: SubmissionRequest) -> None:
    if any(spec.pipeline == "measure" for spec in request.specs):
        raise UsageError(
            f"{request.name} is a measured program, which cannot be resumed",
            "submit it again: joulelab submit -- PROGRAM ...",
        )


def require_one_node(settings: JobSettings) -> None:
    if settings.nodes > 1 or (settings.ranks_per_node or 1) > 1:
        raise UsageError(
            f"a measured program is started once, on one node; {settings.nodes} node(s) with "
            f"{settings.ranks_per_node or 1} process(es) were requested",
            "start its processes with torchrun or accelerate; for several nodes write a job script with srun in front "
            "of `joulelab measure` (docs/slurm.md)",
        )


def require_files(request: SubmissionRequest, program: Sequence[str]) -> None:
    """Check files and data before submitting; packages and GPUs may exist only on the nodes."""
    from joulelab.errors import ConfigError, SeveralProblems, find_problems

    if program:
        from joulelab.runs.measure.program import find_program

        find_program(program[0])
        script = script_of(program)
        if script and not Path(script).exists() and not (_is_shell(program) and shutil.which(script)):
            raise NotFoundError(
                f"{script}, the script that {program[0]} would run, does not exist",
                "the path is relative to the current directory; --no-check submits it anyway",
            )
    found = find_problems(spec.preflight for spec in request.specs)
    refused = [problem for problem in found if isinstance(problem, NotFoundError | ConfigError)]
    if refused:
        raise refused[0] if len(refused) == 1 else SeveralProblems(refused)


_SHELLS = ("bash", "sh", "dash", "zsh")
_OPTIONS_WITH_VALUE = ("-W", "-X", "-o", "-O", "+O", "--rcfile", "--init-file", "--check-hash-based-pycs")


def _is_shell(program: Sequence[str]) -> bool:
    return Path(program[0]).name in _SHELLS


def script_of(program: Sequence[str]) -> str | None:
    """The script that python or a shell is to run; None for `-c`, `-m`, standard input and other programs."""
    if not (_is_shell(program) or re.fullmatch(r"python[\d.]*", Path(program[0]).name)):
        return None
    words = iter(program[1:])
    for word in words:
        if word in _OPTIONS_WITH_VALUE:
            next(words, None)
        elif word == "-" or re.fullmatch(r"-[A-Za-z]*[cms]\S*", word):
            return None
        elif not word.startswith(("-", "+")):
            return word
    return None


def note_options_of_program(command: Any, program: Sequence[str]) -> None:
    """After `--` an option that submit also has is easily meant for submit."""
    ours = options_of(command)
    names = (word.partition("=")[0] for word in program[1:])
    found = list(dict.fromkeys(name for name in names if name.startswith("--") and name in ours))
    if found:
        note(f"passed to the program, not to submit: {', '.join(found)} (options of submit precede `--`)")


def job_options(params: Mapping[str, Any], on_gpu: bool = True) -> list[RequestedSetting]:
    """The settings of a job that were given as options; --cpus, --mem and --time of a run without a GPU are
    those of its CPU job."""
    given = {name: params[name] for name in FLAGS}
    if not on_gpu:
        for name, ours in (("cpus", "cpu_job_cpus"), ("memory", "cpu_job_memory"), ("time", "cpu_job_time")):
            given[ours] = given[ours] if given[ours] is not None else given[name]
    return requested_settings("submit", FLAGS, given)


def print_scripts(
    jobs: Sequence[PlannedJob], folder: Path, store: Path, name: str, settings: JobSettings, as_json: bool
) -> None:
    """For --dry-run: the scripts; with -q only the commands that would submit them."""
    from joulelab.cluster.submission import dry_data, dry_text, sbatch_line

    if as_json:
        import json

        print(json.dumps(dry_data(jobs, folder, store, name, settings), indent=2))
    elif detail() == "quiet":
        print("\n".join(sbatch_line(job, folder) for job in jobs))
    else:
        print(dry_text(jobs, folder, store, name, settings), end="")


def print_jobs(folder: Path, jobs: JobsFile, as_json: bool) -> None:
    if as_json:
        print(jobs.model_dump_json(indent=2))
        return
    from joulelab.cli.console import print_lines

    lines = []
    for job in jobs.jobs:
        tasks = f" x {len(job.runs)}" if job.array and job.runs else ""
        after = f"  after {job.after}" if job.after else ""
        lines.append(f"job {job.job_id}  {job.key}{tasks}  {job.about}{after}")
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
    interval_s: Annotated[float, typer.Option("--interval", min=0.2, max=3600, help="Seconds between updates.")] = 5.0,
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

    A run in progress saves a checkpoint and a record with the energy so far; a queued run is closed.
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
