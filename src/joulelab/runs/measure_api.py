"""`import joulelab; with joulelab.measure("name") as m:` - the meter for people's own Python code.

The block becomes a run like any other. A sensor that is missing is a figure that says so, never an exception; an
exception of the block leaves a record with status `failed` and goes on its way.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from joulelab.errors import JoulelabError
from joulelab.meter.config import EnergyConfig
from joulelab.meter.figure_text import figure_text
from joulelab.meter.figures import EnergyFigure, missing
from joulelab.runs.context import RunContext
from joulelab.runs.measure_figures import WindowFigure, window_figures
from joulelab.runs.measure_result import RUN
from joulelab.runs.measure_spec import MeasureSpec
from joulelab.runs.measure_windows import Window, Windows
from joulelab.runs.measuring import MeasuredRun, how_it_ended, leave
from joulelab.runs.record import EnergyByComponent, RunRecord, StageRecord
from joulelab.runs.spec import check
from joulelab.runs.store import store_root
from joulelab.runs.validity import enforce
from joulelab.units import duration_text

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")

# Measurements now open in this process, innermost last: a decorated function inside one becomes a window of it.
_open: list[Measurement] = []


class Measurement:
    """One measured block. Figures are there after the end; `so_far()` while it runs."""

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
        """Begin to measure; `with` does this, and a notebook may do it in one cell and `stop()` in another."""
        if self._run is not None:
            raise JoulelabError(f"the measurement '{self.name}' was started twice", "make another one")
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
        """End the measurement and write its record; the second call only gives the record again."""
        if self._record is None:
            if self._run is None or self._windows is None:
                raise JoulelabError(f"the measurement '{self.name}' was not started")
            self._windows.close()
            status, reason = how_it_ended(error)
            leave(self._stage, reason)
            self._record = self._run.end(status, reason)
            _open.remove(self)
            atexit.unregister(self._at_exit)
        return self._record

    def _at_exit(self) -> None:
        """Nobody closed it: the interpreter ends by an error nobody caught, or the block was left open."""
        error = getattr(sys, "last_value", None)
        self.stop(error if error is not None else JoulelabError("the program ended without closing the measurement"))

    def __enter__(self) -> Measurement:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        record = self.stop(error)
        if error is None:
            enforce(record)

    def window(self, name: str) -> Window:
        """`with m.window("step"):`; nested, in itself and in any thread. Costs about two microseconds."""
        if self._windows is None:
            raise JoulelabError("windows lie inside a measurement", "open it first: with joulelab.measure(...) as m:")
        return self._windows.window(name)

    def so_far(self) -> EnergyFigure:
        """Joules since the start, as far as they are recorded; after the end, the final figure."""
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
            raise JoulelabError(f"'{self.name}' is not finished", "so_far() tells the joules while it runs")
        return self._record

    @property
    def _block(self) -> StageRecord | None:
        return self.record.stage(RUN)

    @property
    def figure(self) -> EnergyFigure:
        """The block's joules with method, interval and coverage: measured, else the estimate if one was asked for."""
        block = self._block
        return block.best if block is not None else missing("nothing was recorded")

    @property
    def energy_j(self) -> float | None:
        """`figure.energy_j`: None where nothing measured and no estimate was asked for, never 0 instead."""
        return self.figure.energy_j

    @property
    def duration_s(self) -> float:
        block = self._block
        return block.duration_s if block is not None else 0.0

    @property
    def windows(self) -> dict[str, WindowFigure]:
        """By name: count, seconds and joules, each with the way they were obtained."""
        if self._figures is None:
            assert self._run is not None
            self._figures = window_figures(self._run.paths, self.record, self._block)
        return self._figures

    def __str__(self) -> str:
        if self._record is None:
            return f"{self.name}: {'running' if self.context else 'not started'}"
        figure = self.figure
        duration = duration_text(self.duration_s)
        return f"{self.name}: {figure_text(figure)}; {duration}, {self._record.status}; {self.folder}"

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
    `runs_dir` says where the run folder goes (default: JOULELAB_RUNS, else ./runs).
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

    Inside an open measurement a call is a window of it; elsewhere it is a run of its own, and `function.last` is that
    measurement. Coroutine functions work too.
    """

    def decorate(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
        title = name or function.__name__

        def around() -> Any:
            if _open:
                return _open[-1].window(title)
            call.last = measure(title, **options)  # type: ignore[attr-defined]
            return call.last  # type: ignore[attr-defined]

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
                with around():
                    return await function(*args, **kwargs)
        else:

            @functools.wraps(function)
            def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
                with around():
                    return function(*args, **kwargs)

        call.last = None  # type: ignore[attr-defined]
        return cast("Callable[Parameters, Returned]", call)

    return decorate
