"""`joulelab run`: one experiment, or a group of them, measured from the first byte to the last."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joulelab.cli.options import AsJson, Require, RequireGrade, RunsDir, ShardOption, read_share
from joulelab.errors import UsageError

if TYPE_CHECKING:
    from joulelab.runs.phases import Phase
    from joulelab.runs.sharding import Shard
    from joulelab.runs.spec import RunSpec


def run(
    experiment: Annotated[
        str | None, typer.Argument(help="Name of an experiment (`joulelab experiments`) or a YAML file.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings that replace the experiment's.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Go on with a run or group that was cut off.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="AMOUNT",
            help="How much the student may train, in place of the experiment's limits: joules (500kJ, 0.2kWh) or "
            "tokens (20Mtokens). budget.counts_teacher=true takes the teacher's joules off first.",
        ),
    ] = None,
    data_script: Annotated[
        str | None,
        typer.Option(
            "--data-script",
            metavar="NAME",
            help="Do one step of a language-model experiment by itself: preprocess_dataset, tulu_preprocess_dataset, "
            "codeforces_preprocess_dataset, openr1_math_preprocess_dataset, logit_caching, synthetic_generation, "
            "preference_dataset or prerun. The experiment finds what it made.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="The experiment's short form, NAME-quick, where it has one.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="The group that sets the experiment beside others, in place of it.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the merged settings; run nothing.")
    ] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            help="Run directory; if it contains this run, resume it. Artifacts are still searched in --runs-dir.",
            show_default=False,
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            "--part", metavar="data|teacher|train", help="Stop where the next part begins; --resume does that."
        ),
    ] = None,
    shard: ShardOption = None,
    require: Require = None,
    require_grade: RequireGrade = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment and print what it cost.

    Examples:

      joulelab run demo-kd

      joulelab run demo-kd training.learning_rate=1e-4 seed=3

      joulelab run fitnets --quick

      joulelab run fitnets-response --compare

      joulelab run kd-tiny --data-script logit_caching

      joulelab run kd-small --part teacher --shard 2/8

      joulelab run kd-small --budget 500kJ budget.counts_teacher=true

      joulelab run --resume demo-kd-20260101T120000Z-ab12

      joulelab run demo-kd --run-dir runs/mine
    """
    from joulelab.runs.store import store_root

    store = store_root(runs_dir)
    only = read_part(part)
    if compare:
        from joulelab.cli.options import comparison_of

        experiment = comparison_of(experiment)
    experiment = short_form(experiment) if quick else experiment
    settings = {
        "--budget": budget,
        "--data-script": data_script,
        "--dry-run": dry_run,
        "--run-dir": run_dir,
        "--shard": shard,
        "--require": require,
        "--require-grade": require_grade,
    }
    given = [option for option, value in settings.items() if value]
    if resume is not None:
        if experiment is not None or given:
            others = given or ["the experiment and settings"]
            raise UsageError("--resume takes its settings from the run itself", f"leave {', '.join(others)} out")
        resume_run(store, resume, as_json, only)
    elif experiment is None:
        raise UsageError(
            "no experiment was named", "`joulelab experiments` lists them; for a first look: joulelab demo"
        )
    elif data_script == "prerun":
        from joulelab.cli.machine import prerun
        from joulelab.cli.options import rehearsed

        if overrides or part or given != ["--data-script"]:
            raise UsageError("a prerun takes of the experiment only its energy settings", "leave everything else out")
        prerun(rehearsed(experiment), runs_dir=runs_dir, as_json=as_json)
    else:
        from joulelab.cli.options import budget_settings, script_settings

        demanded = {"require": require, "require_grade": require_grade}
        asked = [f"energy.{key}={value}" for key, value in demanded.items() if value is not None]
        asked += script_settings(data_script, experiment, overrides or []) if data_script else []
        asked += budget_settings(budget, experiment, overrides or []) if budget else []
        share = read_share(shard, only, data_script)
        start(store, experiment, [*asked, *(overrides or [])], dry_run, as_json, run_dir, only, share)


def read_part(name: str | None) -> Phase | None:
    from joulelab import lookup
    from joulelab.runs.phases import PHASES

    found = next((part for part in PHASES if part == name), None)
    if name is not None and found is None:
        raise lookup.unknown("part", name, PHASES, "the stages' names say which part they belong to")
    return found


def short_form(experiment: str | None) -> str:
    from joulelab.runs.spec import experiment_names

    known = experiment_names()
    if f"{experiment}-quick" in known:
        return f"{experiment}-quick"
    others = ", ".join(name.removesuffix("-quick") for name in known if name.endswith("-quick"))
    raise UsageError(f"{experiment or 'what was named'} has no short form", f"these have one: {others}")


