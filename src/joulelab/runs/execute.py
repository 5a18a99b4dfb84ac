"""A job starts here with nothing but the folder: its pipeline, from the idle baseline before to the record after."""

from __future__ import annotations

import time

from joulelab import lookup
from joulelab.errors import EndedBySignal
from joulelab.runs.attempt import RunAttempt
from joulelab.runs.context import Progress, RunContext
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord, Status
from joulelab.runs.sensing import demand_sensors
from joulelab.runs.spec import check
from joulelab.runs.stopping import StopRequest
from joulelab.runs.yaml_text import read_mapping


def execute(paths: RunPaths, progress: Progress) -> RunRecord:
    """Run the folder's pipeline as a new attempt. Whatever happens, the joules spent are in the record afterwards."""
    spec = check(read_mapping(paths.config))
    demand_sensors(spec.energy)
    status: Status = "done"
    error: BaseException | None = None
    with StopRequest() as stop:
        attempt = RunAttempt(paths, spec, stop, progress)
        try:
            run = attempt.begin()
            idle(run, "idle.before", spec.energy.idle_before_s)
            lookup.PIPELINES.resolve(spec.pipeline)(run)
            idle(run, "idle.after", spec.energy.idle_after_s)
        except EndedBySignal as ended:
            status, error = "truncated", ended
        except BaseException as failure:
            status, error = "failed", failure
        record = attempt.end(status, error)
    if error is not None:
        raise error
    return record


def idle(run: RunContext, name: str, duration_s: float) -> None:
    """Record the machine doing nothing, in a stage of its own that stands outside the totals."""
    if duration_s <= 0:
        return
    with run.stage(name, total=round(duration_s)):
        for second in range(round(duration_s * 10)):
            run.stop.check()
            time.sleep(0.1)
            run.progress.advance(second // 10)
