"""`joulelab run`: one experiment, or a group of them, measured from the first byte to the last."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joulelab.cli.options import AsJson, Require, RequireGrade, RunsDir
from joulelab.errors import UsageError

if TYPE_CHECKING:
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the merged settings; run nothing.")
    ] = False,
    require: Require = None,
    require_grade: RequireGrade = None,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Run an experiment and print what it cost.

    Examples:

      joulelab run demo-kd

      joulelab run demo-kd training.learning_rate=1e-4 seed=3

      joulelab run --resume demo-kd-20260101T120000Z-ab12
    """
    from joulelab.runs.store import store_root

    store = store_root(runs_dir)
    if resume is not None:
        if experiment is not None:
            raise UsageError("--resume takes its settings from the run itself", "leave the experiment and settings out")
        go_on(store, resume, as_json)
    elif experiment is None:
        raise UsageError(
            "no experiment was named", "`joulelab experiments` lists them; for a first look: joulelab demo"
        )
    else:
        demanded = {"require": require, "require_grade": require_grade}
        asked = [f"energy.{key}={value}" for key, value in demanded.items() if value is not None]
        start(store, experiment, [*(overrides or []), *asked], dry_run, as_json)


def start(store: Path, experiment: str, overrides: list[str], dry_run: bool = False, as_json: bool = False) -> None:
    """Check everything first: a mistake in the settings leaves no folder behind."""
    from joulelab.runs.groups import check_group, create_group, is_group
    from joulelab.runs.spec import check, merge, parse_overrides, read_experiment, read_layers

    settings, changes = read_layers(experiment), parse_overrides(overrides)
    if is_group(settings):
        group, specs = check_group(settings, changes)
        require_inputs(specs)
        if dry_run:
            print_settings({f"{spec.name} seed {spec.seed}": spec.model_dump(mode="json") for spec in specs})
            return
        made = create_group(store, specs, name=group.name, about=group.about, baseline=group.baseline)
        run_group_folder(store, made.folder, as_json)
    else:
        start_run(store, check(merge(read_experiment(experiment), changes)), dry_run, as_json)


def start_run(store: Path, spec: RunSpec, dry_run: bool = False, as_json: bool = False) -> None:
    """The one place where a single run's folder is made and set going."""
    from joulelab.runs.attempt import create_run

    require_inputs([spec])
    if dry_run:
        print_settings(spec.model_dump(mode="json"))
        return
    if not followed(store):
        run_folder(create_run(store, spec).folder, as_json)


def followed(store: Path) -> bool:
    """Whether this process is a following rank of torchrun's; then its work is done here, in the first rank's run."""
    from joulelab.runs.execute import execute_beside
    from joulelab.runs.ranks import my_place

    place = my_place()
    if place.follows:
        execute_beside(place, store)
    return place.follows


def require_inputs(specs: list[RunSpec]) -> None:
    """Files, sensors and packages that were asked for, looked for while nothing has been made yet."""
    from joulelab.runs.sensing import demand_sensors
    from joulelab.trackers.codecarbon import check_installed

    for spec in specs:
        spec.preflight()
        demand_sensors(spec.energy)
        check_installed(spec.energy)


def go_on(store: Path, name: str, as_json: bool) -> None:
    from joulelab.runs.paths import RunPaths
    from joulelab.runs.store import find_folder, is_alive, load_record

    folder = find_folder(store, name)
    if (folder / "group.json").exists():
        go_on_with_group(store, folder, as_json)
        return
    if followed(store):
        return
    record = load_record(folder)
    if record.status == "done":
        print(f"{record.run_id} is done already; nothing to resume", file=sys.stderr)
    elif is_alive(RunPaths(folder)):
        raise UsageError(f"{record.run_id} is still running", "wait for it or end it first")
    else:
        run_folder(folder, as_json)


def go_on_with_group(store: Path, folder: Path, as_json: bool) -> None:
    from joulelab.cli.sweep import run_sweep_folder
    from joulelab.runs.groups import load_group

    (run_sweep_folder if load_group(folder).sweep else run_group_folder)(store, folder, as_json)


def run_folder(folder: Path, as_json: bool) -> None:
    from joulelab.cli.console import print_result
    from joulelab.cli.progress import watching
    from joulelab.report.page import write_report
    from joulelab.report.tables import run_view
    from joulelab.runs.execute import execute
    from joulelab.runs.paths import RunPaths
    from joulelab.runs.validity import enforce

    print(f"run {folder}", file=sys.stderr)
    try:
        with watching() as progress:
            record = execute(RunPaths(folder), progress)
    except BaseException as error:
        print(f"its record and joules: joulelab show {folder}", file=sys.stderr)
        if not isinstance(error, UsageError):  # settings that do not fit are not mended by going on with them
            print(f"to go on with it:      joulelab run --resume {folder}", file=sys.stderr)
        raise
    page = write_report(folder)
    if as_json:
        print(record.model_dump_json(indent=2))
    else:
        print_result(run_view(record))
        print(f"\nreport: {page}", file=sys.stderr)
    enforce(record)


def run_group_folder(store: Path, folder: Path, as_json: bool) -> None:
    from joulelab.cli.progress import watching
    from joulelab.cli.show import show_group
    from joulelab.report.page import write_report
    from joulelab.runs.groups import execute_group
    from joulelab.runs.paths import GroupPaths
    from joulelab.runs.validity import enforce

    print(f"group {folder}", file=sys.stderr)
    try:
        with watching() as progress:
            records = execute_group(GroupPaths(folder), store, progress)
    except BaseException:
        print(f"what is done so far: joulelab show {folder}", file=sys.stderr)
        print(f"to go on with it:    joulelab run --resume {folder}", file=sys.stderr)
        raise
    show_group(folder, as_json)
    print(f"\nreport: {write_report(folder)}", file=sys.stderr)
    for record in records:
        enforce(record)


def print_settings(settings: dict[str, object]) -> None:
    import yaml

    print(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), end="")
