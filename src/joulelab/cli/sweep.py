"""`joulelab sweep`: every combination of some settings, repeated, with speed and energy of each.

Each member runs in its own process (`python -m joulelab.cli.sweep FOLDER DETAIL`): memory, caches and peaks of the
members are then independent, and an out-of-memory kill does not end the sweep.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from joulelab.cli.options import (
    AsJson,
    Detail,
    RequestedSetting,
    RunsDir,
    base_settings,
    detail,
    detail_level,
    note,
    options_in_errors,
    read_override,
    requested_settings,
)
from joulelab.errors import NOTHING_STARTED, ConfigError, JoulelabError, UsageError

if TYPE_CHECKING:
    from joulelab.runs.context import StopRequest
    from joulelab.runs.paths import RunPaths
    from joulelab.runs.record import RunRecord
    from joulelab.runs.spec import RunSpec


def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="train MODEL | run EXPERIMENT [OPTIONS]...",
            help="The command of a single run; comma-separated values are swept.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Runs per configuration (seeds).")] = 1,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the group (default: from the model or experiment).")
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="GROUP", help="Resume an interrupted sweep.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the runs without running them.")] = False,
    runs_dir: RunsDir = None,
    as_json: AsJson = False,
) -> None:
    """Run every combination of comma-separated values, N times each, and tabulate speed and energy.

    Every option of `joulelab train` and every KEY.PATH=VALUE can be swept. The runs form a group: all configurations
    once, then all again with the next seed. A failed run is recorded, the others still run, and the exit code is 1.

    Examples:

      joulelab sweep train resnet50 --batch_size 8,16,32 --repeats 3 --max_time_minutes 5

      joulelab sweep train gpt2 --size tiny --precision fp32,bf16 --learning_rate 1e-4,1e-3 --max_steps 50

      joulelab sweep run demo-kd distill.temperature=1,2,4 --repeats 2

      joulelab sweep --resume sweep-resnet50-20260101T120000Z-ab12
    """
    from joulelab.runs.store import store_root

    store = store_root(runs_dir)
    if resume is not None:
        if words or repeats != 1 or name is not None or dry_run:
            raise UsageError("--resume uses the settings of the sweep itself", "leave all other arguments out")
        resume_sweep(store, resume, as_json)
        return
    kind, specs = sweep_members(words or [], repeats)
    start(store, specs, name or f"sweep-{kind}", dry_run, as_json)


def sweep_members(words: Sequence[str], repeats: int) -> tuple[str, list[RunSpec]]:
    """Name of the model or experiment, and the checked specs of all runs."""
    settings, requested = _read(words)
    with options_in_errors(requested):
        specs = _members(settings, requested, repeats)
    return specs[0].name, specs


def _members(settings: Mapping[str, Any], requested: Sequence[RequestedSetting], repeats: int) -> list[RunSpec]:
    from joulelab.runs.groups import sweep_specs
    from joulelab.runs.spec import merge, nest, overlay, refuse_unused

    axes: dict[str, list[Any]] = {}
    changes: dict[str, Any] = {}
    for setting in requested:
        values = setting.values
        axes.pop(setting.key, None)  # the last value given for a setting applies
        if len(values) > 1:
            axes[setting.key] = values
        changes = overlay(changes, nest(setting.key, values[0]))
    specs = sweep_specs(merge(settings, changes), axes, repeats)
    refuse_unused(changes, specs)
    return specs


@contextmanager
def sweep_in_hint(command: str, settings: Mapping[str, Any], requested: Sequence[RequestedSetting]) -> Iterator[None]:
    """Where settings of `train` or `run` are wrong because they list several values, the hint names `sweep`, if it
    accepts them."""
    try:
        yield
    except UsageError as error:
        try:
            is_sweep = len(_members(settings, requested, repeats=1)) > 1
        except UsageError:
            is_sweep = False
        if not is_sweep:
            raise
        hint = f"to run each of the values: joulelab sweep {command} ... with the same options; {NOTHING_STARTED}"
        raise ConfigError(error.message, hint) from None


def _read(words: Sequence[str]) -> tuple[dict[str, Any], list[RequestedSetting]]:
    """The settings to start from and those given on the command line of `train` or `run`."""
    if not words or words[0] not in ("train", "run"):
        found = f"'{words[0]}'" if words else "nothing"
        raise UsageError(f"expected `train` or `run` to sweep, found {found}", "joulelab sweep --help shows examples")
    return _read_train(words[1:]) if words[0] == "train" else _read_run(words[1:])


def _read_train(words: Sequence[str]) -> tuple[dict[str, Any], list[RequestedSetting]]:
    """Parsed by the command `joulelab train` itself, so that the options are the same."""
    from joulelab.cli.train import FLAGS, train, with_model

    one_verb = typer.Typer(add_completion=False)
    one_verb.command()(train)
    command: Any = typer.main.get_command(one_verb)
    with command.make_context("joulelab sweep train", list(words)) as context:
        params = with_model(context.params)
    # The model can be swept by a setting, so that is no contradiction of the argument.
    requested = requested_settings("train", FLAGS, {**params, "model": None})
    return base_settings("train", model=params["model"]), requested


def _read_run(words: Sequence[str]) -> tuple[dict[str, Any], list[RequestedSetting]]:
    from joulelab.runs.groups import is_group
    from joulelab.runs.spec import read_experiment

    if not words:
        raise UsageError("no experiment was named", "`joulelab experiments` lists them")
    settings = read_experiment(words[0])
    if is_group(settings):
        raise UsageError(f"{words[0]} is a group already", "sweep one of its members")
    return settings, [read_override(word) for word in words[1:]]


def start(store: Path, specs: list[RunSpec], name: str, dry_run: bool, as_json: bool) -> None:
    """Check every member before creating a directory, then run them."""
    from joulelab.cli.run import RunOptions, print_settings, require_inputs
    from joulelab.runs.groups import create_group

    require_inputs(specs, RunOptions(store, dry_run=dry_run))
    if dry_run and as_json:
        print_settings({_member_name(spec): spec for spec in specs}, as_json)
        return
    if dry_run:
        print("\n".join(map(_member_name, specs)))
        return
    run_sweep_folder(create_group(store, specs, name=name, about=_about(specs), sweep=True).folder, as_json)


def _member_name(spec: RunSpec) -> str:
    return f"{spec.label or spec.name}, seed {spec.seed}"


def _about(specs: Sequence[RunSpec]) -> str:
    labels = len({spec.label for spec in specs})
    return f"{labels} configurations of {specs[0].name}, {len(specs) // labels} runs each"


def resume_sweep(store: Path, name: str, as_json: bool) -> None:
    from joulelab.runs.groups import load_group
    from joulelab.runs.store import find_folder

    folder = find_folder(store, name)
    if not (folder / "group.json").exists() or not load_group(folder).sweep:
        raise UsageError(f"{folder.name} is not a sweep", f"joulelab run --resume {folder.name}")
    run_sweep_folder(folder, as_json)


def run_sweep_folder(folder: Path, as_json: bool) -> None:
    from joulelab.cli.browse import show_group
    from joulelab.cli.run import execute_members
    from joulelab.report import report_line

    note(f"sweep {folder}")
    try:
        records = execute_members(folder, lambda run, _: run_in_subprocess(run))
    except BaseException:
        print(f"show what is done: joulelab show {folder}", file=sys.stderr)
        print(f"resume it:         joulelab sweep --resume {folder}", file=sys.stderr)
        raise
    show_group(folder, as_json)
    note(report_line(folder))
    _require_all_done(folder, records)


def _require_all_done(folder: Path, records: Sequence[RunRecord]) -> None:
    from joulelab.runs.validity import enforce

    failed = [record for record in records if record.status != "done"]
    if failed:
        raise JoulelabError(
            f"{len(failed)} of {len(records)} runs of the sweep failed (reasons in the table)",
            f"fix the cause and rerun them: joulelab sweep --resume {folder}",
        )
    for record in records:
        enforce(record)


PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
GRACE_S = 20.0


def run_in_subprocess(run: RunPaths) -> RunRecord:
    """Execute the run in a child process and return its record; signals are forwarded and end the sweep."""
    from joulelab.runs.context import StopRequest
    from joulelab.runs.store import load_record

    command = [sys.executable, "-m", __name__, str(run.folder), detail()]
    with StopRequest() as stop:
        # a separate session: Ctrl-C in the terminal reaches only this process, which forwards it once
        child = subprocess.Popen(command, start_new_session=True)
        try:
            _wait(child, stop)
        finally:
            _end(child)
    stop.check()
    return load_record(run.folder)


def _wait(child: subprocess.Popen[bytes], stop: StopRequest) -> None:
    forwarded = False
    while child.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.1)
        if stop.signum is not None and not forwarded:
            child.send_signal(stop.signum)
            forwarded = True


def _end(child: subprocess.Popen[bytes]) -> None:
    """Stop a child that is still running, after a second signal or an error of ours."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()


def main(folder: Path, level: Detail) -> int:
    """Execute the run; output goes to stderr, with -v of the sweep all stages; the record is in the folder."""
    from joulelab.cli.console import watching
    from joulelab.runs.execute import execute
    from joulelab.runs.paths import RunPaths

    _exit_with_parent()
    try:
        with detail_level(level), watching(stages=False) as progress:
            execute(RunPaths(folder), progress)
    except JoulelabError as error:
        print(f"  failed: {error.message}" + (f"\n  hint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    return 0


def _exit_with_parent() -> None:
    """Let the kernel signal this process when a killed sweep disappears (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), cast(Detail, sys.argv[2])))
