"""One attempt of a run, from the snapshot of the environment to the record.

Environment, meter, CodeCarbon and trackers are started only here, so that a pipeline, a measured program and a `with`
block leave the same kind of run folder.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from joulelab import clock, lookup
from joulelab.errors import EndedBySignal, JoulelabError
from joulelab.meter.power_cap import power_cap, restore_power_limits
from joulelab.meter.session import Meter
from joulelab.redaction import redact_text
from joulelab.runs import environment
from joulelab.runs.artifacts import read_bill, write_bill
from joulelab.runs.assemble import assemble
from joulelab.runs.context import Progress, RunContext, StopRequest, Trackers
from joulelab.runs.lock import hold
from joulelab.runs.paths import (
    RunPaths,
    make_chosen_folder,
    make_folder,
    read_json,
    require_resources,
    storage_failure,
    write_json,
)
from joulelab.runs.phases import Phase
from joulelab.runs.record import METHOD_VERSION, ErrorRecord, Note, ProcessMark, RunRecord, Status, flat_summary
from joulelab.runs.spec import RunSpec, write_yaml
from joulelab.runs.store import compact_run, energy_resolver, read_record, searched_store


def create_run(store: Path, spec: RunSpec, group: str | None = None, *, folder: Path | None = None) -> RunPaths:
    """Create a run folder with the merged config and a first record. The run is queued until a process locks it.

    `folder` is a path chosen by the user; artifacts are still searched in `store`.
    """
    require_resources()
    paths = RunPaths(make_chosen_folder(folder) if folder else make_folder(store, spec.name))
    settings = spec.model_dump(mode="json")
    opening = RunRecord(
        run_id=paths.run_id,
        name=spec.name,
        label=spec.label or spec.name,
        status="queued",
        group=group,
        created_at=clock.iso(clock.now().wall_s),
        spec=settings,
        store=str(store.absolute()) if folder and store.absolute() != paths.folder.absolute().parent else None,
    )
    try:
        write_yaml(paths.config, settings)
        write_json(paths.record, opening)
    except OSError as error:
        failure = storage_failure(error, paths.folder)
        for made in (paths.config, paths.record):
            made.unlink(missing_ok=True)
        with suppress(OSError):  # a user-supplied directory may not be empty
            paths.folder.rmdir()
        raise (failure or error) from None
    if opening.store is not None:
        _link_into_store(paths.folder, store)
    return paths


def record_settings(paths: RunPaths, spec: RunSpec) -> None:
    """Replace the settings of a running run by those with what was chosen, in its record and in its configuration."""
    record = RunRecord.model_validate(read_json(paths.record))
    settings = spec.model_dump(mode="json")
    # The configuration last: if the process is killed in between, the next attempt chooses again.
    write_json(paths.record, record.model_copy(update={"spec": settings}))
    write_yaml(paths.config, settings)


def _link_into_store(folder: Path, store: Path) -> None:
    """A link, so that later runs of the store find the artifacts of a run outside of it and do not make them again."""
    link = store / folder.name
    with suppress(OSError):  # a file system without links, or a store that cannot be written: the run works without
        store.mkdir(parents=True, exist_ok=True)
        if link.is_symlink() and not link.exists():
            link.unlink()  # its run was deleted
        if link.exists() and not link.samefile(folder):
            print(
                f"joulelab: warning: {store} already has a run named {folder.name}: this one is not listed there, and "
                "other runs do not find its artifacts; a directory of another name avoids that",
                file=sys.stderr,
            )
        link.symlink_to(folder.absolute(), target_is_directory=True)


def this_process() -> ProcessMark:
    """Identifies the owning process, so that readers can check whether it is still alive."""
    return ProcessMark(host=os.uname().nodename, boot_id=clock.boot_id(), pid=os.getpid())


class RunAttempt:
    """`begin()`, then stages through the context that it returns, then `end()`. The energy is recorded in any case."""

    def __init__(
        self,
        paths: RunPaths,
        spec: RunSpec,
        stop: StopRequest,
        progress: Progress,
        last_phase: Phase | None = None,
    ) -> None:
        self._paths = paths
        self._spec = spec
        self._stop = stop
        self._progress = progress
        self._last_phase = last_phase
        # Before anything is written: of two processes that were started on the same folder, one
        # must not touch it.
        self._pid = os.getpid()
        self._lock = hold(paths.folder)
        self._lock.on_taken_over = stop.refuse
        self._sidecars = ExitStack()
        self._trackers: Trackers | None = None
        self._context: RunContext | None = None

    def begin(
        self, command: Sequence[str] | None = None, metering: Callable[[RunContext], None] | None = None
    ) -> RunContext:
        """Snapshot the environment, start the meter, record the idle baseline.

        `command` replaces joulelab's command line in the snapshot. `metering` is called once the meter runs: other
        ranks join then, so that all hosts record their idle baselines at the same time.
        """
        environment.demand_sensors(self._spec.energy)
        environment.demand_hardware(self._spec.hardware)
        if (chosen := self._spec.for_this_machine()) != self._spec:
            self._spec = chosen
            record_settings(self._paths, chosen)
        # The record states the new process before the meter starts, so that a reader of a run
        # killed from here on finds a dead process and derives `truncated`.
        mark_running(self._paths)
        facts = environment.snapshot()
        if command is not None:
            facts["command"] = list(command)
        write_json(self._paths.environment, facts)
        attempt, host = self._paths.next_attempt(), environment.node_name()
        if self._spec.energy.uses_codecarbon:
            codecarbon = lookup.SIDECARS.resolve("codecarbon")(self._paths.folder, host, attempt, self._spec.energy)
            self._sidecars.enter_context(codecarbon)  # before the meter, so that its start-up is not billed
        self._start_trackers(self._paths.trace(host, attempt))
        restored = restore_limits(self._paths, host)
        limits = self._paths.power_limits(host, attempt)
        if (cap_w := self._spec.energy.power_cap_w) is not None:
            # The limits in force are saved to the run folder before they change; after a SIGKILL of program and
            # recorder the next attempt restores them from there.
            self._sidecars.enter_context(power_cap(cap_w, self._spec.energy.gpus, limits))
        trace, events = self._paths.trace(host, attempt), self._paths.events(host, 0, attempt)
        meter = Meter(trace, events, self._spec.meter_settings(), limits)
        meter.start()
        known = {"method_version": METHOD_VERSION, "environment": environment.digests(facts)}
        # Digests of the environment are part of the marks, so that `unpack --verify` can tell
        # whether `environment.json` was edited afterwards.
        meter.event("run", edge="begin", **known)
        self._context = RunContext(
            self._paths, self._spec, meter, self._stop, attempt, self._progress, self._last_phase
        )
        self._context.trackers = self._trackers
        self._context.report_tracker_problems()
        for text in restored:
            self._context.warn(text)
        if metering is not None:
            metering(self._context)
        idle(self._context, "idle.before", self._spec.energy.idle_before_s)
        return self._context

    def end(
        self,
        status: Status,
        error: BaseException | None = None,
        others: Callable[[RunContext], None] | None = None,
    ) -> RunRecord:
        """Stop the meter and write the record; also works if `begin()` failed.

        `others` waits for the ranks of other hosts, whose traces belong to the record. If another node has taken the
        run over, that node writes the record.
        """
        if not self.is_own:  # a forked child leaves the block; the parent is still measuring
            return read_record(self._paths)
        try:
            return self._end(status, error, others)
        finally:
            self._lock.release()

    @property
    def is_own(self) -> bool:
        """Whether this process began the attempt, and is not a forked child of it."""
        return os.getpid() == self._pid

    def _end(
        self, status: Status, error: BaseException | None, others: Callable[[RunContext], None] | None
    ) -> RunRecord:
        context, self._context = self._context, None
        if context is not None:
            if status == "done":
                with suppress(EndedBySignal):  # the work is done; a signal only skips the baseline
                    idle(context, "idle.after", self._spec.energy.idle_after_s)
            context.report_tracker_problems()
            # The end mark comes before the recorder's last reading, so that the trace covers it.
            context.meter.event("run", edge="end", status=status)
            context.close()
            context.meter.stop()
            if others is not None:
                others(context)
        self._sidecars.close()
        # A process that was suspended for more than `STALE_S` may wake up after another one has
        # continued the run. Writing now would overwrite that one's record.
        if (taken_over := self._lock.taken_over) is not None:
            raise taken_over
        try:
            record = self._end_trackers(close_run(self._paths, status, error))
        except OSError as write_error:
            failure = storage_failure(write_error, self._paths.folder)
            if failure is None:
                raise
            with suppress(OSError):  # a full disk may not even hold this; readers then derive `truncated`
                mark_failed(self._paths, failure)
            raise failure from error or write_error
        if record.made:  # a measured program makes no artifacts and need not import the report package
            self._write_model_cards(record)
        for text in compact_run(self._paths, context.attempt if context else 0).kept:
            self._progress.write(f"Trace not compacted: {text}")
        return record

    def _write_model_cards(self, record: RunRecord) -> None:
        """A card describes what the run made; a problem with it is no reason to fail the run."""
        try:
            lookup.CALCULATIONS.resolve("model-cards")(self._paths, record)
        except Exception as problem:
            self._progress.write(f"warning: no model card was written: {type(problem).__name__}: {problem}")

    def _start_trackers(self, trace: Path) -> None:
        if self._spec.trackers:
            group = read_json(self._paths.record).get("group")
            self._trackers = lookup.SIDECARS.resolve("trackers")(self._paths, self._spec, group, trace)

    def _end_trackers(self, record: RunRecord) -> RunRecord:
        """Trackers receive the final record; problems at that point are added to it afterwards."""
        trackers, self._trackers = self._trackers, None
        if trackers is None:
            return record
        trackers.end(record)
        problems = trackers.problems()
        for text in problems:
            self._progress.write(f"warning: {text}")
        if problems:
            record = record.with_notes(Note(level="warning", text=text) for text in problems)
            write_json(self._paths.record, record)
        return record


def idle(run: RunContext, name: str, duration_s: float) -> None:
    """Record an idle baseline in its own stage, which is outside the totals."""
    if duration_s <= 0:
        return
    with run.stage(name, round(duration_s), role="idle", activity="idle"):
        for second in range(round(duration_s * 10)):
            run.stop.check()
            time.sleep(0.1)
            run.progress.advance(second // 10)


def restore_limits(paths: RunPaths, host: str) -> list[str]:
    """Remove power caps of attempts whose program and recorder were both killed; returns messages about them."""
    messages = []
    for name, saved in paths.saved_power_limits():
        if name == host:
            restored = restore_power_limits(saved)
            messages += [f"{text}; an earlier attempt and its recorder were killed" for text in restored]
        else:
            messages.append(
                f"GPUs on {name} may still have the power cap of a killed attempt; their previous limits are in {saved}"
            )
    return messages


def mark_running(paths: RunPaths) -> None:
    """Set the status of a queued or interrupted run; the energy so far stays in the record meanwhile."""
    record = RunRecord.model_validate(read_json(paths.record))
    process = this_process()
    if record.status != "running" or record.process != process:
        write_json(paths.record, record.model_copy(update={"status": "running", "error": None, "process": process}))


def mark_failed(paths: RunPaths, failure: JoulelabError) -> None:
    """Update status and error of the record as it is; resuming the run writes a complete one."""
    record = RunRecord.model_validate(read_json(paths.record))
    write_json(paths.record, record.model_copy(update={"status": "failed", "error": error_record(failure)}))


def close_run(paths: RunPaths, status: Status, error: BaseException | None = None) -> RunRecord:
    """Assemble and write the record, the flat summary, one file per stage, and the final bills."""
    resolve = energy_resolver(searched_store(paths))
    record = assemble(paths, status, error_record(error) if error else None, resolve)
    write_json(paths.record, record)
    write_json(paths.summary, flat_summary(record))
    # A resumed run may have other stages, and numbers are part of the file names.
    for old in paths.stages.glob("*.json"):
        old.unlink()
    for stage in record.stages:
        write_json(paths.stages / f"{stage.number:02d}-{stage.name}.json", stage)
    finish_bills(paths, record)
    return record


def finish_bills(paths: RunPaths, record: RunRecord) -> None:
    """Replace the provisional energy of this run's artifacts by that of the record."""
    final = {ancestor.key: ancestor for ancestor in record.lineage}
    for folder in paths.artifacts.glob("*"):
        bill = read_bill(folder)
        if bill is None or bill.key not in record.made:
            continue
        ancestry = tuple(final.get(ancestor.key, ancestor) for ancestor in bill.ancestry)
        write_bill(
            folder,
            bill.model_copy(update={"artifact": final[bill.key], "ancestry": ancestry, "provisional": False}),
        )


def error_record(error: BaseException) -> ErrorRecord:
    """Messages of other libraries repeat addresses, headers and settings, so secrets are removed from them too."""
    kind = type(error).__name__
    if isinstance(error, JoulelabError):
        return ErrorRecord(kind=kind, message=redact_text(error.message)[0], hint=redact_text(error.hint)[0])
    text = "".join(traceback.format_exception(error))
    return ErrorRecord(kind=kind, message=redact_text(str(error))[0], traceback=redact_text(text)[0])
