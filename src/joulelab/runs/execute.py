"""A job starts here with nothing but the folder: its pipeline, from the idle baseline before to the record after."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

from joulelab import lookup
from joulelab.errors import EndedBySignal
from joulelab.meter.session import Meter
from joulelab.runs.attempt import RunAttempt
from joulelab.runs.context import FollowingContext, Progress
from joulelab.runs.paths import RunPaths
from joulelab.runs.ranks import Place, announce, follow, my_place, scratch, withdraw
from joulelab.runs.record import RunRecord, Status
from joulelab.runs.spec import check
from joulelab.runs.stopping import StopRequest
from joulelab.runs.yaml_text import read_mapping


def execute(paths: RunPaths, progress: Progress) -> RunRecord:
    """Run the folder's pipeline as a new attempt. Whatever happens, the joules spent are in the record afterwards."""
    spec = check(read_mapping(paths.config))
    place = my_place()
    status: Status = "done"
    error: BaseException | None = None
    with StopRequest() as stop:
        attempt = RunAttempt(paths, spec, stop, progress)
        try:
            pipeline = lookup.PIPELINES.resolve(spec.pipeline)  # importing a framework is no part of the bill
            run = attempt.begin()
            announce(place, paths, run.attempt)
            pipeline(run)
        except EndedBySignal as ended:
            status, error = "truncated", ended
        except BaseException as failure:
            status, error = "failed", failure
        withdraw(place, paths)
        record = attempt.end(status, error)
    if error is not None:
        raise error
    return record


def execute_beside(place: Place, store: Path) -> None:
    """What a following rank does: the same pipeline, in the first rank's run, with marks of its own."""
    paths, number = follow(place, store)
    spec = check(read_mapping(paths.config))
    host = platform.node()
    with StopRequest() as stop:
        meter = Meter(paths.trace(host, number), paths.events(host, place.rank, number), spec.energy)
        meter.start()
        try:
            run = FollowingContext(paths, spec, meter, stop, number, scratch(paths, place))
            lookup.PIPELINES.resolve(spec.pipeline)(run)
        finally:
            meter.stop()
            shutil.rmtree(scratch(paths, place), ignore_errors=True)
