"""`joulelab run` and `joulelab demo`: one experiment or a group, measured from start to end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joulelab.cli.options import (
    AsJson,
    DryRun,
    Flag,
    PartOption,
    Prometheus,
    Require,
    RequireGrade,
    RunsDir,
    ShardOption,
    UntilOption,
    budget_settings,
    comparison_of,
    complete_experiments,
    detail,
    note,
    options_in_errors,
    prerun_experiment,
    read_override,
    read_phase,
    read_shard,
    requested_settings,
    script_settings,
)
from joulelab.errors import NonFiniteLoss, UsageError

if TYPE_CHECKING:
    from joulelab.runs.context import Progress
    from joulelab.runs.paths import RunPaths
    from joulelab.runs.phases import Phase, Shard
    from joulelab.runs.record import RunRecord
    from joulelab.runs.spec import RunSpec


def record_json(record: RunRecord) -> str:
    return record.model_dump_json(indent=2)


@dataclass(frozen=True)
class RunOptions:
    """Where a run is stored, how much of it is executed, and how its result is printed."""

    store: Path
    as_json: bool = False
    dry_run: bool = False
    run_dir: Path | None = None
    until: Phase | None = None
    shard: Shard | None = None
    to_json: Callable[[RunRecord], str] = record_json
    finished: Callable[[RunRecord], None] = lambda record: None
    """Called with the record of a run that is done."""


def run(
    context: typer.Context,
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="Name of an experiment (`joulelab experiments`) or a YAML file.", autocompletion=complete_experiments
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings that override the experiment's.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Resume an interrupted run or group.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="AMOUNT",
            help="Training budget of the student, replacing the experiment's limits: joules (500kJ, 0.2kWh) or tokens "
            "(20Mtokens). With budget.counts_teacher=true the teacher's energy is subtracted first.",
        ),
    ] = None,
    data_script: Annotated[
        str | None,
        typer.Option(
            "--data-script",
            metavar="NAME",
            help="Run a single step of a language-model experiment: preprocess_dataset, tulu_preprocess_dataset, "
            "codeforces_preprocess_dataset, openr1_math_preprocess_dataset, logit_caching, synthetic_generation, "
            "preference_dataset or prerun. The experiment reuses its output.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run the short version of the experiment, NAME-quick, if it has one.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the group that compares this experiment with others.")
    ] = False,
    dry_run: DryRun = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            help="Run directory; if it contains this run, resume it. Artifacts are still looked up in --runs-dir.",
            show_default=False,
        ),
    ] = None,
    until: UntilOption = None,
    part: PartOption = None,
    shard: ShardOption = None,
    require: Require = None,
    require_grade: RequireGrade = None,
    prometheus: Prometheus = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment and report the energy of every stage.

    Examples:

      joulelab run demo-kd

      joulelab run demo-kd training.learning_rate=1e-4 seed=3

      joulelab run fitnets --quick

      joulelab run fitnets-response --compare

      joulelab run kd-tiny --data-script logit_caching

      joulelab run kd-small --until teacher --shard 2/8

      joulelab run kd-small --budget 500kJ budget.counts_teacher=true

      joulelab run --resume demo-kd-20260101T120000Z-ab12

      joulelab run demo-kd --run-dir runs/mine
    """
    from joulelab.runs.store import store_root

    options = RunOptions(store_root(runs_dir), as_json, dry_run, run_dir, read_phase(until, part))
    settings = {
        "--budget": budget,
        "--data-script": data_script,
        "--dry-run": dry_run,
        "--run-dir": run_dir,
        "--shard": shard,
        "--require": require,
        "--require-grade": require_grade,
        "--prometheus": prometheus,
    }
    given = [option for option, value in settings.items() if value]
    if resume is not None:
        if experiment is not None or given or compare or quick:
            others = given or ["the experiment and settings"]
            raise UsageError("--resume uses the settings of the run itself", f"leave {', '.join(others)} out")
        resume_run(resume, options)
    elif data_script == "prerun" and experiment is not None:
        from joulelab.cli.machine import prerun

        if overrides or options.until or not set(given) <= {"--data-script", "--run-dir"}:
            raise UsageError("a prerun uses only the energy settings of an experiment", "leave all other options out")
        prerun(prerun_experiment(experiment), run_dir=run_dir, runs_dir=runs_dir, as_json=as_json)
    else:
        experiment, changes = requested_experiment(context.params)
        options = replace(options, shard=read_shard(shard, options.until, data_script))
        with options_in_errors(requested_settings("run", FLAGS, context.params)):
            start(experiment, changes, options)