def start(
    store: Path,
    experiment: str,
    overrides: list[str],
    dry_run: bool = False,
    as_json: bool = False,
    run_dir: Path | None = None,
    part: Phase | None = None,
    share: Shard | None = None,
) -> None:
    """Check everything first: a mistake in the settings leaves no folder behind.

    With a `share` it is a run of its own that does this share of the teacher's work, and is done then.
    """
    from joulelab.runs.groups import check_group, create_group, is_group, label_of
    from joulelab.runs.spec import check, merge, parse_overrides, read_experiment, read_layers

    settings, changes = read_layers(experiment), parse_overrides(overrides)
    if is_group(settings):
        if run_dir is not None or part is not None:
            raise _one_run_only(experiment)
        group, specs = check_group(settings, changes)
        require_inputs(specs)
        if dry_run:
            named = [f"{number}: {label_of(spec)}, seed {spec.seed}" for number, spec in enumerate(specs, start=1)]
            print_settings(
                {name: spec.model_dump(mode="json") for name, spec in zip(named, specs, strict=True)}, as_json
            )
            return
        made = create_group(store, specs, name=group.name, about=group.about, baseline=group.baseline)
        run_group_folder(made.folder, as_json)
    else:
        spec = check(merge(read_experiment(experiment), changes))
        if share is not None:
            from joulelab.distill.causal.phases import shard_spec

            spec, part = shard_spec(spec, share), None
        start_run(store, spec, dry_run, as_json, run_dir, part)


def _one_run_only(group: str) -> UsageError:
    return UsageError(
        f"{group} is a group: each member has a folder of its own, and is run whole",
        "--run-dir and --part go with one run",
    )


def start_run(
    store: Path,
    spec: RunSpec,
    dry_run: bool = False,
    as_json: bool = False,
    run_dir: Path | None = None,
    part: Phase | None = None,
) -> None:
    """The one place where a single run's folder is made and set going."""
    from joulelab.runs.attempt import create_run
    from joulelab.runs.paths import require_no_runs

    if part == "teacher":
        require_teacher(spec)
    if run_dir is not None and not (run_dir / "run.json").exists():
        require_no_runs(run_dir)
    require_inputs([spec])
    if dry_run:
        print_settings(spec.model_dump(mode="json"), as_json)
    elif not followed(run_dir.absolute().parent if run_dir else store, spec.pipeline, part):
        if run_dir is None:
            run_folder(create_run(store, spec).folder, as_json, part)
        else:
            run_chosen_folder(store, spec, run_dir, as_json, part)


def run_chosen_folder(store: Path, spec: RunSpec, run_dir: Path, as_json: bool, part: Phase | None) -> None:
    from joulelab.runs.attempt import create_run
    from joulelab.runs.lock import holding
    from joulelab.runs.paths import make_chosen_folder

    if not (run_dir / "run.json").exists():
        make_chosen_folder(run_dir)
    with holding(run_dir):  # two processes may be given one folder at the same time
        if (run_dir / "run.json").exists():
            require_same_settings(run_dir, spec)
            resume_run(store, str(run_dir), as_json, part)
        else:
            run_folder(create_run(store, spec, folder=run_dir).folder, as_json, part)


def require_teacher(spec: RunSpec) -> None:
    if not spec.has_teacher:
        raise UsageError(
            f"{spec.name} (pipeline {spec.pipeline}) has no teacher, and --part teacher nothing to do",
            "leave it out; --part data and --part train are the others",
        )


def require_same_settings(run_dir: Path, spec: RunSpec) -> None:
    """A folder chosen by hand goes on with its own run and no other."""
    from joulelab.runs.spec import check, read_mapping

    held = check(read_mapping(run_dir / "config.yaml"))
    if held != spec:
        differing = [name for name in type(spec).model_fields if getattr(held, name, None) != getattr(spec, name)]
        raise UsageError(
            f"{run_dir} holds a run with other settings ({', '.join(differing) or 'another pipeline'})",
            "name another folder, or go on with that run: joulelab run --resume " + str(run_dir),
        )


def followed(store: Path, pipeline: str, part: Phase | None = None) -> bool:
    """Whether this process is a following rank of torchrun's; then its work is done here, in the first rank's run."""
    from joulelab.runs.execute import current_rank, execute_worker

    place = current_rank()
    if place.is_worker:
        execute_worker(place, store, pipeline, part)
    return place.is_worker


