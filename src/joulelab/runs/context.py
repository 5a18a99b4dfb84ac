"""What a pipeline holds while it runs: stages, artefacts, metrics, results, progress, and the wish to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

from joulelab import clock
from joulelab.errors import EndedBySignal, JoulelabError
from joulelab.meter.session import Meter
from joulelab.meter.trace import LineFile
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
    find_parts,
    fresh_folder,
    list_contents,
    read_bill,
    set_aside,
    spent_between,
    with_parts,
    write_bill,
)
from joulelab.runs.attempt_data import STARTUP
from joulelab.runs.paths import RunPaths
from joulelab.runs.phases import Phase, end_before_later_phase
from joulelab.runs.record import Result, RunRecord, StageKind, checked_role, kind_by_name
from joulelab.runs.spec import RunSpec
from joulelab.runs.store import searched_store, settled

# Who is told how a run goes: a person, and other tools. A run does not depend on what becomes of them.


class Progress(Protocol):
    """Where a person watches: a terminal, a log, or nowhere."""

    def stage(self, name: str, total: int | None) -> None: ...

    def advance(self, done: int, text: str = "") -> None: ...

    def finish(self) -> None:
        """The stage is over; what comes next may be silent for a while."""

    def say(self, text: str) -> None: ...


class SilentProgress:
    def stage(self, name: str, total: int | None) -> None: ...

    def advance(self, done: int, text: str = "") -> None: ...

    def finish(self) -> None: ...

    def say(self, text: str) -> None: ...


class Trackers(Protocol):
    """Other tools that are told the metrics; whatever becomes of them, nothing is raised here."""

    def log(self, line: Mapping[str, Any]) -> None: ...

    def problems(self) -> list[str]:
        """What has gone wrong since the last time somebody asked."""

    def end(self, record: RunRecord) -> None: ...


# Signals as a request: the first asks the run to save and end, another a second later ends it at once.


SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A scheduler announces the time limit by the one or the other.
JOB_SIGNALS = (*SIGNALS, signal.SIGUSR1)
# A scheduler signals every process of a job, and a launcher passes on what it got: the same request, twice.
ECHO_S = 1.0


class StopRequest:
    """While entered, these signals set a flag; whoever reaches a safe point calls `check()`."""

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self.signum: int | None = None
        self._signals = signals
        self._asked_s = 0.0
        self._settling = False
        self._refusal: JoulelabError | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._receive) for signum in self._signals}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.signum is None:
            self.signum, self._asked_s = signum, now_s
        elif not self._settling and now_s - self._asked_s > ECHO_S:
            raise EndedBySignal(signum)

    def settle(self) -> None:
        """The work is over and its record is being written: a launcher that signals twice must not spoil that."""
        self._settling = True

    def refuse(self, error: JoulelabError) -> None:
        """End the work at its next safe point with an error of ours."""
        self._refusal = error

    def check(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        if self.signum is not None:
            raise EndedBySignal(self.signum)


PROGRESS_EVERY_S = 1.0


class Stage:
    """A running stage: counts what went through it. Counts are cumulative over the stage, resumed attempts included."""

    def __init__(self, meter: Meter, name: str, kind: StageKind) -> None:
        self.name = name
        self.kind = kind
        self._meter = meter
        self._counts: dict[str, int] = {}
        self._written_s = 0.0

    def count(self, **counts: int) -> None:
        self._counts.update(counts)
        if time.monotonic() - self._written_s > PROGRESS_EVERY_S:
            self.write_counts()

    @property
    def counts(self) -> Mapping[str, int]:
        return self._counts

    def count_as_setup(self, **counts: int) -> None:
        """Of what was counted, so much was done in time that was noted as setup: it is in no rate of this stage."""
        self._meter.event("setup_counts", stage=self.name, counts=counts)

    def checkpointed(self, at: int) -> None:
        """The work so far is safe: a later attempt that resumes at `at` (a step) repeats nothing of it."""
        self._meter.event("checkpoint", stage=self.name, at=at)

    def resumed(self, at: int | None = None) -> None:
        """This attempt takes up the work of earlier ones: at their checkpoint `at`, or all of it.

        Without this call a stage begins anew, and what earlier attempts did of it is billed as repeated.
        """
        self._meter.event("resumed", stage=self.name, at=at)

    def write_counts(self) -> None:
        if self._counts:
            self._meter.event("progress", stage=self.name, counts=self._counts)
            self._written_s = time.monotonic()


class RunContext:
    """One attempt of one run, from inside."""

    def __init__(
        self, paths: RunPaths, spec: RunSpec, meter: Meter, stop: StopRequest, attempt: int, progress: Progress
    ) -> None:
        self.paths = paths
        self.spec = spec
        self.meter = meter
        self.stop = stop
        self.attempt = attempt
        self.progress = progress
        self.trackers: Trackers | None = None
        """Where the metrics also go; following ranks have none."""
        self._metrics = self._open_metrics(paths.metrics)
        self._open: list[Stage] = []
        self._closed: dict[str, Stage] = {}
        self._making: list[BillBuilder] = []
        self._told: set[str] = set()
        """Keys of the artefacts that were said to be reused: several stages may ask for one."""
        self._device: str | None = None
        self.part: Phase | None = None
        """What this attempt is to do of the run; None: all that is left."""

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
        """Bill what happens inside to `name`; a stage inside another suspends the outer one.

        `role` says whose work it is and `activity` what is done; without them the name `<who>.<what>` decides.
        A name stands for one stage. `again=True` adds a segment to a stage that was closed before, as repeated
        evaluations do; without it a second use is refused, so that two stages never merge by accident.
        """
        if name in [stage.name for stage in self._open] or (name in self._closed and not again):
            raise JoulelabError(f"the stage '{name}' was opened twice", "give each stage a name of its own")
        by_name = kind_by_name(name)
        kind = StageKind(checked_role(role) if role else by_name.role, activity or by_name.activity, repeat)
        if not self._open:  # inside another stage its loop asks, at a point where it can save
            self.stop.check()
            end_before_later_phase(name, kind, self.part)
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

    def note_setup(self, activity: str, begin_ns: int, end_ns: int) -> None:
        """Take time that was setup (an import, a compilation) out of the open stage."""
        if self._open and (self._open[-1].kind.role != "setup" or activity == STARTUP):
            self.meter.exclude(begin_ns, end_ns)
            self.meter.event("setup", stage=self._open[-1].name, activity=activity, begin_ns=begin_ns, end_ns=end_ns)

    def note_device(self, device: str) -> None:
        """Record where the models of the run work (`cpu`, `cuda`): energy per item is that of this device."""
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
        """Find what was already made from the same inputs, parents and code, or make it; either way with its bill.

        What is found is whole: its files are those that were written, and `opens`, where given, can read them.
        `reuse=False` takes nothing from other runs, only what an earlier attempt of this one has finished.
        """
        key = self.key_of(kind, inputs, [parent.key for parent in parents])
        found = self._own(name, key, opens)
        if found is None and reuse:
            found = self.found(key, opens)
        if found is None:
            self._tell_change(name, key)
            found = self._make(name, kind, key, dict(inputs), parents, make)
        elif found.reused and key not in self._told:
            self.progress.say(f"{name}: reused from {found.bill.artefact.made_by}, its bill comes along")
            self._told.add(key)
        self.meter.event("artefact", name=name, bill=found.bill.model_dump(mode="json"))
        return found

    @cached_property
    def store(self) -> Path:
        """Where artifacts of other runs are searched."""
        return searched_store(self.paths)

    def key_of(self, kind: str, inputs: Mapping[str, Any], parents: Sequence[str]) -> str:
        """Of an artefact made from these by this code, whether it is there or not; parents are named by their keys."""
        return artifact_key(kind, inputs, parents, code_version())

    def found(self, key: str, opens: Opens | None = None) -> Artifact | None:
        """What another run made and is still whole, where this one takes anything from others."""
        others = find_artifacts(self.store, key) if self.spec.reuse_artifacts else ()
        return next((self._settled(other) for other in others if self._is_whole(other, opens)), None)

    def whole_in(self, folder: Path) -> Artifact | None:
        """The artefact in this folder, if there is one and it has come to no harm."""
        bill = read_bill(folder)
        artifact = Artifact(folder, bill, reused=bill.artefact.made_by != self.paths.run_id) if bill else None
        return self._settled(artifact) if artifact is not None and self._is_whole(artifact) else None

    def _settled(self, artifact: Artifact) -> Artifact:
        """With the energy that the record of its run states: the bill of a killed run is still a provisional one."""
        return replace(artifact, bill=settled(artifact.bill, artifact.folder.parent.parent.parent))

    def _open_metrics(self, path: Path) -> LineFile:
        return LineFile(path)

    def _artifact_place(self, name: str) -> Path:
        return self.paths.artifacts / name

    def _own(self, name: str, key: str, opens: Opens | None) -> Artifact | None:
        """What an earlier attempt of this very run finished."""
        bill = read_bill(self.paths.artifacts / name)
        own = Artifact(self.paths.artifacts / name, bill, reused=False) if bill and bill.key == key else None
        return own if own is not None and self._is_whole(own, opens) else None

    def _tell_change(self, name: str, key: str) -> None:
        """An earlier attempt made it, and a person who resumes expects to find it again."""
        bill = read_bill(self.paths.artifacts / name)
        if bill is not None and bill.key != key:
            self.progress.say(f"{name}: made again; the program, or what it is made from, has changed since")

    def _is_whole(self, artifact: Artifact, opens: Opens | None = None) -> bool:
        found = find_damage(artifact.folder, opens)
        if found is not None:
            self._pass_over(artifact, found)
        return found is None

    def _pass_over(self, artifact: Artifact, found: str) -> None:
        made = artifact.bill.artefact
        self.warn(f"{made.name}, made by {made.made_by}, is damaged and not used: {found}")
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
        folder = fresh_folder(self._artifact_place(name))
        before = self.meter.so_far()
        self._making.append(BillBuilder())
        try:
            make(folder)
        finally:
            making = self._making.pop()
        list_contents(folder)
        energy = spent_between(before, self.meter.so_far())
        made = Ancestor(key=key, name=name, kind=kind, made_by=self.paths.run_id, energy=energy)
        bill = making.bill(made, parents, code_version(), inputs)
        write_bill(folder, bill)
        return Artifact(folder, bill, reused=False)

    def unmetered_work(self, name: str, reason: str) -> None:
        """Work for the artefact that is being made, done where this run's meter does not reach: its bill shows it."""
        self._making[-1].unmetered[name] = reason

    def shares_of(self, key: str, damaged_too: bool = False) -> list[Artifact]:
        """Shares of an artefact that tasks of a split have left in the store; the one being made is joined from them,
        and they are on its bill. `damaged_too` is for whoever can tell what is still good in a damaged one."""
        takes = (lambda part: True) if damaged_too else self._is_whole
        parts = find_parts(self.store, key, takes) if self.spec.reuse_artifacts else []
        found = [self._settled(part) for part in parts]
        self._making[-1].joined += [part.bill for part in found]
        return found

    def uses(self, name: str, bill: Bill) -> Bill:
        """Note something that came from elsewhere, so that the lineage shows it."""
        self.meter.event("artefact", name=name, bill=bill.model_dump(mode="json"))
        return bill

    def log(self, step: int, **values: float | str) -> None:
        """A line of metrics; after a resume the later attempt's line for a step is the one that counts."""
        line = {"step": step, "attempt": self.attempt, **clock.now().fields(), **values}
        self._metrics.append(line)
        if self.trackers is not None:
            self.trackers.log(line)
            self.tell_problems()

    def tell_problems(self) -> None:
        """What trackers could not do is a warning of the run, and nothing worse."""
        for text in self.trackers.problems() if self.trackers is not None else ():
            self.warn(text)

    def result(self, name: str, result: Result) -> None:
        self.meter.event("result", name=name, result=result.model_dump())

    def joules_result(self, name: str, made: Iterable[Bill], per: int = 1) -> None:
        """What some artefacts took together, for each of `per` things. It is worked out with the record, when their
        joules are settled; there is no such result where they are not known of all."""
        keys = [one.key for bill in made for one in with_parts(bill)]
        self.meter.event("joules", name=name, of=keys, per=per)

    def warn(self, text: str) -> None:
        self.meter.event("warning", text=text)
        self.progress.say(f"warning: {text}")

    def close(self) -> None:
        self._metrics.close()


# A run as a following rank sees it: it works along, and keeps nothing that the first rank keeps.


class WorkerContext(RunContext):
    def __init__(
        self, paths: RunPaths, spec: RunSpec, meter: Meter, stop: StopRequest, attempt: int, scratch: Path
    ) -> None:
        self._scratch = scratch
        super().__init__(paths, spec, meter, stop, attempt, SilentProgress())

    def _open_metrics(self, path: Path) -> LineFile:
        return LineFile(self._scratch / path.name)

    def _artifact_place(self, name: str) -> Path:
        return self._scratch / name

    def _pass_over(self, artifact: Artifact, found: str) -> None:
        """The first rank sees the same harm, says so and sets it aside; by now it may lie there made anew."""
