"""Runs the pipeline of a run folder as a new attempt, on one process or on all ranks that torchrun started.

Rank 0 creates the folder, measures, and writes the record. The other ranks learn its folder and attempt from a small
file in the store, do the same work and write only their own marks.
"""

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
from joulelab.runs.paths import RunPaths, read_json, storage_failure, write_json
from joulelab.runs.phases import Phase
from joulelab.runs.record import RunRecord, Status
from joulelab.runs.spec import check, read_mapping

# Imports inside a stage are setup: the first run of a process would otherwise be billed for them, whichever method it
# measures. Shorter imports take less time than writing the mark.
SHORTEST_NS = NS // 100


class _ImportTimer:
    """A meta path finder that delegates to the others and times the outermost import of the main thread."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self._report = report
        self._busy = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Imports nest: timing the inner ones as well would count their time twice. Other threads
        # import while the main thread works, which is not start-up.
        if self._busy or threading.current_thread() is not threading.main_thread():
            return None
        begin_ns = clock.now().mono_ns
        self._busy = True
        try:
            spec = self._delegate(name, path, target)
        finally:
            self._busy = False
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            self._time(spec.loader, begin_ns)
        return spec

    def _delegate(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (spec := find(name, path, target)) is not None:
                return spec  # type: ignore[no-any-return]  # finders of other packages are untyped
        return None

    def _time(self, loader: SourceFileLoader, begin_ns: int) -> None:
        load = loader.exec_module

        def timed(module: ModuleType) -> None:
            # Removes the instance attribute, so that the module's loader is the original one again.
            del loader.exec_module
            self._busy = True
            try:
                load(module)
            finally:
                self._busy = False
                end_ns = clock.now().mono_ns
                if end_ns - begin_ns >= SHORTEST_NS:
                    self._report(begin_ns, end_ns)

        loader.exec_module = timed  # type: ignore[method-assign]


@contextmanager
def import_times(report: Callable[[int, int], None]) -> Iterator[None]:
    """Call `report(begin_ns, end_ns)` for every import in the block that takes at least `SHORTEST_NS`."""
    timer = _ImportTimer(report)
    # First in the list, or the standard finders would return a spec before this one is asked.
    sys.meta_path.insert(0, timer)
    try:
        yield
    finally:
        sys.meta_path.remove(timer)


PUBLISH_TIMEOUT_S = 600.0
# Workers end with rank 0, their recorders shortly after.
CLOSE_TIMEOUT_S = 15.0
JOIN_TIMEOUT_S = 120.0
_FOLDER = ".ranks"


@dataclass(frozen=True)
class RankInfo:
    """This process among the ranks of a run."""

    rank: int = 0
    world: int = 1
    job: str = ""

    @property
    def is_worker(self) -> bool:
        return self.rank > 0


def current_rank() -> RankInfo:
    """From the environment variables of torchrun; a single process without them."""
    world = rank_count()
    if world == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        return RankInfo()
    return RankInfo(int(os.environ["RANK"]), world, _job_name(os.environ, os.getppid()))


def started_by_torchrun() -> bool:
    """Also with one rank, which may resume a training of several."""
    return rank_count() > 1 or "TORCHELASTIC_RUN_ID" in os.environ


def rank_count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def host_count() -> int:
    """Hosts of the job; torchrun starts as many ranks on each."""
    return max(1, rank_count() // int(os.environ.get("LOCAL_WORLD_SIZE", str(rank_count()))))


def _job_name(environ: Mapping[str, str], launcher_pid: int) -> str:
    """Identical for all ranks of one start of a job, and different for every other start."""
    parts = [environ["TORCHELASTIC_RUN_ID"], environ.get("MASTER_PORT", "")]
    if int(environ.get("GROUP_WORLD_SIZE", "1")) == 1:
        parts.append(str(launcher_pid))  # the common parent of all ranks of a node
    else:
        parts.append(environ.get("MASTER_ADDR", ""))
        slurm = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
        parts += [environ[name] for name in slurm if name in environ]
    return "-".join([*parts, environ.get("TORCHELASTIC_RESTART_COUNT", "0")])


def publish_run(rank: RankInfo, paths: RunPaths, attempt: int) -> None:
    """On rank 0: announce folder and attempt to the other ranks, once the meter runs."""
    if rank.world > 1:
        # A file and not a collective operation: ranks learn the run before torch.distributed is
        # initialized, whose start-up is part of what is measured.
        write_json(_file(paths.folder.parent, rank), {"folder": paths.folder.name, "attempt": attempt})


def unpublish_run(rank: RankInfo, paths: RunPaths) -> None:
    if rank.world > 1:
        _file(paths.folder.parent, rank).unlink(missing_ok=True)


def join_run(rank: RankInfo, store: Path, sleep: Callable[[float], None] = time.sleep) -> tuple[RunPaths, int]:
    """Wait for rank 0 to publish its run; returns paths and attempt."""
    file = _file(store, rank)
    deadline_s = time.monotonic() + PUBLISH_TIMEOUT_S
    while not file.exists():
        if time.monotonic() > deadline_s:
            raise JoulelabError(
                f"rank 0 has not started a run within {PUBLISH_TIMEOUT_S:.0f} s",
                f"see the output of rank 0; all nodes must be able to read {store.absolute()}",
            )
        sleep(0.1)
    published = read_json(file, folder=str, attempt=int)
    return RunPaths(store / published["folder"]), published["attempt"]


def wait_until_joined(
    rank: RankInfo, paths: RunPaths, attempt: int, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Wait until every rank has joined: while one still imports its framework, the machine is not idle."""
    deadline_s = time.monotonic() + JOIN_TIMEOUT_S
    while rank.world > 1 and time.monotonic() < deadline_s:
        if len(_event_files(paths, attempt)) >= rank.world:
            return
        sleep(0.1)