def require_inputs(specs: list[RunSpec]) -> None:
    """Files, sensors and packages that were asked for, looked for while nothing has been made yet."""
    from joulelab.runs.sensor_discovery import demand_sensors
    from joulelab.trackers.codecarbon import check_installed
    from joulelab.trackers.tracker import require_installed

    for spec in specs:
        spec.preflight()
        demand_sensors(spec.energy)
        check_installed(spec.energy)
        require_installed(spec.trackers)


def resume_run(store: Path, name: str, as_json: bool, part: Phase | None = None) -> None:
    from joulelab.runs.lock import holding
    from joulelab.runs.measure.measure_session import not_restartable
    from joulelab.runs.paths import RunPaths
    from joulelab.runs.spec import read_mapping
    from joulelab.runs.store import find_folder, load_record

    folder = find_folder(store, name)
    if (folder / "group.json").exists():
        if part is not None:
            raise _one_run_only(folder.name)
        resume_group(folder, as_json)
        return
    pipeline = read_mapping(folder / "config.yaml").get("pipeline", "")
    if pipeline == "measure":
        raise not_restartable()
    if followed(folder.absolute().parent, pipeline, part):
        return
    if load_record(folder).status == "done":
        print(f"{folder.name} is done already; nothing to resume", file=sys.stderr)
        return
    with holding(folder):
        if load_record(folder).status == "done":  # by the process that had the lock a moment ago
            print(f"{folder.name} is done already; nothing to resume", file=sys.stderr)
            return
        for stage, step in RunPaths(folder).checkpointed_steps().items():
            print(f"{stage} goes on from step {step}, where its last checkpoint is", file=sys.stderr)
        run_folder(folder, as_json, part)


def resume_group(folder: Path, as_json: bool) -> None:
    from joulelab.cli.sweep import run_sweep_folder
    from joulelab.runs.groups import load_group

    (run_sweep_folder if load_group(folder).sweep else run_group_folder)(folder, as_json)


def run_folder(folder: Path, as_json: bool, part: Phase | None = None) -> None:
    from joulelab.cli.console import print_result, watching
    from joulelab.report.page import write_report
    from joulelab.report.tables.comparison_tables import run_view
    from joulelab.runs.execute import execute
    from joulelab.runs.paths import RunPaths
    from joulelab.runs.validity import enforce

    print(f"run {folder}", file=sys.stderr)
    try:
        with watching() as progress:
            record = execute(RunPaths(folder), progress, part)
    except BaseException as error:
        print(f"its record and joules: joulelab show {folder}", file=sys.stderr)
        if not isinstance(error, UsageError):  # resuming does not fix wrong settings
            print(f"to go on with it:      joulelab run --resume {folder}", file=sys.stderr)
        raise
    if record.status == "queued":
        print(f"part '{part}' is done; the rest: joulelab run --resume {folder}", file=sys.stderr)
        return
    page = None if record.group else write_report(folder)  # members are on their group's page
    if as_json:
        print(record.model_dump_json(indent=2))
    else:
        print_result(run_view(record))
        if page is not None:
            print(f"\nreport: {page}", file=sys.stderr)
    enforce(record)


def run_group_folder(folder: Path, as_json: bool) -> None:
    from joulelab.cli.browse import show_group
    from joulelab.cli.console import watching
    from joulelab.report.page import write_report
    from joulelab.runs.groups import execute_group
    from joulelab.runs.paths import GroupPaths
    from joulelab.runs.validity import enforce

    print(f"group {folder}", file=sys.stderr)
    try:
        with watching() as progress:
            records = execute_group(GroupPaths(folder), progress)
    except BaseException:
        print(f"what is done so far: joulelab show {folder}", file=sys.stderr)
        print(f"to go on with it:    joulelab run --resume {folder}", file=sys.stderr)
        raise
    show_group(folder, as_json)
    print(f"\nreport: {write_report(folder)}", file=sys.stderr)
    for record in records:
        enforce(record)


def print_settings(settings: dict[str, object], as_json: bool = False) -> None:
    if as_json:
        import json

        print(json.dumps(settings, indent=2))
        return
    import yaml

    print(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), end="")


# `joulelab demo`: a first comparison in about five minutes, on a laptop, with real models and text.


def demo(
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Settings for every member of the group.")
    ] = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a teacher, train a student three ways with two seeds each, and compare them by joules and accuracy."""
    from joulelab.data.samples import locate
    from joulelab.runs.sensor_discovery import discovery_text
    from joulelab.runs.store import store_root

    for name in ("minilm", "reviews"):
        locate(name)
    print(discovery_text(estimate_cpu=True), file=sys.stderr)
    start(store_root(runs_dir), "demo", overrides or [], as_json=as_json)
