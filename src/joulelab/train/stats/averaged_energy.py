"""Energy per step as an average over the whole training: all its measured joules over all its steps.

Nothing is measured step by step, so nothing is below the sensor's refresh. How the step divides over its phases is a
`time-share`: the step's joules by device time, which is the weakest way; `energy` has a better one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from joulelab.meter.figure_text import method_text
from joulelab.train.stats.energy_text import HEAD, row_text
from joulelab.train.stats.hooks import Bench, TrainerStats
from joulelab.train.stats.phase_times import PhaseTimes
from joulelab.train.stats.step_energy import Found, PerStep, as_values, by_time, energy_per_step
from joulelab.train.stats.stretches import INTERRUPTIONS, Stretches
from joulelab.train.stats.sync import waiter
from joulelab.train.stats.window_energy import reader_of
from joulelab.units import duration_text


class AveragedEnergyStats(TrainerStats):
    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns

    def attach(self, bench: Bench) -> None:
        self._bench = bench
        self._wait = waiter(bench.device)
        self._times = PhaseTimes(bench.device)
        self._stretches = Stretches(self._now_ns)

    def start(self, phase: str) -> None:
        if phase == "step":
            self._stretches.start_step()
        elif phase in INTERRUPTIONS:
            self._interrupt()
        self._times.start(phase)

    def stop(self, phase: str) -> None:
        self._times.stop(phase)
        if phase == "step":
            self._stretches.stop_step()

    def log_loss(self, loss: float) -> None:
        self._stretches.touch()

    def log_step(self, step: int) -> None:
        self._times.harvest()

    def stop_train(self) -> None:
        self._interrupt()

    def _interrupt(self) -> None:
        self._wait()  # the training's stretch ends when the device has done it
        self._stretches.touch()
        self._stretches.interrupt()

    def log_stats(self) -> str:
        self._times.harvest()
        pieces = self._stretches.pieces
        until_ns = max((window[1] for piece in pieces for window in piece.windows), default=0)
        found = energy_per_step(pieces, reader_of(self._bench.meter, until_ns, self._bench.device.type))
        phases = by_time(found.step, self._times.shares()) if found.step else {}
        self._bench.result(
            "averaged-energy",
            {
                "problem": found.problem,
                "steps": found.steps,
                "duration_s": found.duration_s,
                "figure": found.figure.model_dump(),
                "step": as_values(found.step) if found.step else None,
                "phases": {phase: as_values(row) for phase, row in phases.items()},
            },
        )
        return _text(found, phases)


def _text(found: Found, phases: dict[str, PerStep]) -> str:
    if found.step is None:
        return f"averaged energy: missing. {found.problem}"
    steps = f"{found.steps} steps in {duration_text(found.duration_s)}"
    rows = [row_text(phase, row, found.step, found.figure) for phase, row in {"step": found.step, **phases}.items()]
    return "\n".join([f"averaged energy ({method_text(found.figure)}) over {steps}", HEAD, *rows])
