"""Joules per phase by the three honest ways, each under its label: `direct`, `isolated` and `time-share`.

`direct` needs windows that are long against the sensor's refresh: the step, over many of them, and phases of seconds.
`isolated` takes the step apart once, after the warm-up, in a stage of its own (isolated.py), and leaves the training
bit for bit as it was (snapshot.py). `time-share` divides the step's joules by device time and is the weakest.
Isolation is checked, not assumed: its whole step is compared with the steps of the undisturbed training after it.

While training runs only times are noted; joules are computed at the end, from the trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from joulelab.clock import NS
from joulelab.errors import EndedBySignal
from joulelab.train.stats.differences import Isolated, split
from joulelab.train.stats.energy_text import EnergyFindings
from joulelab.train.stats.hooks import Bench, TrainerStats
from joulelab.train.stats.isolated import Isolation, LoopPlan, LoopWindow
from joulelab.train.stats.long_phases import LongPhases
from joulelab.train.stats.phase_times import PhaseTimes
from joulelab.train.stats.snapshot import Snapshot
from joulelab.train.stats.step_energy import by_time, energy_per_step
from joulelab.train.stats.stretches import INTERRUPTIONS, Piece, Stretches, Window
from joulelab.train.stats.sync import waiter
from joulelab.train.stats.window_energy import Reader, reader_of, why_no_joules

ASKED_TO_STOP = "the run was asked to stop meanwhile"


class EnergyStats(TrainerStats):
    def __init__(
        self,
        warmup_steps: int = 10,
        plan: LoopPlan | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.warmup_steps = warmup_steps
        self.plan = plan or LoopPlan()
        self._now_ns = now_ns
        self._steps = 0
        self._first_pieces: list[Piece] = []
        self._windows: list[LoopWindow] = []
        self._aside: Window | None = None
        self._not_isolated = f"training ended before its {warmup_steps} steps of warm-up did"

    def attach(self, bench: Bench) -> None:
        self._bench = bench
        self._wait = waiter(bench.device)
        self._times = PhaseTimes(bench.device)
        self._stretches = Stretches(self._now_ns)
        self._long = LongPhases(self._wait, self._now_ns)

    def start(self, phase: str) -> None:
        if phase == "step":
            self._stretches.start_step()
        elif phase in INTERRUPTIONS:
            self._interrupt()
        self._times.start(phase)
        if self._times.watching:
            self._long.start(phase)

    def stop(self, phase: str) -> None:
        if self._times.watching:
            self._long.stop(phase)
        self._times.stop(phase)
        if phase == "step":
            self._stretches.stop_step()

    def log_loss(self, loss: float) -> None:
        self._stretches.touch()

    def log_step(self, step: int) -> None:
        self._steps += 1
        self._times.harvest()
        if self._steps == self.warmup_steps:
            self._interrupt()
            self._first_pieces = self._stretches.pieces
            self._long.choose(self._times.per_step_s(), self._bench.trainer.config.accumulate)
            self._isolate()
            self._stretches = Stretches(self._now_ns)

    def stop_train(self) -> None:
        self._interrupt()

    def _interrupt(self) -> None:
        self._wait()  # the training's stretch ends when the device has done it
        self._stretches.touch()
        self._stretches.interrupt()

    def _isolate(self) -> None:
        bench = self._bench
        self._not_isolated = why_no_joules(bench.meter, bench.device.type) or ""
        # ranks repeat together or not at all; one with a sensor is enough
        if not bench.trainer.ranks.sum([not self._not_isolated])[0]:
            return
        with bench.trainer.aside():
            try:
                with bench.aside(f"{bench.stage}.phases"):
                    bench.say(f"energy: taking the step apart for a while, billed to {bench.stage}.phases")
                    begin_ns = self._now_ns()
                    self._take_apart()
                    self._aside = (begin_ns, self._now_ns())
            except EndedBySignal:  # raised on entering, before anything was done
                self._not_isolated = ASKED_TO_STOP

    def _take_apart(self) -> None:
        """A measurement that fails must not end hours of training; one that cannot be undone must."""
        bench = self._bench
        before = Snapshot(bench.trainer)
        try:
            self._windows = Isolation(bench.trainer, self.plan, self._now_ns, self._wait).run()
        except EndedBySignal:  # nothing is lost: the loop looks for itself right after this, and saves before it leaves
            self._not_isolated = ASKED_TO_STOP
        except Exception as error:
            self._not_isolated = f"{type(error).__name__}: {error}"
            bench.say(f"energy: the step could not be taken apart ({self._not_isolated})")
        before.restore()
        self._wait()
        if self._windows and bench.meter is not None:  # durable: a killed run can still be computed from its trace
            bench.meter.event("isolated", stage=bench.stage, windows=[window.fields() for window in self._windows])

    def log_stats(self) -> str:
        self._wait()
        self._times.harvest()
        read = reader_of(self._bench.meter, self._last_ns(), self._bench.device.type)
        found = self._findings(read)
        self._bench.result("energy", found.values())
        return found.text()

    def _findings(self, read: Reader) -> EnergyFindings:
        step = energy_per_step(self._pieces(), read)
        return EnergyFindings(
            step=step,
            long_phases=self._long.energy(read),
            isolated=self._isolated(read),
            not_isolated=self._not_isolated,
            time_shares=by_time(step.step, self._times.shares()) if step.step else {},
            aside_stage=f"{self._bench.stage}.phases",
            aside_s=(self._aside[1] - self._aside[0]) / NS if self._aside else None,
            aside_j=read([self._aside]).energy_j if self._aside else None,
        )

    def _isolated(self, read: Reader) -> Isolated | None:
        found = split(self._windows, read) if self._windows else None
        if self._windows and found is None:
            self._not_isolated = "the trace has no whole round of its windows"
        return found

    def _pieces(self) -> list[Piece]:
        """Undisturbed training; where it was too short to have any after the warm-up, the warm-up itself."""
        return self._stretches.pieces or self._first_pieces

    def _last_ns(self) -> int:
        ends = [window.end_ns for window in self._windows]
        ends += [end for piece in self._pieces() for _, end in piece.windows]
        return max([0, self._long.last_ns(), *ends])
