"""A job starts here with nothing but the folder: its pipeline, from the idle baseline before to the record after."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

from joulelab import clock, lookup
from joulelab.clock import NS
from joulelab.errors import EndedBySignal, JoulelabError
from joulelab.meter.session import Meter
from joulelab.runs import environment
from joulelab.runs.attempt import RunAttempt, idle
from joulelab.runs.attempt_data import STARTUP
from joulelab.runs.context import JOB_SIGNALS, Progress, RunContext, StopRequest, WorkerContext
from joulelab.runs.paths import RunPaths
from joulelab.runs.phases import Phase, PhaseFinished
from joulelab.runs.record import RunRecord, Status
from joulelab.runs.spec import check, read_mapping
from joulelab.runs.storage import read_json, storage_failure, write_json

# Imports inside a stage are setup: the first run of a process pays for them, whichever method it measures.


# Shorter imports cost less than the mark that would report them.
SHORTEST_NS = NS // 100


class _ImportTimer:
    """A finder that leaves finding to the others, and times how long the outermost import of the main thread takes."""

    def __init__(self, note: Callable[[int, int], None]) -> None:
        self._note = note
        self._busy = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._busy or threading.current_thread() is not threading.main_thread():
            return None
        begin_ns = clock.now().mono_ns
        self._busy = True
        try:
            spec = self._found_by_others(name, path, target)
        finally:
            self._busy = False
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            self._time(spec.loader, begin_ns)
        return spec

    def _found_by_others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (spec := find(name, path, target)) is not None:
                return spec  # type: ignore[no-any-return]  # finders of other packages are untyped
        return None

    def _time(self, loader: SourceFileLoader, begin_ns: int) -> None:
        load = loader.exec_module

        def timed(module: ModuleType) -> None:
            del loader.exec_module
            self._busy = True
            try:
                load(module)
            finally:
                self._busy = False
                end_ns = clock.now().mono_ns
                if end_ns - begin_ns >= SHORTEST_NS:
                    self._note(begin_ns, end_ns)

        loader.exec_module = timed  # type: ignore[method-assign]


@contextmanager
def import_times(note: Callable[[int, int], None]) -> Iterator[None]:
    """Report every import meanwhile that took a noticeable time as `note(begin_ns, end_ns)`."""
    timer = _ImportTimer(note)
    sys.meta_path.insert(0, timer)
    try:
        yield
    finally:
        sys.meta_path.remove(timer)


# Several processes that are one run: torchrun starts them all with the same command line, the first one holds the
# run.
#
# The first rank makes the folder, measures, and writes the record. The others follow: they learn from a small file in
# the store which folder and attempt it is, and do the same work with marks of their own and nothing else written.


WAIT_S = 600.0
# The others end with the first rank, their recorders a moment later.
CLOSING_S = 15.0
JOINING_S = 120.0
_FOLDER = ".ranks"


@dataclass(frozen=True)
class RankInfo:
    """This process among those that are one run."""

    rank: int = 0
    world: int = 1
    job: str = ""

    @property
    def follows(self) -> bool:
        return self.rank > 0


def current_rank() -> RankInfo:
    """As torchrun says in the environment; alone where nobody says anything."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return RankInfo()
    return RankInfo(int(os.environ["RANK"]), world, _job_name(os.environ, os.getppid()))


