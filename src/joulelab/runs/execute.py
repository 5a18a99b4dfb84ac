"""A job starts here with nothing but the folder: environment, meter, pipeline, record, always to the end."""

from __future__ import annotations

import time
import traceback
from pathlib import Path

from joulelab import clock, lookup
from joulelab.errors import EndedBySignal, JoulelabError
from joulelab.meter.session import Meter
from joulelab.runs import environment
from joulelab.runs.artifacts import read_bill, write_bill
from joulelab.runs.assemble import assemble
from joulelab.runs.context import Progress, RunContext
from joulelab.runs.json_file import write_json
from joulelab.runs.paths import RunPaths, make_folder
from joulelab.runs.record import ErrorRecord, RunRecord, Status
from joulelab.runs.sensing import demand_sensors
from joulelab.runs.spec import RunSpec, check
from joulelab.runs.stopping import StopRequest
from joulelab.runs.summary import flat_summary
from joulelab.runs.yaml_text import read_mapping, write_yaml


def create_run(store: Path, spec: RunSpec, group: str | None = None) -> RunPaths:
    """A folder with the merged config and an opening record; nothing is measured yet."""
    paths = RunPaths(make_folder(store, spec.name))
    settings = spec.model_dump(mode="json")
    write_yaml(paths.config, settings)
    opening = RunRecord(
        run_id=paths.run_id,
        name=spec.name,
        label=spec.label or spec.name,
        status="running",
        group=group,
        created_at=clock.iso(clock.now().wall_s),
        spec=settings,
    )
    write_json(paths.record, opening)
    return paths


def execute(paths: RunPaths, progress: Progress) -> RunRecord:
    """Run the folder's pipeline as a new attempt. Whatever happens, the joules spent are in the record afterwards."""
    spec = check(read_mapping(paths.config))
    demand_sensors(spec.energy)
    attempt = paths.next_attempt()
    facts = environment.snapshot()
    write_json(paths.environment, facts)
    host = facts["host"]
    meter = Meter(paths.trace(host, attempt), paths.events(host, 0, attempt), spec.energy)
    status: Status = "failed"
    error: BaseException | None = None
    beside = lookup.BESIDE.resolve("codecarbon")(paths.folder, host, attempt, spec.energy)
    with StopRequest() as stop, beside:
        meter.start()
        meter.event("run", edge="begin")
        run = RunContext(paths, spec, meter, stop, attempt, progress)
        try:
            idle(run, "idle.before", spec.energy.idle_before_s)
            lookup.PIPELINES.resolve(spec.pipeline)(run)
            idle(run, "idle.after", spec.energy.idle_after_s)
            status = "done"
        except EndedBySignal as ended:
            status, error = "truncated", ended
        except BaseException as failure:
            error = failure
        finally:
            meter.event("run", edge="end", status=status)
            run.close()
            meter.stop()
    record = close_run(paths, status, error)
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


def close_run(paths: RunPaths, status: Status, error: BaseException | None = None) -> RunRecord:
    """Assemble and write the record, the flat summary, one file per stage, and the final bills."""
    record = assemble(paths, status, error_record(error) if error else None)
    write_json(paths.record, record)
    write_json(paths.summary, flat_summary(record))
    for old in paths.stages.glob("*.json"):
        old.unlink()
    for stage in record.stages:
        write_json(paths.stages / f"{stage.number:02d}-{stage.name}.json", stage)
    finish_bills(paths, record)
    return record


def finish_bills(paths: RunPaths, record: RunRecord) -> None:
    """Replace the provisional joules of what this run made by those of the record."""
    final = {ancestor.key: ancestor for ancestor in record.lineage if ancestor.key in record.made}
    for folder in paths.artifacts.glob("*"):
        bill = read_bill(folder)
        if bill is None or bill.key not in final:
            continue
        ancestry = tuple(final.get(ancestor.key, ancestor) for ancestor in bill.ancestry)
        write_bill(
            folder,
            bill.model_copy(update={"artefact": final[bill.key], "ancestry": ancestry, "provisional": False}),
        )


def error_record(error: BaseException) -> ErrorRecord:
    if isinstance(error, JoulelabError):
        return ErrorRecord(kind=type(error).__name__, message=error.message, hint=error.hint)
    text = "".join(traceback.format_exception(error))
    return ErrorRecord(kind=type(error).__name__, message=str(error), traceback=text)