FLAGS: Mapping[str, Flag] = {
    "require": Flag("energy.require"),
    "require_grade": Flag("energy.require_grade"),
    "prometheus": Flag("energy.prometheus"),
}


def requested_experiment(params: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The experiment that `joulelab run` names and everything that changes it, as `key.path=value`."""
    experiment, overrides = params["experiment"], list(params["overrides"] or [])
    if params["compare"]:
        experiment = comparison_of(experiment)
    if params["quick"]:
        experiment = short_version(experiment)
    if experiment is None:
        raise UsageError("no experiment was named", "`joulelab experiments` lists them; to try one: joulelab demo")
    changes = [f"{one.key}={one.given}" for one in requested_settings("run", FLAGS, params) if one.parameter]
    if params["data_script"]:
        changes += script_settings(params["data_script"], experiment, overrides)
    if params["budget"]:
        changes += budget_settings(params["budget"], experiment, overrides)
    return experiment, [*changes, *overrides]


def short_version(experiment: str | None) -> str:
    from joulelab.runs.spec import experiment_names

    known = experiment_names()
    if f"{experiment}-quick" in known:
        return f"{experiment}-quick"
    others = ", ".join(name.removesuffix("-quick") for name in known if name.endswith("-quick"))
    raise UsageError(f"{experiment or 'this command'} has no short version", f"experiments that have one: {others}")


def start(experiment: str, overrides: list[str], options: RunOptions) -> None:
    """Check all settings before creating a directory, then run the experiment or group.

    With `options.shard` a separate run does that shard of the teacher's work and ends.
    """
    from joulelab.cli.sweep import sweep_in_hint
    from joulelab.runs.groups import check_group, create_group, is_group, label_of
    from joulelab.runs.spec import check, merge, parse_overrides, read_experiment, read_layers, refuse_unused

    settings, changes = read_layers(experiment), parse_overrides(overrides)
    # Checks that run along with a wrong setting import no framework, so a typo is answered at once.
    quick = replace(options, dry_run=True)
    if is_group(settings):
        if options.run_dir is not None or options.until is not None:
            raise _single_run_only(experiment)
        checks, quick_checks = (partial(_checks, options=chosen) for chosen in (options, quick))
        group, specs = check_group(settings, changes, checks, quick_checks)
        if options.dry_run:
            named = [f"{number}: {label_of(spec)}, seed {spec.seed}" for number, spec in enumerate(specs, start=1)]
            print_settings(dict(zip(named, specs, strict=True)), options.as_json)
            return
        made = create_group(options.store, specs, name=group.name, about=group.about, baseline=group.baseline)
        run_group_folder(made.folder, options.as_json)
    else:
        base, requested = read_experiment(experiment), [read_override(text) for text in overrides]
        with sweep_in_hint(f"run {experiment}", base, requested):
            spec = check(merge(base, changes), lambda spec: _checks(spec, quick))
        refuse_unused(changes, [spec])
        if options.shard is not None:
            from joulelab.distill.causal.config import shard_spec

            spec, options = shard_spec(spec, options.shard), replace(options, until=None)
        start_run(spec, options)


def _single_run_only(group: str) -> UsageError:
    return UsageError(f"{group} is a group; --run-dir and --until apply to a single run", "name one of its members")


def start_run(spec: RunSpec, options: RunOptions) -> None:
    """Create a run directory and execute the run; every verb that starts a single run ends up here."""
    from joulelab.runs.attempt import create_run
    from joulelab.runs.paths import require_no_runs

    run_dir = options.run_dir
    if options.until == "teacher" and not spec.has_teacher:
        raise UsageError(
            f"{spec.name} (pipeline {spec.pipeline}) has no teacher, so --until teacher would do nothing",
            "leave it out, or use --until data or --until train",
        )
    if run_dir is not None and not (run_dir / "run.json").exists():
        require_no_runs(run_dir)
    require_inputs([spec], options)
    if options.dry_run:
        print_settings({"": spec}, options.as_json)
    elif not ran_as_worker(run_dir.absolute().parent if run_dir else options.store, spec.pipeline, options.until):
        if run_dir is None:
            run_folder(create_run(options.store, spec).folder, options)
        else:
            run_in_directory(spec, run_dir, options)


def run_in_directory(spec: RunSpec, run_dir: Path, options: RunOptions) -> None:
    """Run in a directory that the user chose; if it contains this run, resume it."""
    from joulelab.runs.attempt import create_run
    from joulelab.runs.lock import holding
    from joulelab.runs.paths import make_chosen_folder

    if not (run_dir / "run.json").exists():
        make_chosen_folder(run_dir)
    with holding(run_dir):  # two processes may be given the same directory at the same time
        if (run_dir / "run.json").exists():
            require_same_settings(run_dir, spec)
            resume_run(str(run_dir), options)
        else:
            run_folder(create_run(options.store, spec, folder=run_dir).folder, options)


def require_same_settings(run_dir: Path, spec: RunSpec) -> None:
    """What is `auto` on the command line was chosen when the run began, maybe on another machine, and stays so."""
    from joulelab.runs.spec import check, read_mapping

    existing = check(read_mapping(run_dir / "config.yaml"))
    was, asked, now = (_dotted(one.model_dump(mode="json")) for one in (existing, spec, spec.for_this_machine()))
    differing = [key for key in was | now if was.get(key) != now.get(key) and asked.get(key) != f"{key}=auto"]
    if differing:
        what = ", ".join(differing) if existing.pipeline == spec.pipeline else "another pipeline"
        raise UsageError(
            f"{run_dir} contains a run with different settings ({what})",
            f"choose another directory, or resume that run: joulelab run --resume {run_dir}",
        )


def ran_as_worker(store: Path, pipeline: str, until: Phase | None = None) -> bool:
    """True on torchrun's ranks above 0, after doing this rank's work in the run of rank 0."""
    from joulelab.runs.execute import current_rank, execute_worker

    rank = current_rank()
    if rank.is_worker:
        execute_worker(rank, store, pipeline, until)
    return rank.is_worker


def require_inputs(specs: list[RunSpec], options: RunOptions) -> None:
    """Check files, data, models, devices, sensors and packages of all runs before anything is created, and raise
    everything that is wrong as one error. A dry run imports no framework."""
    from joulelab.errors import refuse_all

    refuse_all(check for spec in specs for check in _checks(spec, options))


def _checks(spec: RunSpec, options: RunOptions) -> Iterator[Callable[[], object]]:
    from importlib.util import find_spec

    from joulelab import lookup
    from joulelab.errors import refuse_all
    from joulelab.meter.monitor.exposition import require_free
    from joulelab.runs.environment import demand_hardware, demand_sensors
    from joulelab.runs.execute import host_count, rank_count, started_by_torchrun
    from joulelab.trackers.codecarbon import check_installed
    from joulelab.trackers.tracker import require_installed

    yield spec.preflight
    yield lambda: demand_sensors(spec.energy)
    if not options.dry_run:
        yield lambda: demand_hardware(spec.hardware)
        if (options.until or getattr(spec, "until", "train")) == "train":
            yield lambda: spec.require_ranks(started_by_torchrun(), rank_count(), host_count())
            yield spec.require_energy_reading
    if spec.energy.prometheus:
        yield lambda: require_free(spec.energy.prometheus)
    yield lambda: check_installed(spec.energy)
    yield lambda: require_installed(spec.trackers)
    imports = not options.dry_run and all(find_spec(name) is not None for name in ("torch", "transformers"))
    if "data" not in (options.until, getattr(spec, "until", None)):  # preparing data needs no GPU
        yield lambda: _require_device(getattr(spec, "device", "auto"), imports)
    if imports and spec.pipeline in lookup.PIPELINE_CHECKS.names():
        checks = lookup.PIPELINE_CHECKS.resolve(spec.pipeline)
        yield lambda: refuse_all(map(spec.naming_settings, checks(spec.for_this_machine())))


def _require_device(device: str, imports: bool) -> None:
    from joulelab import lookup
    from joulelab.errors import DeviceMissing
    from joulelab.runs import environment

    if device == "cuda" and not environment.gpus():
        raise DeviceMissing("device=cuda was requested but no NVIDIA GPU was found", "set device=cpu or device=auto")
    environment.require_mac(device)
    if device in ("cuda", "mps") and imports:
        lookup.CALCULATIONS.resolve("require-device")(device)


def resume_run(name: str, options: RunOptions) -> None:
    from joulelab.runs.lock import holding
    from joulelab.runs.measure.result import not_restartable
    from joulelab.runs.paths import RunPaths
    from joulelab.runs.spec import read_mapping
    from joulelab.runs.store import find_folder

    folder = find_folder(options.store, name)
    if (folder / "group.json").exists():
        if options.until is not None:
            raise _single_run_only(folder.name)
        resume_group(folder, options.as_json)
        return
    pipeline = read_mapping(folder / "config.yaml").get("pipeline", "")
    if pipeline == "measure":
        raise not_restartable()
    if ran_as_worker(folder.absolute().parent, pipeline, options.until):
        return
    if _was_done(folder, options):
        return
    with holding(folder):
        if _was_done(folder, options):  # by the process that held the lock until now
            return
        for stage, step in RunPaths(folder).checkpointed_steps().items():
            note(f"resuming {stage} from its checkpoint at step {step}")
        run_folder(folder, options)


def _was_done(folder: Path, options: RunOptions) -> bool:
    """Whether the run is done; then a message on stderr states it, and --json prints its record."""
    from joulelab.runs.store import load_record

    record = load_record(folder)
    if record.status != "done":
        return False
    print(f"{folder.name} is already done; nothing to resume", file=sys.stderr)
    if options.as_json:
        print(options.to_json(record))
    return True


def resume_group(folder: Path, as_json: bool) -> None:
    from joulelab.cli.infer import run_models_folder
    from joulelab.cli.sweep import run_sweep_folder
    from joulelab.runs.groups import load_group

    group = load_group(folder)
    if group.compares_inference:
        run_models_folder(folder, "", as_json)
    else:
        (run_sweep_folder if group.sweep else run_group_folder)(folder, as_json)


def run_folder(folder: Path, options: RunOptions) -> None:
    """Execute the run in `folder` and print its record."""
    from joulelab.cli.browse import print_run
    from joulelab.cli.console import watching
    from joulelab.report import report_line
    from joulelab.runs.execute import execute
    from joulelab.runs.paths import RunPaths
    from joulelab.runs.validity import enforce

    note(f"run {folder}")
    try:
        with watching() as progress:
            record = execute(RunPaths(folder), progress, options.until)
    except BaseException as error:
        print(f"show its record: joulelab show {folder}", file=sys.stderr)
        if not isinstance(error, UsageError | NonFiniteLoss):  # resuming does not fix wrong settings
            print(f"resume it:       joulelab run --resume {folder}", file=sys.stderr)
        raise
    if record.status == "queued":
        print(f"phase {options.until} is done; continue with: joulelab run --resume {folder}", file=sys.stderr)
        return
    page = None if record.group else report_line(folder)  # members are on their group's page
    options.finished(record)
    if options.as_json:
        print(options.to_json(record))
    else:
        print_run(record, written=progress.written)
        if page is not None:
            note(page)
    enforce(record)


def run_group_folder(folder: Path, as_json: bool) -> None:
    from joulelab.cli.browse import show_group
    from joulelab.report import report_line
    from joulelab.runs.execute import execute
    from joulelab.runs.validity import enforce

    note(f"group {folder}")
    try:
        records = execute_members(folder, execute)
    except BaseException:
        print(f"show what is done: joulelab show {folder}", file=sys.stderr)
        print(f"resume it:         joulelab run --resume {folder}", file=sys.stderr)
        raise
    show_group(folder, as_json)
    note(report_line(folder))
    for record in records:
        enforce(record)


def execute_members(folder: Path, run_one: Callable[[RunPaths, Progress], RunRecord]) -> list[RunRecord]:
    """Run the members of a group that are not done; each ends with a line of progress."""
    from joulelab.cli.console import watching
    from joulelab.report.tables.run_tables import run_result
    from joulelab.runs.groups import execute_group, load_group
    from joulelab.runs.paths import GroupPaths

    with watching(stages=False) as progress:

        def run_member(run: RunPaths) -> RunRecord:
            record, members = run_one(run, progress), load_group(folder).members
            number = next(number for number, member in enumerate(members, 1) if member.run_id == record.run_id)
            title = f"[{number}/{len(members)}] {record.label}, seed {members[number - 1].seed}"
            progress.line(run_result(record, title, member=True))
            return record

        return execute_group(GroupPaths(folder), progress, run_member)


def print_settings(specs: Mapping[str, RunSpec], as_json: bool = False) -> None:
    """Settings of runs by name; a single run has the name "" and is printed without one.

    A terminal gets a screen: the settings that are not defaults, of several runs first those that all share. Files,
    pipes and -v get all settings as YAML.
    """
    import json
    import shutil

    import yaml

    from joulelab.cli.console import print_lines

    complete = {name: spec.model_dump(mode="json") for name, spec in specs.items()}
    settings = complete.get("", complete)
    if as_json:
        print(json.dumps(settings, indent=2))
    elif detail() == "verbose" or not sys.stdout.isatty():
        print(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), end="")
    else:
        print_lines(settings_lines(specs, shutil.get_terminal_size().columns), more="all settings, as YAML")


# Settings that the title of a member already shows.
_IN_TITLE = ("name", "about", "label", "seed")


def settings_lines(specs: Mapping[str, RunSpec], width: int) -> list[str]:
    """`key.path=value`, as on the command line, for what is not a default."""
    import textwrap

    changed = {name: _dotted(spec.model_dump(mode="json", exclude_defaults=True)) for name, spec in specs.items()}
    first, *others = changed.values()
    shared = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    if not others:
        return list(shared.values())
    lines = ["settings that are not defaults"]
    for name, own in {"all runs": shared, **changed}.items():
        texts = [text for key, text in own.items() if own is shared or key not in (*shared, *_IN_TITLE)]
        lines += textwrap.wrap(f"{name}: {' '.join(texts)}", width, subsequent_indent="  ", break_on_hyphens=False)
    return lines


def _dotted(settings: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Each setting as `key.path=value`, by its path."""
    import json

    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= _dotted(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = f"{prefix}{key}={value if isinstance(value, str) else json.dumps(value)}"
    return found


def demo(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings for every member of the group.")
    ] = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a teacher, train a student with three methods and two seeds each, and compare energy and accuracy."""
    from joulelab import lookup
    from joulelab.data.sources import locate_sample
    from joulelab.runs.environment import discovery_text, sensors_line
    from joulelab.runs.store import store_root

    lookup.require_extra("joulelab demo", "train")
    for name in ("minilm", "reviews"):
        locate_sample(name)
    note(discovery_text(estimate_cpu=True) if detail() == "verbose" else sensors_line(estimate_cpu=True))
    start("demo", overrides or [], RunOptions(store_root(runs_dir), as_json))
