"""Python API: `with joulelab.measure("name") as m:` records a block of code as a run, with named windows inside it.

A missing sensor gives a missing figure, never an exception. An exception of the block propagates, and the run is
recorded as `failed`.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import inspect
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from pathlib import Path
from time import monotonic_ns
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, cast

import numpy as np

from joulelab.clock import NS
from joulelab.errors import JoulelabError, UsageError
from joulelab.meter.config import EnergyConfig
from joulelab.meter.figures import EnergyFigure, Frozen, amount_text, labeled_text, missing, time_share_half_width_j
from joulelab.meter.marks import Phase
from joulelab.meter.session import Meter
from joulelab.meter.trace import LineFile, read_lines
from joulelab.runs.attempt_data import AttemptData, load_attempts
from joulelab.runs.context import RunContext
from joulelab.runs.measure.result import RUN, MeasuredRun, MeasureSpec, answer_block, how_it_ended, leave
from joulelab.runs.paths import RunPaths
from joulelab.runs.record import EnergyByComponent, PhaseRecord, RunRecord, StageRecord
from joulelab.runs.spec import check
from joulelab.runs.store import store_root
from joulelab.runs.validity import enforce
from joulelab.units import with_prefix

# Windows are nested, re-entrant and thread-safe, at about two microseconds each. The meter's phase marks have
# a single writer and are not re-entrant. Each open window therefore takes its own mark from a pool, a lock serializes
# the threads, and the open windows are tracked per thread and coroutine, which also gives their nesting. Marks become
# times (count, sum, quantiles) that survive a kill. A window of at least `TIMED_S` is also written to `windows.jsonl`
# with its begin and end, so that its energy can be read from the energy curve.

# Half the period of the driver's 20 ms samples, the finest signal: shorter windows only get a share by time.
TIMED_S = 0.01
_TIMED_NS = int(TIMED_S * NS)
WINDOWS_FILE = "windows.jsonl"


class Windows:
    """All windows of one measurement. After `close()`, and in a forked child, they do nothing."""

    def __init__(self, meter: Meter, paths: RunPaths) -> None:
        self.open = True
        self.lock = threading.Lock()
        self._meter = meter
        self._lines = LineFile(paths.folder / WINDOWS_FILE)
        self._by_name: dict[str, Window] = {}
        _disable_after_fork(self)

    def window(self, name: str) -> Window:
        window = self._by_name.get(name)
        if window is not None:
            return window
        with self.lock:
            if name not in self._by_name:
                phase = self._meter.phase(name) if self.open else None
                self._by_name[name] = Window(self, name, phase)
        return self._by_name[name]

    def first_seen(self, name: str, inside: str | None, overlaps: bool) -> None:
        self._append({"name": name, "inside": inside, "overlaps": overlaps})

    def timed(self, name: str, begin_ns: int, end_ns: int) -> None:
        self._append({"name": name, "begin_ns": begin_ns, "end_ns": end_ns})

    def _append(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # on a full disk only the energy of the window is lost
            self._lines.append(line)  # a single write(), which survives a kill of the program

    def close(self) -> None:
        with self.lock:
            self.open = False
            self._lines.close()


class Window:
    """A reusable context manager, re-entrant (only the outermost entry counts) and usable in several threads."""

    __slots__ = ("_all", "_free", "_last_end_ns", "_lock", "_phase", "_seen", "name")

    def __init__(self, all_windows: Windows, name: str, phase: Phase | None) -> None:
        self.name = name
        self._all = all_windows
        self._phase = phase
        self._free: list[Phase] = []
        self._lock = all_windows.lock
        self._last_end_ns = 0
        self._seen: set[tuple[str | None, bool]] = set()

    def __enter__(self) -> Window:
        try:
            phase: Phase | None = self._free.pop()
        except IndexError:
            phase = copy.copy(self._phase)
        _innermost.set((self, phase, monotonic_ns(), _innermost.get()))
        if phase is not None:
            phase.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        end_ns = monotonic_ns()
        frame = _innermost.get()
        if frame is None or frame[0] is not self:
            frame = _remove_frame(self, frame)
            if frame is None:
                return
        else:
            _innermost.set(frame[3])
        _, phase, begin_ns, outer = frame
        if phase is None or not self._all.open:
            return
        inside: str | None = None
        while outer is not None:
            if outer[0] is self:
                return  # nested in itself: only the outermost counts, or its time would count twice
            if inside is None and outer[0]._all is self._all:
                inside = outer[0].name
            outer = outer[3]
        with self._lock:
            if not self._all.open:
                return
            phase.__exit__()
            seen = (inside, begin_ns < self._last_end_ns)
            self._last_end_ns = max(self._last_end_ns, end_ns)
            if seen not in self._seen:
                self._seen.add(seen)
                self._all.first_seen(self.name, *seen)
            if end_ns - begin_ns >= _TIMED_NS:
                self._all.timed(self.name, begin_ns, end_ns)
        self._free.append(phase)


# (window, its mark, begin, enclosing frame)
_Frame = tuple[Window, Phase | None, int, Any]
# Windows open in the current thread or coroutine; a coroutine inherits those of its creator.
_innermost: ContextVar[_Frame | None] = ContextVar("joulelab_window", default=None)


def _remove_frame(window: Window, frame: _Frame | None) -> _Frame | None:
    """Remove the window's latest frame from below others: generators may exit windows in another order.

    None if it was entered in another thread or coroutine: its duration is then undefined.
    """
    above: list[_Frame] = []
    while frame is not None and frame[0] is not window:
        above.append(frame)
        frame = frame[3]
    if frame is not None:
        rest = frame[3]
        for window_above, phase, begin_ns, _ in reversed(above):
            rest = (window_above, phase, begin_ns, rest)
        _innermost.set(rest)
    return frame


def _disable_after_fork(windows: Windows) -> None:
    """A forked child (a data loader's worker) shares the mapped marks; two writers would overwrite each other."""
    reference = weakref.ref(windows)

    def disable() -> None:
        if (inherited := reference()) is not None:
            inherited.open = False
            inherited.lock = threading.Lock()

    os.register_at_fork(after_in_child=disable)


# Energy of windows: from the energy curve if their times are known, else a share by time of the enclosing window. This
# only reads a finished run: its trace, its record and `windows.jsonl`.

Way = Literal["direct", "time-share", "none"]
WHOLE = "the whole measurement"


class WindowFigure(Frozen):
    """Windows of one name: how many, and time and energy of all of them together (`total_`) and of one (`mean_`)."""

    name: str
    count: int
    total_s: float
    """Sum over the windows; more than the elapsed time if they ran in several threads."""
    total_energy: EnergyFigure
    """Sum over the windows, by the method named in `way`."""
    mean_s: float
    p50_s: float
    p95_s: float
    max_s: float
    way: Way
    """`direct`: read from the sensor. `time-share`: a share of the enclosing window by time, the weakest method."""
    share_of: str | None = None

    @property
    def total_energy_j(self) -> float | None:
        return self.total_energy.energy_j

    @property
    def mean_energy(self) -> EnergyFigure:
        """Energy of one window: the sum divided by their number."""
        return self.total_energy.scaled(1 / self.count) if self.count else self.total_energy

    @property
    def mean_energy_j(self) -> float | None:
        return self.mean_energy.energy_j

    def __str__(self) -> str:
        if self.count == 1:
            return f"{self.name}: 1 window, {with_prefix(self.total_s, 's')}, {labeled_text(self.total_energy)}"
        sums = f"together {with_prefix(self.total_s, 's')}, {labeled_text(self.total_energy)}"
        means = f"each (mean) {with_prefix(self.mean_s, 's')}, {amount_text(self.mean_energy)}"
        return f"{self.name}: {self.count} windows; {means}; {sums}"

    @property
    def seconds(self) -> float:
        """Former name of `total_s`, for one more release."""
        warnings.warn("window.seconds is now window.total_s", DeprecationWarning, stacklevel=2)
        return self.total_s

    @property
    def energy(self) -> EnergyFigure:
        """Former name of `total_energy`, for one more release."""
        warnings.warn("window.energy is now window.total_energy", DeprecationWarning, stacklevel=2)
        return self.total_energy

    @property
    def energy_j(self) -> float | None:
        """Former name of `total_energy_j`, for one more release."""
        warnings.warn("window.energy_j is now window.total_energy_j", DeprecationWarning, stacklevel=2)
        return self.total_energy_j


class _Lines:
    """`windows.jsonl` by name: timed windows, enclosing windows, and which of them overlap."""

    def __init__(self, lines: Iterable[dict[str, Any]]) -> None:
        self.timed: dict[str, list[tuple[int, int]]] = {}
        self.inside: dict[str, set[str | None]] = {}
        self.overlapping: set[str] = set()
        for line in lines:
            if "begin_ns" in line:
                self.timed.setdefault(line["name"], []).append((line["begin_ns"], line["end_ns"]))
            else:
                self.inside.setdefault(line["name"], set()).add(line["inside"])
                if line["overlaps"]:
                    self.overlapping.add(line["name"])


def window_figures(paths: RunPaths, record: RunRecord, stage: StageRecord | None) -> dict[str, WindowFigure]:
    """All windows of a finished run by name; `stage` is the one that contains them."""
    if stage is None or not stage.phases:
        return {}
    path = paths.folder / WINDOWS_FILE
    lines = _Lines(read_lines(path) if path.exists() else ())
    attempts = load_attempts(paths)
    figures: dict[str, WindowFigure] = {}
    # enclosing windows are longer in sum and come first, so that a share finds its whole
    for name in sorted(stage.phases, key=lambda name: -stage.phases[name].sum_s):
        times = _exact(stage.phases[name], lines.timed.get(name, []))
        direct = _direct(name, times, lines, attempts[-1], record.policy) if attempts else None
        figures[name] = (
            _figure(name, times, "direct", direct) if direct else _time_share(name, times, lines, stage, figures)
        )
    return figures


def _exact(times: PhaseRecord, windows: list[tuple[int, int]]) -> PhaseRecord:
    """With exact quantiles if every window was timed; marks have bins of 12 %."""
    if len(windows) != times.count:
        return times
    p50_s, p95_s = np.quantile([(end - begin) / NS for begin, end in windows], [0.5, 0.95])
    return times.model_copy(update={"p50_s": float(p50_s), "p95_s": float(p95_s)})


def _figure(name: str, times: PhaseRecord, way: Way, energy: EnergyFigure, of: str | None = None) -> WindowFigure:
    return WindowFigure(
        name=name,
        count=times.count,
        total_s=times.sum_s,
        total_energy=energy,
        mean_s=times.mean_s,
        p50_s=times.p50_s,
        p95_s=times.p95_s,
        max_s=times.max_s,
        way=way,
        share_of=of,
    )


def _direct(name: str, times: PhaseRecord, lines: _Lines, attempt: AttemptData, policy: str) -> EnergyFigure | None:
    windows = lines.timed.get(name, [])
    if len(windows) != times.count:
        return None  # some were too short to be timed, so the name as a whole has no direct energy
    figure = attempt.energy(union(windows)).best(policy)
    if figure.energy_j is None:
        return None
    if name not in lines.overlapping:
        return figure
    return figure.model_copy(update={"reason": "windows overlapped; their common time counts once"})


def union(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Disjoint windows that cover the same time, so that energy of overlapping threads counts once."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(windows):
        if joined and begin < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def _time_share(
    name: str, times: PhaseRecord, lines: _Lines, stage: StageRecord, figures: dict[str, WindowFigure]
) -> WindowFigure:
    """Energy of the enclosing window in proportion to time, which assumes constant power."""
    if name in lines.overlapping:
        reason = "too short to be read from the sensor, and overlapping, so the energy cannot be divided by time"
        return _figure(name, times, "none", missing(reason))
    outer = lines.inside.get(name, set())
    of = next(iter(outer)) if len(outer) == 1 else None
    whole = figures[of] if of in figures and figures[of].way == "direct" else None
    energy, seconds = (whole.total_energy, whole.total_s) if whole else (stage.best, stage.duration_s)
    if energy.energy_j is None:
        return _figure(name, times, "none", energy)
    share = min(1.0, times.sum_s / seconds) if seconds else 0.0
    title = whole.name if whole else WHOLE
    half_width_j = time_share_half_width_j(share, energy.energy_j)
    reason = f"a share of {title} by time, assuming constant power; the interval covers all possible values"
    figure = energy.with_interval(share * energy.energy_j, half_width_j, "time share").model_copy(
        update={"reason": reason}
    )
    return _figure(name, times, "time-share", figure, title)


Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

# Open measurements of this process, innermost last: a call of a decorated function inside one is a window of it.
_open: list[Measurement] = []


class Measurement:
    """One measured block. Figures are available after its end, `so_far()` while it runs."""

    def __init__(self, name: str, spec: MeasureSpec, store: Path) -> None:
        self.name = name
        self._spec = spec
        self._store = store
        self._run: MeasuredRun | None = None
        self._windows: Windows | None = None
        self._stage: Any = None
        self._figures: dict[str, WindowFigure] | None = None
        self.context: RunContext | None = None
        self._record: RunRecord | None = None

    def start(self) -> Measurement:
        """Start measuring. `with` calls this; a notebook can call it in one cell and `stop()` in another."""
        if self._run is not None:
            raise JoulelabError(f"measurement '{self.name}' was started twice", "create a new one")
        self._run = MeasuredRun(self._store, self._spec)
        try:
            self.context = self._run.begin()
        except BaseException as error:
            self._record = self._run.end("failed", error)
            raise
        self._windows = Windows(self.context.meter, self._run.paths)
        self._stage = self.context.stage(RUN, role="student", activity="run", repeat=1)
        self._stage.__enter__()
        _open.append(self)
        atexit.register(self._at_exit)
        return self

    def stop(self, error: BaseException | None = None) -> RunRecord:
        """End the measurement and write its record; further calls return the same record."""
        if self._record is None:
            if self._run is None or self._windows is None:
                raise JoulelabError(f"measurement '{self.name}' was not started")
            if not self._run.is_own:
                return self._run.end("running")
            self._windows.close()
            status, reason = how_it_ended(error)
            leave(self._stage, reason)
            self._record = self._run.end_or_warn(status, reason)
            _open.remove(self)
            atexit.unregister(self._at_exit)
        return self._record

    def _at_exit(self) -> None:
        """The block was never closed, or the interpreter exits because of an uncaught exception."""
        if self._run is None or not self._run.is_own:
            return
        error = getattr(sys, "last_value", None)
        self.stop(error if error is not None else JoulelabError("the program exited without closing the measurement"))

    def __enter__(self) -> Measurement:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        record = self.stop(error)
        if error is None and self._record is not None:  # None in a forked child
            enforce(record)

    def window(self, name: str) -> Window:
        """`with m.window("step"):`, nested, re-entrant and in any thread. Costs about two microseconds."""
        if self._windows is None:
            raise JoulelabError("window() needs an open measurement", "open it first: with joulelab.measure(...) as m:")
        return self._windows.window(name)

    def so_far(self) -> EnergyFigure:
        """Energy since the start as recorded so far; after the end, the final figure."""
        if self._record is not None:
            return self.figure
        if self.context is None:
            return missing("the measurement has not started")
        parts = self.context.meter.so_far()
        return EnergyByComponent(**parts).best(self._spec.energy.total_energy_policy)

    @property
    def folder(self) -> Path:
        if self._run is None:
            raise JoulelabError("the measurement has not started")
        return self._run.paths.folder

    @property
    def record(self) -> RunRecord:
        if self._record is None:
            raise JoulelabError(f"'{self.name}' is not finished", "use so_far() while it runs")
        return self._record

    @property
    def _block(self) -> StageRecord | None:
        return self.record.stage(RUN)

    @property
    def figure(self) -> EnergyFigure:
        """Energy of the block with method, interval and coverage: measured, else the estimate if enabled."""
        block = self._block
        return block.best if block is not None else missing("nothing was recorded")

    @property
    def energy_j(self) -> float | None:
        """`figure.energy_j`: None, never 0, if nothing was measured or estimated."""
        return self.figure.energy_j

    @property
    def duration_s(self) -> float:
        block = self._block
        return block.duration_s if block is not None else 0.0

    @property
    def windows(self) -> dict[str, WindowFigure]:
        """By name: count, and time and energy of all windows together and of one on average."""
        if self._figures is None:
            assert self._run is not None
            self._figures = window_figures(self._run.paths, self.record, self._block)
        return self._figures

    def __str__(self) -> str:
        if self._record is None:
            return f"{self.name}: {'running' if self.context else 'not started'}"
        return answer_block(self._record, self.folder)

    __repr__ = __str__


def measure(
    name: str = "measure",
    *,
    energy: EnergyConfig | dict[str, Any] | None = None,
    estimate_cpu: bool | None = None,
    runs_dir: str | Path | None = None,
    label: str = "",
) -> Measurement:
    """Measure a block of code: `with joulelab.measure("name") as m: ...`, then `m.energy_j`.

    `energy` takes the settings of the section `energy:` (`joulelab explain energy`), `estimate_cpu` is one of them, and
    `runs_dir` is the store (default: JOULELAB_RUNS, else ./runs).
    """
    settings = energy.model_dump() if isinstance(energy, EnergyConfig) else dict(energy or {})
    if estimate_cpu is not None:
        settings["estimate_cpu"] = estimate_cpu
    spec = check({"pipeline": "measure", "name": name, "label": label, "energy": settings})
    store = store_root(Path(runs_dir) if runs_dir is not None else None)
    return Measurement(name, cast(MeasureSpec, spec), store)


def measured(
    name: str | None = None, **options: Any
) -> Callable[[Callable[Parameters, Returned]], Callable[Parameters, Returned]]:
    """Measure every call of a function: `@joulelab.measured("name")`, options as for `measure`.

    Inside an open measurement a call is a window of it; otherwise it is a separate run, and `function.last` is that
    measurement. Coroutine functions are supported.
    """

    def decorate(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        title = name or function.__name__
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(
                f"{title} is a generator function: a call of it runs none of its code, so there is nothing to measure",
                "measure the function that iterates over it",
            )

        def measurement_or_window() -> Any:
            if _open:
                return _open[-1].window(title)
            call.last = measure(title, **options)  # type: ignore[attr-defined]
            return call.last  # type: ignore[attr-defined]

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
                with measurement_or_window():
                    return await function(*args, **kwargs)
        else:

            @functools.wraps(function)
            def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
                with measurement_or_window():
                    return function(*args, **kwargs)

        call.last = None  # type: ignore[attr-defined]
        return cast("Callable[Parameters, Returned]", call)

    return decorate
