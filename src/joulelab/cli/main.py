"""The command `joulelab`: its verbs, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import sys

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
app.command("demo")(demo.demo)
app.command("run")(run.run)
app.command("train")(train.train)
app.command("infer")(infer.infer)
app.command("sweep", context_settings={"ignore_unknown_options": True})(sweep.sweep)
app.command("zoo")(zoo.zoo)
app.command("measure", context_settings={"allow_interspersed_args": False})(measure.measure)
app.command("submit")(submit.submit)
app.command("watch")(watch.watch)
app.command("cancel")(cancel.cancel)
app.command("runs")(runs.runs)
app.command("show")(show.show)
app.command("query")(query.query)
app.command("export")(export.export)
app.command("pack")(pack.pack)
app.command("unpack")(unpack.unpack)
app.command("report")(report.report)
app.command("compare")(compare.compare)
app.command("bill")(bill.bill)
app.command("monitor")(monitor.monitor)
app.command("import")(import_log.import_log)
app.command("plot")(plot.plot)
app.command("doctor")(doctor.doctor)
app.add_typer(prepare.app, name="prepare")
app.command("prerun")(prerun.prerun)
app.command("experiments")(experiments.experiments)
app.command("explain")(explain.explain)
app.add_typer(samples.app, name="samples")


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    try:
        app()
    except JoulelabError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of our output has gone, as `joulelab runs | head` does
        sys.stderr.close()
        sys.exit(0)
