"""A job starts here with nothing but the folder: its pipeline, from the idle baseline before to the record after."""

from __future__ import annotations

import shutil
from pathlib import Path

from joulelab import lookup
from joulelab.errors import EndedBySignal
from joulelab.meter.session import Meter
from joulelab.runs import environment
from joulelab.runs.attempt import RunAttempt, idle
from joulelab.runs.context import RunContext
from joulelab.runs.events import STARTUP
from joulelab.runs.following import FollowingContext
from joulelab.runs.import_times import import_times
from joulelab.runs.listeners import Progress
from joulelab.runs.parts import Part, PartDone
from joulelab.runs.paths import RunPaths
from joulelab.runs.ranks import (
    Place,
    announce,
    follow,
    my_place,
    scratch,
    wait_for_others,
    wait_until_joined,
    withdraw,
)
from joulelab.runs.record import RunRecord, Status
from joulelab.runs.spec import check
from joulelab.runs.stopping import JOB_SIGNALS, StopRequest
from joulelab.runs.storage import storage_failure
from joulelab.runs.yaml_text import read_mapping


def execute(paths: RunPaths, progress: Progress, part: Part | None = None) -> RunRecord:
    """Run the folder's pipeline as a new attempt. Whatever happens, the joules spent are in the record afterwards.

    With a `part` it stops where the next part would begin; the run is then queued for whoever does that.
    """
    spec = check(read_mapping(paths.config))
    place = my_place()
    status: Status = "done"
    error: BaseException | None = None
    with StopRequest(JOB_SIGNALS) as stop:
        attempt = RunAttempt(paths, spec, stop, progress)
        attempt.part = part
        try:
            run = attempt.begin(metering=lambda run: _gather(place, run))
            _run_pipeline(run, spec.pipeline)
        except PartDone:
            status = "queued"
        except EndedBySignal as ended:
            status, error = "truncated", ended
        except BaseException as failure:
            status, error = "failed", storage_failure(failure, paths.folder) or failure
        stop.settle()
        withdraw(place, paths)
        # after a failure of its own nobody waits: the others hang in a message that never comes
        others = None if status == "failed" else lambda run: wait_for_others(place, paths, run.attempt)
        record = attempt.end(status, error, others)
    if error is not None:
        raise error
    return record


def _run_pipeline(run: RunContext, name: str) -> None:
    """Imports are start-up, in no stage: the first run of a process has them, whichever method that is."""
    with import_times(lambda begin_ns, end_ns: run.note_setup(STARTUP, begin_ns, end_ns)):
        lookup.PIPELINES.resolve(name)(run)


def _gather(place: Place, run: RunContext) -> None:
    """The meter runs: the other ranks may come."""
    announce(place, run.paths, run.attempt)
    if run.spec.energy.idle_before_s > 0:
        wait_until_joined(place, run.paths, run.attempt)


def execute_beside(place: Place, store: Path, pipeline_name: str, part: Part | None = None) -> None:
    """What a following rank does: the same pipeline, in the first rank's run, with marks of its own.

    On another host than the first rank's its marks are the ones that this host's joules are told apart by. How the run
    ended is the first rank's to say: one that was asked to stop ends quietly here, or its launcher would take it for a
    failure and kill the first rank over its record.
    """
    lookup.PIPELINES.resolve(pipeline_name)  # while the first rank imports the same
    paths, number = follow(place, store)
    spec = check(read_mapping(paths.config))
    host = environment.node_name()
    with StopRequest(JOB_SIGNALS) as stop:
        meter = Meter(paths.trace(host, number), paths.events(host, place.rank, number), spec.energy)
        meter.start()
        meter.event("run", edge="begin")
        run = FollowingContext(paths, spec, meter, stop, number, scratch(paths, place))
        run.part = part
        try:
            idle(run, "idle.before", spec.energy.idle_before_s)
            _run_pipeline(run, pipeline_name)
            idle(run, "idle.after", spec.energy.idle_after_s)
        except (PartDone, EndedBySignal):
            pass
        finally:
            stop.settle()
            meter.event("run", edge="end")
            run.close()
            meter.stop()
            shutil.rmtree(scratch(paths, place), ignore_errors=True)
