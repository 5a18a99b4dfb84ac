"""What every callback needs: a run with the stages `model.train` and `model.evaluate`, opened and closed by events.

Other frameworks tell us what happens by calls, not by `with` blocks, and some end without telling at all. So stages
are opened and closed here by hand, an evaluation suspends the training, and a run that nobody closed is closed when
the interpreter ends.
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
from joulelab.runs.measure.measure_session import MeasuredRun, MeasureSpec, how_it_ended, leave
from joulelab.runs.record import EnergyByComponent, Result, RunRecord
from joulelab.runs.spec import check
from joulelab.runs.store import store_root

TRAIN, EVALUATE, STEP = "model.train", "model.evaluate", "step"
# Asking for the joules so far reads the trace; it may take this share of the time, whatever the log's frequency.
ASKING_SHARE = 0.01


def measure_settings(
    name: str, energy: EnergyConfig | Mapping[str, Any] | None, estimate_cpu: bool | None
) -> MeasureSpec:
    settings = energy.model_dump() if isinstance(energy, EnergyConfig) else dict(energy or {})
    if estimate_cpu is not None:
        settings["estimate_cpu"] = estimate_cpu
    spec = check({"pipeline": "measure", "name": name, "energy": settings})
    assert isinstance(spec, MeasureSpec)
    return spec


class MeasuresTraining:
    """What our callbacks share, whatever framework calls them: their settings, and the run of the latest training.

    `record` and `folder` are there after the training, on the rank that measured it.
    """

    _usual_name = "train"

    def __init__(
        self,
        name: str | None = None,
        *,
        energy: EnergyConfig | Mapping[str, Any] | None = None,
        estimate_cpu: bool | None = None,
        runs_dir: str | Path | None = None,
    ) -> None:
        self._spec = measure_settings(name or self._usual_name, energy, estimate_cpu)
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

    def _going(self) -> TrainingRun | None:
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
        self._ask_again_s = 0.0
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
        """Close the stage and whatever was opened inside it; a stage that is not open is no mistake."""
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
        """Totals so far of the training stage."""
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
        """`energy_j` measured so far, or `energy_estimated_j`: an estimate never goes by the measurement's name."""
        now_s = time.monotonic()
        if now_s >= self._ask_again_s:
            parts = self._context.meter.so_far()
            self._figure = EnergyByComponent(**parts).best(self._policy)
            took_s = time.monotonic() - now_s
            self._ask_again_s = now_s + took_s / ASKING_SHARE
        figure = self._figure
        if figure is None or figure.energy_j is None:
            return {}
        return {"energy_j" if figure.measured else "energy_estimated_j": round(figure.energy_j, 3)}

    def close(self, error: BaseException | None = None) -> RunRecord:
        if self.record is None:
            atexit.unregister(self._at_exit)
            self.end_step()
            self._windows.close()
            status, reason = how_it_ended(error)
            while self._open:
                leave(self._open.pop()[1], reason)
            self.record = self._run.end(status, reason)
        return self.record

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        self.close(error if error is not None else JoulelabError("the training ended without a last word"))