def _event_files(paths: RunPaths, attempt: int) -> list[Path]:
    return [path for (_, number), ranks in paths.event_files().items() if number == attempt for _, path in ranks]


def wait_for_others(rank: RankInfo, paths: RunPaths, attempt: int, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait until the recorder of every rank has closed its files; after the timeout open files are read as they are."""
    deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
    while rank.world > 1 and time.monotonic() < deadline_s:
        events = _event_files(paths, attempt)
        # a ring is removed after its recorder has ended
        if len(events) >= rank.world and not any(path.with_suffix(".ring").exists() for path in events):
            return
        sleep(0.1)


def scratch(paths: RunPaths, rank: RankInfo) -> Path:
    """Folder for the files of a worker that only rank 0 keeps; empty at the start, deleted at the end."""
    folder = paths.folder / f".rank-{rank.rank}"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _file(store: Path, rank: RankInfo) -> Path:
    folder = store / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{rank.job}.json"


def execute(paths: RunPaths, progress: Progress, last_phase: Phase | None = None) -> RunRecord:
    """Run the folder's pipeline as a new attempt. The energy is recorded however the attempt ends.

    With `last_phase` the attempt ends before the next phase, and the run is queued for a later attempt.
    """
    spec = check(read_mapping(paths.config))
    spec.require_packages()
    rank = current_rank()
    status: Status = "done"
    error: BaseException | None = None
    with StopRequest(JOB_SIGNALS) as stop:
        attempt = RunAttempt(paths, spec, stop, progress, last_phase)
        try:
            run = attempt.begin(metering=lambda run: _gather_ranks(rank, run))
            _run_pipeline(run, spec.pipeline)
            status = "queued" if run.is_partial else "done"
        except EndedBySignal as ended:
            status, error = "truncated", ended
        except BaseException as failure:
            status, error = "failed", storage_failure(failure, paths.folder) or failure
        stop.ignore_repeats()
        unpublish_run(rank, paths)
        # after a failure rank 0 does not wait: the others are blocked in a collective operation that never completes
        others = None if status == "failed" else lambda run: wait_for_others(rank, paths, run.attempt)
        record = attempt.end(status, error, others)
    if error is not None:
        raise error
    return record


def _run_pipeline(run: RunContext, name: str) -> None:
    """Imports count as start-up, not as part of a stage."""
    with import_times(lambda begin_ns, end_ns: run.note_setup(STARTUP, begin_ns, end_ns)):
        lookup.PIPELINES.resolve(name)(run)


def _gather_ranks(rank: RankInfo, run: RunContext) -> None:
    publish_run(rank, run.paths, run.attempt)
    if run.spec.energy.idle_before_s > 0:
        wait_until_joined(rank, run.paths, run.attempt)


def execute_worker(rank: RankInfo, store: Path, pipeline_name: str, last_phase: Phase | None = None) -> None:
    """Run the same pipeline on a rank other than 0, as part of rank 0's run.

    On another host its marks attribute that host's energy to stages. Rank 0 reports how the run ended; a worker that
    receives a signal returns normally, because the launcher would take an error for a failure and kill rank 0 before
    it has written the record.
    """
    lookup.PIPELINES.resolve(pipeline_name)  # while rank 0 imports the same
    paths, number = join_run(rank, store)
    spec = check(read_mapping(paths.config))
    host = environment.node_name()
    with StopRequest(JOB_SIGNALS) as stop:
        meter = Meter(paths.trace(host, number), paths.events(host, rank.rank, number), spec.energy)
        meter.start()
        meter.event("run", edge="begin")
        run = WorkerContext(paths, spec, meter, stop, number, scratch(paths, rank), last_phase)
        try:
            idle(run, "idle.before", spec.energy.idle_before_s)
            _run_pipeline(run, pipeline_name)
            if not run.is_partial:
                idle(run, "idle.after", spec.energy.idle_after_s)
        except EndedBySignal:
            pass
        finally:
            stop.ignore_repeats()
            meter.event("run", edge="end")
            run.close()
            meter.stop()
            shutil.rmtree(scratch(paths, rank), ignore_errors=True)
