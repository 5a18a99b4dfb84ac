"""CodeCarbon around the training, every step and every phase, offline.

Three CodeCarbon trackers run in parallel, because one follows only one task at a time. Their readings are written to
`run_*.csv`, `steps_*.csv` and `substeps_*.csv` in CodeCarbon's own format: the columns of its `emissions.csv`, with
`task_name` (`step_7`, `forward_7`) in the tables of tasks, kWh and kg CO2e. The losses are in `losses.csv`. Energies
are CodeCarbon's own: counters where it finds them, models and constants elsewhere. Emissions need a grid
(`energy.grid`); without one their cells are empty. No network is needed, and CodeCarbon's lock file is not used: a
stale one would make the next run measure nothing.

On a GPU the tracker synchronizes at every edge; otherwise a phase would be charged for its launches only. That, and
CodeCarbon's own calls of milliseconds, make it the most expensive tracker. It exists for comparison.

How much a reading of a few milliseconds is worth is judged from the readings. A counter that is refreshed every 100 ms
reads 0 J for a short phase until a refresh falls into it, which then gets the energy of all phases since the last one.
Without a counter CodeCarbon multiplies the duration by a constant, which adds no information to the duration.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from joulelab import lookup
from joulelab.meter.grids import parse_grid
from joulelab.meter.importers.emissions_csv import energies_j
from joulelab.trackers.codecarbon import location, offline_tracker
from joulelab.train.stats.hooks import CsvFile, LossFile, TrackerContext, TrainerStats, device_synchronizer, unused_path
from joulelab.train.stats.phase_times import STEP_PHASES
from joulelab.train.stats.step_energy import INTERRUPTIONS
from joulelab.units import energy_text, percent_text

# Relative spread of the power below which readings count as duration times a constant.
CONSTANT_REL = 0.02


class PhaseReadings:
    """Readings of one phase, kept as sums."""

    def __init__(self) -> None:
        self.count = 0
        self._zeros = 0
        self._gpu_zeros = 0
        self._duration_s = 0.0
        self._energy_j = 0.0
        self._gpu_j = 0.0
        self._energy_squared = 0.0
        self._power_w = 0.0
        self._power_squared = 0.0

    def add(self, duration_s: float, energy_j: float, gpu_j: float) -> None:
        power_w = energy_j / max(duration_s, 1e-9)
        self.count += 1
        self._zeros += energy_j == 0
        self._gpu_zeros += gpu_j == 0
        self._duration_s += duration_s
        self._energy_j += energy_j
        self._gpu_j += gpu_j
        self._energy_squared += energy_j**2
        self._power_w += power_w
        self._power_squared += power_w**2

    @property
    def zero_share(self) -> float:
        """Share of readings of 0 J; of the GPU's energy if there is any, because other components use constants."""
        return (self._gpu_zeros if self._gpu_j > 0 else self._zeros) / max(1, self.count)

    @property
    def spread(self) -> float:
        """Coefficient of variation of the energy."""
        return _relative_spread(self._energy_j, self._energy_squared, self.count)

    @property
    def is_duration_times_constant(self) -> bool:
        return self._gpu_j == 0 and _relative_spread(self._power_w, self._power_squared, self.count) < CONSTANT_REL

    def text(self, phase: str) -> str:
        mean_ms = 1000 * self._duration_s / max(1, self.count)
        start = f"  {phase}: {self.count} readings of {mean_ms:.1f} ms, {energy_text(self._energy_j / self.count)} each"
        if self.is_duration_times_constant:
            return f"{start}: duration times a constant, no information beyond the duration"
        if self.zero_share > 0:
            return f"{start}: {percent_text(self.zero_share, 0)} are 0 J, so single readings are meaningless"
        return f"{start}: none is 0 J; coefficient of variation {percent_text(self.spread, 0)}"

    def values(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "mean_s": self._duration_s / max(1, self.count),
            "energy_j": self._energy_j,
            "zero_share": self.zero_share,
            "spread_rel": self.spread,
            "duration_times_constant": self.is_duration_times_constant,
        }


def _relative_spread(total: float, squares: float, count: int) -> float:
    mean = total / max(1, count)
    # One pass over sums: readings are not stored. The cancellation of the two terms limits the
    # relative spread to about 1e-8, far below `CONSTANT_REL`.
    variance = squares / max(1, count) - mean**2
    return math.sqrt(max(0.0, variance)) / mean if mean else 0.0


_LEVEL_OF_PHASE = {"train": "run", "step": "steps", **dict.fromkeys((*STEP_PHASES, *INTERRUPTIONS), "substeps")}
BETWEEN_STEPS = ("train", *INTERRUPTIONS)
# Sampling interval of CodeCarbon's thread; tasks are measured at their edges, so it matters for the run's total only.
INTERVAL_S = 1.0


