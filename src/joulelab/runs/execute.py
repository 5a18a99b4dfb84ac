"""A job starts here with nothing but the folder: its pipeline, from the idle baseline before to the record after."""

from __future__ import annotations

from joulelab import lookup
from joulelab.errors import EndedBySignal
from joulelab.runs.attempt import RunAttempt
from joulelab.runs.context import Progress
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import RunRecord, Status
from joulelab.runs.spec import check
from joulelab.runs.stopping import StopRequest
from joulelab.runs.yaml_text import read_mapping


def execute(paths: RunPaths, progress: Progress) -> RunRecord:
    """Run the folder's pipeline as a new attempt. Whatever happens, the joules spent are in the record afterwards."""
    spec = check(read_mapping(paths.config))
    status: Status = "done"
    error: BaseException | None = None
    with StopRequest() as stop:
        attempt = RunAttempt(paths, spec, stop, progress)
        try:
            lookup.PIPELINES.resolve(spec.pipeline)(attempt.begin())
        except EndedBySignal as ended:
            status, error = "truncated", ended
        except BaseException as failure:
            status, error = "failed", failure
        record = attempt.end(status, error)
    if error is not None:
        raise error
    return record
