"""One attempt at a run: opened before the work starts, closed after it ended, by whoever does the work.

Environment, meter and what runs beside it are started here and nowhere else, so that a pipeline, a measured program and
a `with` block of somebody's script leave the same folder behind.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from joulelab import clock, lookup
from joulelab.errors import EndedBySignal, JoulelabError
from joulelab.meter.power_cap import power_cap
from joulelab.meter.session import Meter
from joulelab.runs import environment
from joulelab.runs.artifacts import read_bill, write_bill
from joulelab.runs.assemble import assemble
from joulelab.runs.context import Progress, RunContext
from joulelab.runs.json_file import write_json
from joulelab.runs.paths import RunPaths, make_folder
from joulelab.runs.record import ErrorRecord, RunRecord, Status
from joulelab.runs.sensing import demand_sensors
from joulelab.runs.spec import RunSpec
from joulelab.runs.stopping import StopRequest
from joulelab.runs.summary import flat_summary
from joulelab.runs.yaml_text import write_yaml


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


class RunAttempt:
    """`begin()`, then stages through the context it gives, then `end()`: the joules are in the record either way."""

    def __init__(self, paths: RunPaths, spec: RunSpec, stop: StopRequest, progress: Progress) -> None:
        self._paths = paths
        self._spec = spec
        self._stop = stop
        self._progress = progress
        self._beside = ExitStack()
        self._context: RunContext | None = None

    def begin(self, command: Sequence[str] | None = None) -> RunContext:
        """Snapshot the environment, start the meter, record the idle baseline.

        `command` replaces our own command line in the snapshot.
        """
        demand_sensors(self._spec.energy)
        facts = environment.snapshot()
        if command is not None:
            facts["command"] = list(command)
        write_json(self._paths.environment, facts)
        attempt, host = self._paths.next_attempt(), facts["host"]
        beside = lookup.BESIDE.resolve("codecarbon")(self._paths.folder, host, attempt, self._spec.energy)
        self._beside.enter_context(power_cap(self._spec.energy))
        self._beside.enter_context(beside)  # before the meter: its own start-up is nobody's bill
        meter = Meter(self._paths.trace(host, attempt), self._paths.events(host, 0, attempt), self._spec.energy)
        meter.start()
        meter.event("run", edge="begin")
        self._context = RunContext(self._paths, self._spec, meter, self._stop, attempt, self._progress)
        idle(self._context, "idle.before", self._spec.energy.idle_before_s)
        return self._context

    def end(self, status: Status, error: BaseException | None = None) -> RunRecord:
        """Stop the meter and write the record; works after a `begin()` that failed too."""
        context, self._context = self._context, None
        if context is not None:
            if status == "done":
                with suppress(EndedBySignal):  # the work is done; whoever cannot wait for the baseline goes without
                    idle(context, "idle.after", self._spec.energy.idle_after_s)
            context.meter.event("run", edge="end", status=status)
            context.close()
            context.meter.stop()
        self._beside.close()
        return close_run(self._paths, status, error)


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