class CodeCarbonStats(TrainerStats):
    def __init__(self) -> None:
        lookup.require_packages("the tracker codecarbon", "codecarbon")
        self._levels: dict[str, _LevelTracker] = {}
        self._losses = LossFile(None)
        self._problem = ""
        self._step = 0
        self.readings: dict[str, PhaseReadings] = {}

    def attach(self, context: TrackerContext) -> None:
        self._context = context
        self._wait = device_synchronizer(context.device)
        if os.environ.get("LOCAL_RANK", "0") != "0":  # CodeCarbon measures the whole node: once is enough
            self._problem = "measured by another rank of this node"
            return
        folder = None if context.folder is None else context.folder / "codecarbon"
        self._losses = LossFile(folder)
        tag = f"rank{os.environ.get('RANK', '0')}"
        try:
            levels = ("run", "steps", "substeps")
            self._levels = {level: _LevelTracker(level, tag, folder, context.grid) for level in levels}
        except Exception as error:
            self._disable(error)

    def start_train(self) -> None:
        self._step = self._losses.step = self._context.trainer.position.step  # above 0 in a resumed run
        super().start_train()

    def start(self, phase: str) -> None:
        level = self._levels.get(_LEVEL_OF_PHASE[phase])
        if level is not None and not self._problem:
            self._wait()
            try:
                level.start(phase)
            except Exception as error:
                self._disable(error)

    def stop(self, phase: str) -> None:
        level = self._levels.get(_LEVEL_OF_PHASE[phase])
        if level is not None and not self._problem:
            self._wait()
            try:
                self._take(phase, level.stop(phase, self._step + (phase not in BETWEEN_STEPS)))
            except Exception as error:
                self._disable(error)

    def _disable(self, error: Exception) -> None:
        """Stop tracking and report the failure at the end; training continues."""
        self._problem = f"failed ({type(error).__name__}: {error})"

    def _take(self, phase: str, row: dict[str, float]) -> None:
        self.readings.setdefault(phase, PhaseReadings()).add(row["duration_s"], row["energy_j"], row["gpu_j"])

    def log_loss(self, loss: float) -> None:
        self._losses.add(loss)

    def log_step(self, step: int) -> None:
        self._step = self._losses.step = step

    def log_stats(self) -> str:
        for level in self._levels.values():
            level.close()
        self._losses.close()
        values = {phase: readings.values() for phase, readings in self.readings.items()}
        run = self._levels.get("run")
        total = run.total if run is not None else None
        self._context.result("codecarbon", {"problem": self._problem or None, "total": total, "phases": values})
        if self._problem:
            return f"codecarbon: {self._problem}"
        lines = [readings.text(phase) for phase, readings in self.readings.items() if phase in STEP_PHASES]
        opening = [] if total is None else [f"codecarbon (its own figures): {total_text(total)}"]
        return "\n".join([*opening, "codecarbon, quality of single phase readings:", *lines])


def total_text(total: Mapping[str, Any]) -> str:
    """CodeCarbon's figures for the whole training: energy, its parts, and emissions if a grid is known."""
    parts = ", ".join(f"{name} {energy_text(total[f'{name.lower()}_j'])}" for name in ("CPU", "GPU", "RAM"))
    emitted = total.get("emissions_kg")
    co2e = "no emissions (set energy.grid)" if emitted is None else f"{1000 * emitted:.3g} g CO2e"
    return f"{energy_text(total['energy_j'])} ({parts}), {co2e}"


class _LevelTracker:
    """One CodeCarbon tracker and its table: for the run, for steps, or for phases."""

    def __init__(self, level: str, tag: str, folder: Path | None, grid: str) -> None:
        # Overrides configuration files and the environment: no output, no endpoint, no location service.
        self._tracker = offline_tracker(INTERVAL_S, output_methods=[], emissions_endpoint=None, **location(grid))
        self._has_grid = parse_grid(grid) is not None
        self._whole_run = level == "run"
        self._start_s = 0.0
        self.total: dict[str, float | None] | None = None
        formats: Any = importlib.import_module("codecarbon.output_methods.emissions_data")
        kind = formats.EmissionsData if self._whole_run else formats.TaskEmissionsData
        self._names = [field.name for field in dataclasses.fields(kind)]
        self._table = None if folder is None else CsvFile(unused_path(folder, f"{level}_{tag}", ".csv"), self._names)
        if not self._whole_run:  # the first task detects the hardware for a second; keep that out of the first step
            self._tracker.start_task("first")
            self._tracker.stop_task()

    def start(self, phase: str) -> None:
        if self._whole_run:  # sampled every second; a task is read only at its end, when a counter may have wrapped
            self._tracker.start()
        else:
            self._tracker.start_task(phase)
        self._start_s = time.perf_counter()

    def stop(self, phase: str, step: int) -> dict[str, float]:
        duration_s = time.perf_counter() - self._start_s
        data = self._stop_run() if self._whole_run else self._tracker.stop_task()
        # CodeCarbon keeps every task, kilobytes each; a long training would fill the memory.
        self._tracker._tasks.clear()
        row = {name: value or 0.0 for name, value in energies_j(lambda name: getattr(data, name)).items()}
        own = {"task_name": f"{phase}_{step}"} if self._has_grid else _WITHOUT_GRID | {"task_name": f"{phase}_{step}"}
        if self._table is not None:
            self._table.add(own.get(name, getattr(data, name, "")) for name in self._names)
        if self._whole_run:
            self.total = {**row, "emissions_kg": data.emissions if self._has_grid else None}
        return {"duration_s": duration_s, **row}

    def _stop_run(self) -> Any:
        self._tracker.stop()
        return self._tracker.final_emissions_data

    def close(self) -> None:
        if not self._whole_run:
            self._tracker.stop()
        if self._table is not None:
            self._table.close()


_WITHOUT_GRID = {"emissions": "", "emissions_rate": ""}
