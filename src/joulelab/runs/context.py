"""What a pipeline works with while it runs: stages, artifacts, metrics, results, progress, and requests to stop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, Protocol

from joulelab import clock, lookup
from joulelab.errors import EndedBySignal, JoulelabError
from joulelab.meter.session import Meter
from joulelab.meter.trace import LineFile
from joulelab.redaction import redact_text
from joulelab.runs.artifacts import (
    Ancestor,
    Artifact,
    Bill,
    BillBuilder,
    Opens,
    artifact_key,
    code_version,
    find_artifacts,
    find_damage,
    find_shards,
    fresh_folder,
    list_contents,
    read_bill,
    set_aside,
    spent_between,
    with_shards,
    write_bill,
)
from joulelab.runs.attempt_data import STARTUP, read_events
from joulelab.runs.paths import RunPaths
from joulelab.runs.phases import Phase, comes_after
from joulelab.runs.record import Result, RunRecord, StageKind, checked_role, kind_by_name
from joulelab.runs.spec import RunSpec
from joulelab.runs.store import searched_store, with_recorded_energy


class Progress(Protocol):
    """Progress display for a person: a terminal, a log, or none."""

    def stage(self, name: str, total: int | None) -> None: ...

    def advance(self, done: int, text: str = "") -> None: ...

    def setup(self, begin_ns: int, end_ns: int) -> None:
        """This time of the stage is setup, which the record bills separately."""

    def finish(self) -> None:
        """The stage has ended; no stage may follow for a while."""

    def write(self, text: str) -> None: ...


class SilentProgress:
    def stage(self, name: str, total: int | None) -> None: ...

    def advance(self, done: int, text: str = "") -> None: ...

    def setup(self, begin_ns: int, end_ns: int) -> None: ...

    def finish(self) -> None: ...

    def write(self, text: str) -> None: ...


class Trackers(Protocol):
    """Experiment trackers that receive the metrics. No method raises."""

    def log(self, line: Mapping[str, Any]) -> None: ...

    def problems(self) -> list[str]:
        """Problems since the previous call."""

    def end(self, record: RunRecord) -> None: ...


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Schedulers announce the time limit by SIGTERM or SIGUSR1.
JOB_SIGNALS = (*SIGNALS, signal.SIGUSR1)
# A repetition after this time is a second request; before, it is the first one, forwarded by a launcher. A scheduler
# signals every process of a job, and on a busy node the last copy of its SIGTERM arrives many seconds later.
SECOND_REQUEST_S = {signal.SIGINT: 1.0, signal.SIGTERM: 30.0}


class StopRequest:
    """Turns signals into a request: the first one makes `check()` raise at the next safe point, where the work can be
    saved. A second request (see `SECOND_REQUEST_S`) ends the process immediately."""

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self.signum: int | None = None
        self._signals = signals
        self._received_s = 0.0
        self._closing = False
        self._refusal: JoulelabError | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            # nohup starts a program with SIGHUP ignored: it is meant to outlive its terminal.
            outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            heard = [signum for signum in self._signals if not (outlives and signum == signal.SIGHUP)]
            self._previous = {signum: signal.signal(signum, self._receive) for signum in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.signum is None:
            # Only a flag: a handler runs between two bytecodes of any function, and raising there
            # could interrupt a checkpoint or a lock half-way.
            self.signum, self._received_s = signum, now_s
        elif not self._closing and now_s - self._received_s > SECOND_REQUEST_S.get(signal.Signals(signum), math.inf):
            raise EndedBySignal(signum)

    def ignore_repeats(self) -> None:
        """From now on a second signal does not interrupt: the work has ended and its record is being written."""
        self._closing = True

    def refuse(self, error: JoulelabError) -> None:
        """Make the next `check()` raise this error."""
        self._refusal = error

    def check(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        if self.signum is not None:
            raise EndedBySignal(self.signum)


PROGRESS_INTERVAL_S = 1.0


class Stage:
    """An open stage. Counts are cumulative over the stage, including earlier attempts that were resumed."""

    def __init__(self, meter: Meter, name: str, kind: StageKind) -> None:
        self.name = name
        self.kind = kind
        self._meter = meter
        self._counts: dict[str, int] = {}
        self._written_s = 0.0

    def count(self, **counts: int) -> None:
        self._counts.update(counts)
        if time.monotonic() - self._written_s > PROGRESS_INTERVAL_S:
            self.write_counts()

    @property
    def counts(self) -> Mapping[str, int]:
        return self._counts

    def count_as_setup(self, **counts: int) -> None:
        """How many of the counted items were processed in setup time; they are excluded from rates of this stage."""
        self._meter.event("setup_counts", stage=self.name, counts=counts)

    def checkpointed(self, at: int) -> None:
        """The work so far is saved: a later attempt that resumes at step `at` repeats none of it."""
        self._meter.event("checkpoint", stage=self.name, at=at)

    def resumed(self, at: int | None = None) -> None:
        """This attempt continues the work of earlier ones: from their checkpoint `at`, or all of it.

        Without this call the stage starts over, and the work of earlier attempts on it is billed as repeated.
        """
        self._meter.event("resumed", stage=self.name, at=at)

    def write_counts(self) -> None:
        if self._counts:
            self._meter.event("progress", stage=self.name, counts=self._counts)
            self._written_s = time.monotonic()


class RunContext:
    """One attempt of a run, as its pipeline sees it."""

    def __init__(
        self,
        paths: RunPaths,
        spec: RunSpec,
        meter: Meter,
        stop: StopRequest,
        attempt: int,
        progress: Progress,
        last_phase: Phase | None = None,
    ) -> None:
        self.paths = paths
        self.spec = spec
        self.meter = meter
        self.stop = stop
        self.attempt = attempt
        self.progress = progress
        self.trackers: Trackers | None = None
        """None on worker ranks."""
        self._metrics = self._open_metrics(paths.metrics)
        self._open: list[Stage] = []
        self._closed: dict[str, Stage] = {}
        self._making: list[BillBuilder] = []
        self._when_made: list[list[Callable[[], None]]] = []
        """For each artifact in progress, what is to be done once it is complete."""
        self._loses_metrics = False
        self._reported: set[str] = set()
        """Keys of artifacts whose reuse was reported: several stages may request the same one."""
        self._device: str | None = None
        self.last_phase = last_phase
        """Phase after which this attempt ends; None: run to the end."""
        self.is_partial = False
        """Whether the pipeline stopped before a later phase."""

    def includes(self, phase: Phase | Literal["evaluate"]) -> bool:
        """Whether this attempt does the work of `phase`. If not, the pipeline must return; the run is then queued."""
        if self.last_phase is None or not comes_after(phase, self.last_phase):
            return True
        self.is_partial = True
        return False

    @contextmanager
    def stage(
        self,
        name: str,
        total: int | None = None,
        again: bool = False,
        *,
        role: str | None = None,
        activity: str | None = None,
        repeat: int | None = None,
    ) -> Iterator[Stage]:
        """Bill the time inside to the stage `name`; a nested stage suspends the outer one.

        `role` states whose work it is, `activity` what is done; without them the name `<role>.<activity>` decides.
        A name identifies one stage. `again=True` adds a segment to a closed stage, e.g. for repeated evaluations;
        otherwise opening it a second time is an error, so that two stages are never merged by accident.
        """
        if name in [stage.name for stage in self._open] or (name in self._closed and not again):
            raise JoulelabError(f"stage '{name}' was opened twice", "use a unique name, or again=True to continue it")
        by_name = kind_by_name(name)
        kind = StageKind(checked_role(role) if role else by_name.role, activity or by_name.activity, repeat)
        if not self._open:  # inside another stage its loop calls check() where it can save
            self.stop.check()
        stage = self._closed.pop(name, None) or Stage(self.meter, name, kind)
        if self._making and name not in self._making[-1].stages:
            self._making[-1].stages.append(name)
        if self._open:
            self.meter.event("stage", edge="end", stage=self._open[-1].name)
        self._enter(stage, opened=not self._open)
        self.progress.stage(name, total)
        status = "done"
        try:
            yield stage
        except EndedBySignal:
            status = "truncated"
            raise
        except BaseException:
            status = "failed"
            raise
        finally:
            stage.write_counts()
            self.meter.event("stage", edge="end", stage=name)
            self.meter.event("stage_closed", stage=name, status=status)
            self._open.pop()
            self._closed[name] = stage
            self.progress.finish()
            if self._open:
                self._enter(self._open.pop())
            else:
                self.meter.enter_stage(None)

    @contextmanager
    def setup(self, activity: str) -> Iterator[None]:
        """The time inside is setup of the stage that is open."""
        begin_ns = clock.now().mono_ns
        try:
            yield
        finally:
            self.note_setup(activity, begin_ns, clock.now().mono_ns)

    def note_setup(self, activity: str, begin_ns: int, end_ns: int) -> None:
        """Exclude setup time (an import, a compilation) from the open stage."""
        if self._open and (self._open[-1].kind.role != "setup" or activity == STARTUP):
            self.meter.exclude(begin_ns, end_ns)
            self.progress.setup(begin_ns, end_ns)
            self.meter.event("setup", stage=self._open[-1].name, activity=activity, begin_ns=begin_ns, end_ns=end_ns)

    def note_device(self, device: str) -> None:
        """Record the device of the models (`cpu`, `cuda`): energy per item is that of this device."""
        if device != self._device:
            self._device = device
            self.meter.event("device", device=device)

    def _enter(self, stage: Stage, opened: bool = False) -> None:
        self._open.append(stage)
        self.meter.enter_stage(stage.name)
        kind = {key: value for key, value in stage.kind._asdict().items() if value is not None}
        self.meter.event("stage", edge="begin", stage=stage.name, opened=opened, **kind)

    def artifact(
        self,
        name: str,
        *,
        kind: str,
        inputs: Mapping[str, Any],
        parents: Sequence[Bill],
        make: Callable[[Path], None],
        reuse: bool = True,
        opens: Opens | None = None,
    ) -> Artifact:
        """The artifact of these inputs, parents and code, reused or made; in both cases with its bill.

        A reused artifact is intact: its files match their list, and `opens`, if given, can read them.
        `reuse=False` ignores other runs and reuses only what an earlier attempt of this run has finished.
        """
        key = self.key_of(kind, inputs, [parent.key for parent in parents])
        artifact = self._own(name, key, opens)
        if artifact is None and reuse:
            artifact = self.find_artifact(key, opens)
        if artifact is None:
            self._report_changed_key(name, key)
            artifact = self._make(name, kind, key, dict(inputs), parents, make)
        elif artifact.reused and key not in self._reported:
            self.progress.write(f"Reusing {name} from {artifact.bill.artifact.made_by} (its energy is included)")
            self._reported.add(key)
        self.meter.event("artifact", name=name, bill=artifact.bill.model_dump(mode="json"))
        return artifact

    @cached_property
    def store(self) -> Path:
        """Where artifacts of other runs are searched."""
        return searched_store(self.paths)

    def key_of(self, kind: str, inputs: Mapping[str, Any], parents: Sequence[str]) -> str:
        """Key of the artifact of these inputs and this code, whether it exists or not; parents are given by keys."""
        # of a pipeline that another package provides, the version of its code is known by that of the package
        code = " ".join(filter(None, (code_version(), lookup.PIPELINES.origin(self.spec.pipeline))))
        return artifact_key(kind, inputs, parents, code)

    def find_artifact(self, key: str, opens: Opens | None = None) -> Artifact | None:
        """An intact artifact of another run, if the settings allow reuse."""
        others = find_artifacts(self.store, key) if self.spec.reuse_artifacts else ()
        return next((self._with_recorded_energy(other) for other in others if self._is_intact(other, opens)), None)

    def artifact_in(self, folder: Path) -> Artifact | None:
        """The artifact in this folder, if there is one and it is intact."""
        bill = read_bill(folder)
        artifact = Artifact(folder, bill, reused=bill.artifact.made_by != self.paths.run_id) if bill else None
        return self._with_recorded_energy(artifact) if artifact is not None and self._is_intact(artifact) else None

    def _with_recorded_energy(self, artifact: Artifact) -> Artifact:
        """With the energy that the record of its run states: the bill of a killed run stays provisional."""
        return replace(artifact, bill=with_recorded_energy(artifact.bill, artifact.folder.parent.parent.parent))

    def _open_metrics(self, path: Path) -> LineFile:
        return LineFile(path)

    def _artifact_folder(self, name: str) -> Path:
        return self.paths.artifacts / name

    def _own(self, name: str, key: str, opens: Opens | None) -> Artifact | None:
        """The artifact if an earlier attempt of this run finished it."""
        bill = read_bill(self.paths.artifacts / name)
        own = Artifact(self.paths.artifacts / name, bill, reused=False) if bill and bill.key == key else None
        return own if own is not None and self._is_intact(own, opens) else None

    def _report_changed_key(self, name: str, key: str) -> None:
        """Explain why a resumed run does not reuse what an earlier attempt made."""
        bill = read_bill(self.paths.artifacts / name)
        if bill is not None and bill.key != key:
            self.progress.write(f"Recreating {name}: the code or its inputs have changed")

    def _is_intact(self, artifact: Artifact, opens: Opens | None = None) -> bool:
        damage = find_damage(artifact.folder, opens)
        if damage is not None:
            self._reject(artifact, damage)
        return damage is None

    def _reject(self, artifact: Artifact, damage: str) -> None:
        made = artifact.bill.artifact
        self.warn(f"Ignoring {made.name} from {made.made_by}: it is corrupted ({damage})")
        set_aside(artifact.folder)

    def _make(
        self,
        name: str,
        kind: str,
        key: str,
        inputs: dict[str, Any],
        parents: Sequence[Bill],
        make: Callable[[Path], None],
    ) -> Artifact:
        folder = fresh_folder(self._artifact_folder(name))
        before = self.meter.so_far()
        self._making.append(BillBuilder())
        self._when_made.append([])
        try:
            make(folder)
        finally:
            builder, when_made = self._making.pop(), self._when_made.pop()
        list_contents(folder)
        energy = spent_between(before, self.meter.so_far())
        made = Ancestor(key=key, name=name, kind=kind, made_by=self.paths.run_id, energy=energy)
        bill = builder.bill(made, parents, code_version(), inputs)
        write_bill(folder, bill)
        for work in when_made:
            work()
        return Artifact(folder, bill, reused=False)

    def when_made(self, work: Callable[[], None]) -> None:
        """Do this once the artifact in progress is complete, or now if there is none: remove checkpoints, for example,
        which a resumed attempt needs if this one is killed before that."""
        if self._when_made:
            self._when_made[-1].append(work)
        else:
            work()

    def unmetered_work(self, stage: str, server: str, reason: str) -> None:
        """Record work of a stage on the artifact in progress that this run's meter cannot measure."""
        self._making[-1].unmetered[f"{stage} on {server}"] = reason
        self.meter.event("unmetered", stage=stage, server=server, reason=reason)

    def find_shards(self, key: str, include_damaged: bool = False) -> list[Artifact]:
        """Shards of an artifact in the store. The artifact in progress is joined from them, and they are on its bill.
        `include_damaged` includes corrupted ones, for callers that can tell which units are intact."""
        accept = (lambda part: True) if include_damaged else self._is_intact
        shards = find_shards(self.store, key, accept) if self.spec.reuse_artifacts else []
        resolved = [self._with_recorded_energy(shard) for shard in shards]
        self._making[-1].joined += [shard.bill for shard in resolved]
        return resolved

    def record_input(self, name: str, bill: Bill) -> Bill:
        """Record an input that this run did not make, so that the lineage includes it."""
        self.meter.event("artifact", name=name, bill=bill.model_dump(mode="json"))
        return bill

    def earlier_inputs(self) -> list[Bill]:
        """Bills of the inputs that earlier attempts of this run recorded."""
        attempts = sorted(self.paths.event_files().items(), key=lambda entry: entry[0][1])
        files = [path for (_, attempt), ranks in attempts if attempt < self.attempt for _, path in ranks]
        return [bill for path in files for bill in read_events(path).bills.values()]

    def log(self, step: int, **values: float | str) -> None:
        """Write a line of metrics; if a step was repeated after a resume, the line of the later attempt counts."""
        line = {"step": step, "attempt": self.attempt, **clock.now().fields(), **values}
        try:
            self._metrics.append(line)
        except OSError as error:  # a full disk must not end hours of training for the sake of a line
            if not self._loses_metrics:
                self.warn(f"metrics cannot be written and are lost: {error}")
            self._loses_metrics = True
        if self.trackers is not None:
            self.trackers.log(line)
            self.report_tracker_problems()

    def report_tracker_problems(self) -> None:
        """Problems of trackers become warnings of the run."""
        for text in self.trackers.problems() if self.trackers is not None else ():
            self.warn(text)

    def result(self, name: str, result: Result) -> None:
        """Of a diverged model, a result may be no number, which a record cannot have."""
        if not math.isfinite(result.value):
            self.warn(f"{name} is {result.value} and is not recorded")
            return
        if result.standard_error is not None and not math.isfinite(result.standard_error):
            result = result.model_copy(update={"standard_error": None})
        self.meter.event("result", name=name, result=result.model_dump())

    def energy_result(self, name: str, made: Iterable[Bill], per: int = 1) -> None:
        """The energy of these artifacts together, divided by `per`, as a result. It is computed when the run is closed
        and the energy is final; there is no result if the energy of one of them is unknown."""
        keys = [ancestor.key for bill in made for ancestor in with_shards(bill)]
        self.meter.event("joules", name=name, of=keys, per=per)

    def note(self, text: str) -> None:
        """A remark for the user and the record, such as how data was split."""
        self.meter.event("note", text=redact_text(text)[0])
        self.progress.write(f"note: {text}")

    def warn(self, text: str) -> None:
        text, _ = redact_text(text)
        self.meter.event("warning", text=text)
        self.progress.write(f"warning: {text}")

    def close(self) -> None:
        self._metrics.close()


class WorkerContext(RunContext):
    """A run on a rank other than the first: it does the same work and writes only its own marks."""

    def __init__(
        self,
        paths: RunPaths,
        spec: RunSpec,
        meter: Meter,
        stop: StopRequest,
        attempt: int,
        scratch: Path,
        last_phase: Phase | None = None,
    ) -> None:
        self._scratch = scratch
        super().__init__(paths, spec, meter, stop, attempt, SilentProgress(), last_phase)

    def _open_metrics(self, path: Path) -> LineFile:
        return LineFile(self._scratch / path.name)

    def _artifact_folder(self, name: str) -> Path:
        return self._scratch / name

    def _reject(self, artifact: Artifact, damage: str) -> None:
        """The first rank reports it and sets it aside; it may already have been made again."""
