"""`joulelab measure` from begin to end: open the run, run the program as often as asked, close it, say how it went."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NoReturn

from pydantic import Field

from joulelab.errors import EndedBySignal, JoulelabError, StorageFailed, UsageError
from joulelab.runs.attempt import RunAttempt, create_run
from joulelab.runs.context import Progress, RunContext, SilentProgress, Stage, StopRequest
from joulelab.runs.lock import holding
from joulelab.runs.measure.program import ProcessGroup, SignalRelay, Terminal, end_all
from joulelab.runs.measure.result import RUN, WARMUP, MeasureResult, conclude, result_of, stage_name
from joulelab.runs.record import RunRecord, Status
from joulelab.runs.spec import RunSpec
from joulelab.runs.storage import storage_failure, write_json
from joulelab.runs.summary import flat_summary

# Settings of a measured program or block of code: a run whose stages are not ours.


class MeasureSpec(RunSpec):
    """What `joulelab measure`, the Python API and the callbacks were asked to do."""

    pipeline: Literal["measure"] = "measure"
    """Always `measure`: the work is somebody else's."""
    command: tuple[str, ...] = ()
    """The command line as it was run, with what looks like a secret taken out; empty where Python code was measured."""
    repeat: int = Field(1, ge=1, le=100_000)
    """How often the program is run and measured."""
    warmup: int = Field(0, ge=0, le=100_000)
    """How often it is run before that; the joules of warm-ups are in the total and outside the mean."""


def not_restartable() -> UsageError:
    """The folder keeps a redacted command, and code in a `with` block not at all: neither can be started from it."""
    return UsageError(
        "a measured program is not started again from its run folder", "run `joulelab measure -- COMMAND` once more"
    )


def refuse(run: RunContext) -> NoReturn:
    raise not_restartable()


# A run around work that no pipeline describes: opened before foreign code starts, closed after it ended.
#
# `execute` tells a pipeline's story from begin to end; here the story belongs to somebody else (a program, a `with`
# block, another framework's loop), so begin and end are two calls. Folder, record and summary are those of any run.


class MeasuredRun:
    """An attempt at a new run whose work is foreign code: begin, stages, end, and what the figures add afterwards."""

    def __init__(
        self, store: Path, spec: MeasureSpec, stop: StopRequest | None = None, progress: Progress | None = None
    ) -> None:
        self.spec = spec
        self.paths = create_run(store, spec)
        self._attempt = RunAttempt(self.paths, spec, stop or StopRequest(), progress or SilentProgress())
        self.begin = self._attempt.begin
        self.end = self._attempt.end

    def amend(self, record: RunRecord) -> RunRecord:
        """Write the record again with what only the finished figures could tell (a mean over repeats, its spread)."""
        with holding(self.paths.folder):
            write_json(self.paths.record, record)
            write_json(self.paths.summary, flat_summary(record))
        return record


def how_it_ended(error: BaseException | None) -> tuple[Status, BaseException | None]:
    """Status and recorded reason for what foreign code raised: Ctrl-C cuts a run off, `sys.exit(0)` is a good end."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "done", None
    if isinstance(error, KeyboardInterrupt):
        return "truncated", EndedBySignal(signal.SIGINT)
    return ("truncated" if isinstance(error, EndedBySignal) else "failed"), error


def leave(stage: AbstractContextManager[Stage], error: BaseException | None) -> None:
    """Close a stage by hand; it raises the error again, which whoever let it through does already."""
    if error is None:
        stage.__exit__(None, None, None)
        return
    try:
        stage.__exit__(type(error), error, error.__traceback__)
    except BaseException as raised:
        if raised is not error:
            raise


def measure_program(
    store: Path, spec: MeasureSpec, executable: str, command: Sequence[str], progress: Progress
) -> MeasureResult:
    """Run the program under the meter. Whatever becomes of it, the run folder tells, and the result has its exit code.

    `command` is the real one; the spec holds it without secrets.
    """
    stop, terminal = StopRequest(), Terminal()
    relay = SignalRelay(stop, terminal.present)
    relay.listen()
    measured = MeasuredRun(store, spec, stop, progress)
    error: BaseException | None = None
    status: Status = "done"
    try:
        run = measured.begin(spec.command)
        with ProcessGroup(relay, terminal) as group:
            run_all(run, spec, group, executable, command)
    except EndedBySignal as ended:
        status, error = "truncated", ended
    except BaseException as failure:
        status, error = "failed", storage_failure(failure, measured.paths.folder) or failure
    record = measured.end(status, error)
    record = measured.amend(conclude(record, measured.paths))
    relay.deafen()
    if isinstance(error, StorageFailed) or (error is not None and not isinstance(error, JoulelabError)):
        raise error
    return result_of(record, measured.paths.folder, error.exit_code if error else 0)


def run_all(run: RunContext, spec: MeasureSpec, group: ProcessGroup, executable: str, command: Sequence[str]) -> None:
    """Warm-ups, then repeats, each a stage; the first that does not end well is the last."""
    try:
        for number in range(1, spec.warmup + 1):
            with run.stage(stage_name(WARMUP, number, spec.warmup), role="setup", activity="warmup"):
                group.run(executable, command).check(run.stop.signum)
        for number in range(1, spec.repeat + 1):
            with run.stage(stage_name(RUN, number, spec.repeat), role="student", activity="run", repeat=number):
                group.run(executable, command).check(run.stop.signum)
    except EndedBySignal:
        end_all(group.left_over())
        raise
    finally:
        if left := group.left_over():
            run.warn(
                f"still running of the program: pid {', '.join(str(p.pid) for p in left[:5])}"
                f"{' and others' if len(left) > 5 else ''}; what they take from here on is not in this record"
            )