def _job_name(environ: Mapping[str, str], launcher_pid: int) -> str:
    """The same for all ranks of a run and for nobody else, an earlier start of the same job included."""
    parts = [environ["TORCHELASTIC_RUN_ID"], environ.get("MASTER_PORT", "")]
    if int(environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        parts.append(str(launcher_pid))  # the parent of all ranks of a node, and no other job's
    else:
        parts.append(environ.get("MASTER_ADDR", ""))
        slurm = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
        parts += [environ[name] for name in slurm if name in environ]
    return "-".join([*parts, environ.get("TORCHELASTIC_RESTART_COUNT", "0")])


def publish_run(place: RankInfo, paths: RunPaths, attempt: int) -> None:
    """The first rank says which run it is, once its meter runs."""
    if place.world > 1:
        write_json(_file(paths.folder.parent, place), {"folder": paths.folder.name, "attempt": attempt})


def unpublish_run(place: RankInfo, paths: RunPaths) -> None:
    if place.world > 1:
        _file(paths.folder.parent, place).unlink(missing_ok=True)


def join_run(place: RankInfo, store: Path, sleep: Callable[[float], None] = time.sleep) -> tuple[RunPaths, int]:
    """The run and attempt that the first rank has begun; waits for it."""
    file = _file(store, place)
    give_up = time.monotonic() + WAIT_S
    while not file.exists():
        if time.monotonic() > give_up:
            raise JoulelabError(
                f"rank 0 has begun no run within {WAIT_S:.0f} s",
                f"its own message says why; on several nodes all of them must see {store.absolute()}",
            )
        sleep(0.1)
    told = read_json(file)
    return RunPaths(store / told["folder"]), int(told["attempt"])


def wait_until_joined(
    place: RankInfo, paths: RunPaths, attempt: int, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Until every rank has come along: an idle baseline is none while the others still import their framework."""
    give_up = time.monotonic() + JOINING_S
    while place.world > 1 and time.monotonic() < give_up:
        if len(_events_of(paths, attempt)) >= place.world:
            return
        sleep(0.1)


def _events_of(paths: RunPaths, attempt: int) -> list[Path]:
    return [path for (_, number), ranks in paths.event_files().items() if number == attempt for _, path in ranks]


def wait_for_others(
    place: RankInfo, paths: RunPaths, attempt: int, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Until the recorder of every rank has closed its files; what is still open then is read as far as it goes."""
    give_up = time.monotonic() + CLOSING_S
    while place.world > 1 and time.monotonic() < give_up:
        events = _events_of(paths, attempt)
        # a ring is removed after its recorder has ended
        if len(events) >= place.world and not any(path.with_suffix(".ring").exists() for path in events):
            return
        sleep(0.1)


def scratch(paths: RunPaths, place: RankInfo) -> Path:
    """Where a following rank may write what the first one keeps; empty, and gone after the run."""
    folder = paths.folder / f".rank-{place.rank}"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _file(store: Path, place: RankInfo) -> Path:
    folder = store / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{place.job}.json"


def execute(paths: RunPaths, progress: Progress, part: Phase | None = None) -> RunRecord:
    """Run the folder's pipeline as a new attempt. Whatever happens, the joules spent are in the record afterwards.

    With a `part` it stops where the next part would begin; the run is then queued for whoever does that.
    """
    spec = check(read_mapping(paths.config))
    place = current_rank()
    status: Status = "done"
    error: BaseException | None = None
    with StopRequest(JOB_SIGNALS) as stop:
        attempt = RunAttempt(paths, spec, stop, progress)
        attempt.part = part
        try:
            run = attempt.begin(metering=lambda run: _gather(place, run))
            _run_pipeline(run, spec.pipeline)
        except PhaseFinished:
            status = "queued"
        except EndedBySignal as ended:
            status, error = "truncated", ended
        except BaseException as failure:
            status, error = "failed", storage_failure(failure, paths.folder) or failure
        stop.settle()
        unpublish_run(place, paths)
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


def _gather(place: RankInfo, run: RunContext) -> None:
    """The meter runs: the other ranks may come."""
    publish_run(place, run.paths, run.attempt)
    if run.spec.energy.idle_before_s > 0:
        wait_until_joined(place, run.paths, run.attempt)


def execute_worker(place: RankInfo, store: Path, pipeline_name: str, part: Phase | None = None) -> None:
    """What a following rank does: the same pipeline, in the first rank's run, with marks of its own.

    On another host than the first rank's its marks are the ones that this host's joules are told apart by. How the run
    ended is the first rank's to say: one that was asked to stop ends quietly here, or its launcher would take it for a
    failure and kill the first rank over its record.
    """
    lookup.PIPELINES.resolve(pipeline_name)  # while the first rank imports the same
    paths, number = join_run(place, store)
    spec = check(read_mapping(paths.config))
    host = environment.node_name()
    with StopRequest(JOB_SIGNALS) as stop:
        meter = Meter(paths.trace(host, number), paths.events(host, place.rank, number), spec.energy)
        meter.start()
        meter.event("run", edge="begin")
        run = WorkerContext(paths, spec, meter, stop, number, scratch(paths, place))
        run.part = part
        try:
            idle(run, "idle.before", spec.energy.idle_before_s)
            _run_pipeline(run, pipeline_name)
            idle(run, "idle.after", spec.energy.idle_after_s)
        except (PhaseFinished, EndedBySignal):
            pass
        finally:
            stop.settle()
            meter.event("run", edge="end")
            run.close()
            meter.stop()
            shutil.rmtree(scratch(paths, place), ignore_errors=True)
