"""`joulelab measure`: opens a run, runs the program as often as requested, closes the run and returns the result.

`MeasuredRun` is also the run of the Python API and of the callbacks: in all three the work is code that no pipeline
describes, so begin and end are two calls. Folder, record and summary are the same as for any run.
"""

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
from joulelab.runs.paths import RunPaths, storage_failure, write_json
from joulelab.runs.record import RunRecord, Status, flat_summary
from joulelab.runs.spec import RunSpec, check, read_mapping
from joulelab.runs.store import load_record


class MeasureSpec(RunSpec):
    """Settings of `joulelab measure`, the Python API and the callbacks."""

    pipeline: Literal["measure"] = "measure"
    """Always `measure`."""
    command: tuple[str, ...] = ()
    """The command line, with secrets redacted; empty if Python code was measured."""
    repeat: int = Field(1, ge=1, le=100_000)
    """Number of measured runs."""
    warmup: int = Field(0, ge=0, le=100_000)
    """Number of runs before that; their energy is in the total but not in the mean."""


def not_restartable() -> UsageError:
    """The folder has only a redacted command, and no code of a `with` block: neither can be restarted from it."""
    return UsageError(
        "a measured program cannot be restarted from its run directory", "run `joulelab measure -- COMMAND` again"
    )


def refuse(run: RunContext) -> NoReturn:
    raise not_restartable()


class MeasuredRun:
    """An attempt of a new run whose work is the user's own code."""

    def __init__(
        self,
        store: Path,
        spec: MeasureSpec,
        stop: StopRequest | None = None,
        progress: Progress | None = None,
        folder: Path | None = None,
    ) -> None:
        """`folder` is chosen by the user; a run that is already queued there is started."""
        self.spec = spec
        queued = folder is not None and (folder / "run.json").exists()
        self.paths = RunPaths(folder) if folder is not None and queued else create_run(store, spec, folder=folder)
        self._attempt = RunAttempt(self.paths, spec, stop or StopRequest(), progress or SilentProgress())
        self.begin = self._attempt.begin
        self.end = self._attempt.end

    def amend(self, record: RunRecord) -> RunRecord:
        """Write the record again with results that depend on the final figures (the mean over repeats)."""
        with holding(self.paths.folder):
            write_json(self.paths.record, record)
            write_json(self.paths.summary, flat_summary(record))
        return record


def how_it_ended(error: BaseException | None) -> tuple[Status, BaseException | None]:
    """Status and recorded error for an exception of user code: Ctrl-C truncates a run, `sys.exit(0)` is a success."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "done", None
    if isinstance(error, KeyboardInterrupt):
        return "truncated", EndedBySignal(signal.SIGINT)
    return ("truncated" if isinstance(error, EndedBySignal) else "failed"), error


def leave(stage: AbstractContextManager[Stage], error: BaseException | None) -> None:
    """Close a stage without re-raising `error`, which is already propagating."""
    if error is None:
        stage.__exit__(None, None, None)
        return
    try:
        stage.__exit__(type(error), error, error.__traceback__)
    except BaseException as raised:
        if raised is not error:
            raise


def queued_spec(folder: Path, requested: MeasureSpec) -> MeasureSpec:
    """The settings of the run that is queued in `folder`, for the same program; anything else there is refused."""
    status = load_record(folder).status
    spec = check(read_mapping(RunPaths(folder).config))
    if not isinstance(spec, MeasureSpec) or spec.command != requested.command:
        raise UsageError(f"{folder} contains another run", "choose another directory")
    if status != "queued":
        raise UsageError(f"the run in {folder} has already started (status {status})", "choose another directory")
    plain = check({"pipeline": spec.pipeline, "name": requested.name, "command": requested.command})
    if requested != plain:
        raise UsageError(
            f"{folder} contains a queued run, whose settings are fixed", "leave out all options except --run-dir"
        )
    return spec


def measure_program(
    store: Path,
    spec: MeasureSpec,
    executable: str,
    command: Sequence[str],
    progress: Progress,
    folder: Path | None = None,
) -> MeasureResult:
    """Run the program under the meter. The run is recorded however it ends, and the result has its exit code.

    `command` is the real command line; the spec has it without secrets.
    """
    stop, terminal = StopRequest(), Terminal()
    relay = SignalRelay(stop, terminal.present)
    relay.listen()
    measured = MeasuredRun(store, spec, stop, progress, folder)
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
    relay.ignore_signals()
    if isinstance(error, StorageFailed) or (error is not None and not isinstance(error, JoulelabError)):
        raise error
    return result_of(record, measured.paths.folder, error.exit_code if error else 0)


def run_all(run: RunContext, spec: MeasureSpec, group: ProcessGroup, executable: str, command: Sequence[str]) -> None:
    """Warm-ups, then repeats, each in its own stage; stops at the first failure."""
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
                f"processes of the program are still running: pid {', '.join(str(p.pid) for p in left[:5])}"
                f"{' and others' if len(left) > 5 else ''}; their energy from now on is not recorded"
            )
