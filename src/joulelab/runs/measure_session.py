"""`joulelab measure` from begin to end: open the run, run the program as often as asked, close it, say how it went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from joulelab.errors import EndedBySignal, JoulelabError, StorageFailed
from joulelab.runs.context import RunContext
from joulelab.runs.listeners import Progress
from joulelab.runs.measure_program import Guarded, end_all
from joulelab.runs.measure_result import RUN, WARMUP, MeasureResult, conclude, result_of, stage_name
from joulelab.runs.measure_signals import SignalRelay
from joulelab.runs.measure_spec import MeasureSpec
from joulelab.runs.measure_terminal import Terminal
from joulelab.runs.measuring import MeasuredRun
from joulelab.runs.record import Status
from joulelab.runs.stopping import StopRequest
from joulelab.runs.storage import storage_failure


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
        with Guarded(relay, terminal) as group:
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


def run_all(run: RunContext, spec: MeasureSpec, group: Guarded, executable: str, command: Sequence[str]) -> None:
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
