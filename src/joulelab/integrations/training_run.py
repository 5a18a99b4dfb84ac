"""A run with the stages `model.train` and `model.evaluate`, opened and closed by the events of a training framework.

Frameworks call callbacks instead of using `with` blocks, and after an exception some call nothing at all. Stages are
therefore opened and closed by hand here, an evaluation suspends the training stage, and a run that was not closed is
closed when the interpreter exits.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from joulelab.errors import JoulelabError
from joulelab.meter.config import EnergyConfig
from joulelab.meter.figures import EnergyFigure
from joulelab.runs.context import Stage
from joulelab.runs.measure.api import Windows
from joulelab.runs.measure.result import MeasuredRun, MeasureSpec, answer_block, how_it_ended, leave
from joulelab.runs.record import EnergyByComponent, Result, RunRecord
from joulelab.runs.spec import check
from joulelab.runs.store import store_root

TRAIN, EVALUATE, STEP = "model.train", "model.evaluate", "step"
# Computing the energy so far reads the trace; it may take this fraction of the time, however often the loop logs.
MAX_ENERGY_READ_SHARE = 0.01


def measure_settings(
    name: str, energy: EnergyConfig | Mapping[str, Any] | None, estimate_cpu: bool | None
) -> MeasureSpec:
    settings = energy.model_dump() if isinstance(energy, EnergyConfig) else dict(energy or {})
    if estimate_cpu is not None:
        settings["estimate_cpu"] = estimate_cpu
    spec = check({"pipeline": "measure", "name": name, "energy": settings})
    assert isinstance(spec, MeasureSpec)
    return spec


class TrainingCallback:
    """Base of the callbacks of all frameworks: settings, and the run of the latest training.

    `record` and `folder` are set after the training, on the rank that measured it.
    """

    _default_name = "train"

    def __init__(
        self,
        name: str | None = None,
        *,
        energy: EnergyConfig | Mapping[str, Any] | None = None,
        estimate_cpu: bool | None = None,
        runs_dir: str | Path | None = None,
    ) -> None:
        self._spec = measure_settings(name or self._default_name, energy, estimate_cpu)
        self._runs_dir = runs_dir
        self._run: TrainingRun | None = None

    @property
    def record(self) -> RunRecord | None:
        return None if self._run is None else self._run.record

    @property
    def folder(self) -> Path | None:
        return None if self._run is None else self._run.folder

    def _begin(self) -> TrainingRun:
        self._run = TrainingRun(self._spec, self._runs_dir)
        return self._run

    def _open_run(self) -> TrainingRun | None:
        return self._run if self._run is not None and self._run.record is None else None


class TrainingRun:
    """One training, from the framework's first event to its last."""

    def __init__(self, spec: MeasureSpec, runs_dir: str | Path | None) -> None:
        self._policy = spec.energy.total_energy_policy
        self._run = MeasuredRun(store_root(Path(runs_dir) if runs_dir is not None else None), spec)
        try:
            self._context = self._run.begin()
        except BaseException as error:
            self._run.end("failed", error)
            raise
        self._windows = Windows(self._context.meter, self._run.paths)
        self._step = self._windows.window(STEP)
        self._in_step = False
        self._open: list[tuple[str, AbstractContextManager[Stage], Stage]] = []
        self._next_energy_read_s = 0.0
        self._figure: EnergyFigure | None = None
        self.record: RunRecord | None = None
        atexit.register(self._at_exit)

    @property
    def folder(self) -> Path:
        return self._run.paths.folder

    def enter(self, stage: str) -> None:
        if stage not in [name for name, _, _ in self._open]:
            activity = "train" if stage == TRAIN else "evaluate"
            manager = self._context.stage(stage, again=True, role="student", activity=activity)
            self._open.append((stage, manager, manager.__enter__()))

    def leave(self, stage: str) -> None:
        """Close the stage and all stages opened inside it; does nothing if the stage is not open."""
        if stage in [name for name, _, _ in self._open]:
            while self._open:
                name, manager, _ = self._open.pop()
                manager.__exit__(None, None, None)
                if name == stage:
                    return

    def is_in(self, stage: str) -> bool:
        return bool(self._open) and self._open[-1][0] == stage

    def begin_step(self) -> None:
        if not self._in_step:
            self._in_step = True
            self._step.__enter__()

    def end_step(self) -> None:
        if self._in_step:
            self._in_step = False
            self._step.__exit__()

    def count(self, **counts: int) -> None:
        """Cumulative counts of the training stage."""
        for name, _, stage in self._open:
            if name == TRAIN:
                stage.count(**counts)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        numbers = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
        if numbers:
            self._context.log(step, **numbers)

    def results(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._context.result(f"{EVALUATE}.{name}", Result(value=float(value)))

    def energy_now(self) -> dict[str, float]:
        """`energy_j` measured so far, or `energy_estimated_j`: an estimate never has the measurement's name."""
        now_s = time.monotonic()
        if now_s >= self._next_energy_read_s:
            components = self._context.meter.so_far()
            self._figure = EnergyByComponent(**components).best(self._policy)
            if self._figure.energy_j is not None:  # before the first reading there is nothing to save by waiting
                self._next_energy_read_s = now_s + (time.monotonic() - now_s) / MAX_ENERGY_READ_SHARE
        figure = self._figure
        if figure is None or figure.energy_j is None:
            return {}
        return {"energy_j" if figure.measured else "energy_estimated_j": round(figure.energy_j, 3)}

    def close(self, error: BaseException | None = None) -> RunRecord:
        if not self._run.is_own:
            return self._run.end("running")
        if self.record is None:
            atexit.unregister(self._at_exit)
            self.end_step()
            self._windows.close()
            status, reason = how_it_ended(error)
            while self._open:
                leave(self._open.pop()[1], reason)
            self.record = self._run.end_or_warn(status, reason)
            print(f"joulelab: {answer_block(self.record, self.folder)}", file=sys.stderr, flush=True)
        return self.record

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        self.close(error if error is not None else JoulelabError("the interpreter exited before the training ended"))
