"""CodeCarbon around the run, every step and every phase of it, as the course's tables have it; offline.

Three of its trackers run side by side, because one of them follows one task at a time. Their readings go into
`run_*.csv`, `steps_*.csv` and `substeps_*.csv`, the losses into `losses.csv`. Energies are CodeCarbon's own: counters
where it finds them, models and constants elsewhere. No CO2e is asked of it, so it needs no location and no network, and
its lock is not used: a stale one would make the next run measure nothing.

On a GPU the device is waited for at every edge, without which a phase would be billed for its launching alone. That
and its own calls of milliseconds make this the dearest of the trackers; it is here to be compared with.
"""

from __future__ import annotations

import math
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from joulelab.errors import DependencyMissing
from joulelab.meter.importers.emissions_csv import ENERGIES, energies_j
from joulelab.trackers.codecarbon import offline_tracker
from joulelab.train.stats.hooks import CsvFile, LossFile, TrackerContext, TrainerStats, device_synchronizer, unused_path
from joulelab.train.stats.phase_times import STEP_PHASES
from joulelab.train.stats.step_energy import INTERRUPTIONS
from joulelab.units import energy_text, percent_text

# What CodeCarbon's reading of a few milliseconds is worth, judged by the readings themselves.
#
# Where it reads a counter that is refreshed every 100 ms, a short phase reads 0 J until a refresh happens to fall
# into it, and then gets the joules of all phases since the last one. Where it has no counter it multiplies the
# duration by a constant, which reads smoothly and says nothing that the duration did not.


# Readings that keep this close to duration x constant carry nothing else.
CONSTANT_REL = 0.02


class PhaseReadings:
    """Of one phase; sums only, so a long training costs nothing more."""

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
        """Of the GPU's joules where it read a GPU at all: its constants for other parts are never 0."""
        return (self._gpu_zeros if self._gpu_j > 0 else self._zeros) / max(1, self.count)

    @property
    def spread(self) -> float:
        """Standard deviation over mean of the joules."""
        return _relative_spread(self._energy_j, self._energy_squared, self.count)

    @property
    def is_duration_times_constant(self) -> bool:
        return self._gpu_j == 0 and _relative_spread(self._power_w, self._power_squared, self.count) < CONSTANT_REL

    def text(self, phase: str) -> str:
        mean_ms = 1000 * self._duration_s / max(1, self.count)
        start = f"  {phase}: {self.count} readings of {mean_ms:.1f} ms, {energy_text(self._energy_j / self.count)} each"
        if self.is_duration_times_constant:
            return f"{start}: duration times a constant, so nothing that the duration does not say"
        if self.zero_share > 0:
            return f"{start}: {percent_text(self.zero_share, 0)} of them read 0 J, so a single one is worth nothing"
        return f"{start}: none read 0 J; they scatter by {percent_text(self.spread, 0)}"

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
    variance = squares / max(1, count) - mean**2
    return math.sqrt(max(0.0, variance)) / mean if mean else 0.0


_LEVEL_OF_PHASE = {"train": "run", "step": "steps", **dict.fromkeys((*STEP_PHASES, *INTERRUPTIONS), "substeps")}
BETWEEN_STEPS = ("train", *INTERRUPTIONS)
# Its thread's interval; tasks are measured at their edges, so this serves the run's total alone.
INTERVAL_S = 1.0


class CodeCarbonStats(TrainerStats):
    def __init__(self) -> None:
        if find_spec("codecarbon") is None:
            raise DependencyMissing(
                "the tracker `codecarbon` needs CodeCarbon, not installed here", 'pip install "joulelab[codecarbon]"'
            )
        self._levels: dict[str, _LevelTracker] = {}
        self._losses = LossFile(None)
        self._problem = ""
        self._step = 0
        self.readings: dict[str, PhaseReadings] = {}

    def attach(self, bench: TrackerContext) -> None:
        self._bench = bench
        self._wait = device_synchronizer(bench.device)
        if os.environ.get("LOCAL_RANK", "0") != "0":  # it counts the whole node: once is enough
            self._problem = "another rank of this node has it"
            return
        folder = None if bench.folder is None else bench.folder / "codecarbon"
        self._losses = LossFile(folder)
        tag = f"rank{os.environ.get('RANK', '0')}"
        try:
            self._levels = {level: _LevelTracker(level, tag, folder) for level in ("run", "steps", "substeps")}
        except Exception as error:
            self._give_up(error)

    def start_train(self) -> None:
        self._step = self._losses.step = self._bench.trainer.position.step  # above 0 in a resumed run
        super().start_train()

    def start(self, phase: str) -> None:
        level = self._levels.get(_LEVEL_OF_PHASE[phase])
        if level is not None and not self._problem:
            self._wait()
            try:
                level.start(phase)
            except Exception as error:
                self._give_up(error)

    def stop(self, phase: str) -> None:
        level = self._levels.get(_LEVEL_OF_PHASE[phase])
        if level is not None and not self._problem:
            self._wait()
            try:
                self._take(phase, level.stop(phase, self._step + (phase not in BETWEEN_STEPS)))
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """What it cannot do is told at the end; the training goes on without it."""
        self._problem = f"it failed ({type(error).__name__}: {error})"

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
        self._bench.result("codecarbon", {"problem": self._problem or None, "phases": values})
        if self._problem:
            return f"codecarbon: {self._problem}"
        lines = [readings.text(phase) for phase, readings in self.readings.items() if phase in STEP_PHASES]
        return "\n".join(["codecarbon, its own figures; what a reading of one phase is worth:", *lines])


class _LevelTracker:
    """One of CodeCarbon's trackers with its table: of the run, of steps, or of phases."""

    def __init__(self, level: str, tag: str, folder: Path | None) -> None:
        # whatever a configuration file or the environment sets: no output, no endpoint, no location service
        self._tracker = offline_tracker(
            INTERVAL_S, output_methods=[], emissions_endpoint=None, force_carbon_intensity_g_co2e_kwh=0.0
        )
        self._whole_run = level == "run"
        self._begun_s = 0.0
        names = ("step", "phase", "duration_s", *ENERGIES)
        self._table = None if folder is None else CsvFile(unused_path(folder, f"{level}_{tag}", ".csv"), names)
        if not self._whole_run:  # the first task looks for the hardware, for a second: not in the first step
            self._tracker.start_task("first")
            self._tracker.stop_task()

    def start(self, phase: str) -> None:
        if self._whole_run:  # read every second; a task is read at its end alone, when a counter may have gone round
            self._tracker.start()
        else:
            self._tracker.start_task(phase)
        self._begun_s = time.perf_counter()

    def stop(self, phase: str, step: int) -> dict[str, float]:
        duration_s = time.perf_counter() - self._begun_s
        told = self._stop_run() if self._whole_run else self._tracker.stop_task()
        # it keeps every task it ever had, kilobytes each: in a long training that is the machine's memory
        self._tracker._tasks.clear()
        row = {name: value or 0.0 for name, value in energies_j(lambda name: getattr(told, name)).items()}
        if self._table is not None:
            self._table.add((step, phase, duration_s, *row.values()))
        return {"duration_s": duration_s, **row}

    def _stop_run(self) -> Any:
        self._tracker.stop()
        return self._tracker.final_emissions_data

    def close(self) -> None:
        if not self._whole_run:
            self._tracker.stop()
        if self._table is not None:
            self._table.close()
