"""Joules per phase by the three honest ways, each under its label: `direct`, `isolated` and `time-share`.

`direct` needs windows that are long against the sensor's refresh: the step, over many of them, and phases of seconds.
`isolated` takes the step apart once, after the warm-up, in a stage of its own (isolated.py), and leaves the training
bit for bit as it was (snapshot.py). `time-share` divides the step's joules by device time and is the weakest.
Isolation is checked, not assumed: its whole step is compared with the steps of the undisturbed training after it.

While training runs only times are noted; joules are computed at the end, from the trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from joulelab.clock import NS
from joulelab.errors import EndedBySignal
from joulelab.meter.figures import COVERED, EnergyFigure, amount_text, coverage_text, gain_text, method_text
from joulelab.train.stats.hooks import TrackerContext, TrainerStats, device_synchronizer
from joulelab.train.stats.isolated import IsolatedEnergy, Isolation, LoopPlan, LoopWindow, Snapshot, isolated_energy
from joulelab.train.stats.phase_times import PhaseTimes
from joulelab.train.stats.step_energy import (
    INTERRUPTIONS,
    CleanWindow,
    CleanWindows,
    LongPhases,
    PerStep,
    Reader,
    StepEnergy,
    TimeSpan,
    energy_per_step,
    energy_reader,
    missing_energy_reason,
    time_shares,
    to_record,
    within_intervals,
)
from joulelab.units import duration_text, energy_text, percent_text, power_text

# What the `energy` tracker found: as a table and sentences for people, and as values for the record.


TABLE_HEADER = f"{'phase':<18}{'energy per step':>20}{'power':>10}{'share':>9}  method"


@dataclass(frozen=True)
class PhaseEnergyReport:
    step: StepEnergy
    long_phases: Mapping[str, PerStep]
    isolated: IsolatedEnergy | None
    not_isolated: str
    """Why there is no isolation, where there is none."""
    time_shares: Mapping[str, PerStep]
    aside_stage: str
    aside_s: float | None
    aside_j: float | None

    def text(self) -> str:
        if self.step.step is None and self.isolated is None:
            return f"energy per phase: missing. {self.step.problem}"
        lines = [f"energy per phase ({self.sensor}), one optimiser step", TABLE_HEADER, *self._rows(), *self._remarks()]
        return "\n".join(lines)

    @property
    def sensor(self) -> str:
        figure = self._sensed
        covered = coverage_text(figure.coverage) if figure.coverage < COVERED else ""
        parts = [method_text(figure), gain_text([figure]), ", ".join(figure.sources), covered]
        return "; ".join(part for part in parts if part)

    @property
    def _sensed(self) -> EnergyFigure:
        return self.isolated.figure if self.isolated else self.step.figure

    def _rows(self) -> Iterator[str]:
        sensed = self._sensed
        if self.isolated is not None:
            whole = self.isolated.step
            for phase, row in self.isolated.phases.items():
                yield row_text(phase, row, whole, sensed)
                if phase == "forward":
                    for part, inner in self.isolated.parts.items():
                        yield row_text(f"  {part}", inner, whole, sensed)
            yield row_text("step", whole, whole, sensed)
        if self.step.step is not None:
            yield row_text("step", self.step.step, self.step.step, sensed)
            yield from (row_text(phase, row, self.step.step, sensed) for phase, row in self.long_phases.items())
            yield from (row_text(phase, row, self.step.step, sensed) for phase, row in self.time_shares.items())

    def _remarks(self) -> Iterator[str]:
        if self.step.step is None:
            yield f"No energy of undisturbed steps: {self.step.problem}."
        else:
            yield f"direct: {self.step.steps} steps in {duration_text(self.step.duration_s)} of undisturbed training."
        if self.isolated is None:
            yield f"Not taken apart: {self.not_isolated}. The time-shares are all there is; they are the weakest way."
        else:
            yield self.verdict() or "The isolated step could not be checked against undisturbed training."
        if self.aside_s is not None:
            yield (
                f"Taking the step apart took {duration_text(self.aside_s)} and {energy_text(self.aside_j)}, billed to "
                f"{self.aside_stage}; the training goes on as if it had not been."
            )
        if self.step.figure.method == "estimated":
            yield "These joules are an estimate from CPU time; no sensor measured them."

    def verdict(self) -> str | None:
        """Whether the isolated step is the step that training takes."""
        if self.isolated is None or self.step.step is None:
            return None
        isolated, direct = self.isolated.step, self.step.step
        difference = isolated.energy_j / direct.energy_j - 1 if direct.energy_j else 0.0
        if within_intervals(isolated, direct):
            return f"The isolated step agrees with undisturbed training ({100 * difference:+.1f} %, within intervals)."
        return (
            f"The isolated step differs from undisturbed training by {100 * difference:+.1f} %, more than the "
            "intervals allow: read the isolated joules as shares of a step, not as its joules."
        )

    def values(self) -> dict[str, Any]:
        isolated, step = self.isolated, self.step.step
        return {
            "problem": self.step.problem,
            "figure": self.step.figure.model_dump(),
            "direct": {
                "steps": self.step.steps,
                "duration_s": self.step.duration_s,
                "step": to_record(step) if step else None,
                "phases": {phase: to_record(row) for phase, row in self.long_phases.items()},
            },
            "isolated": {
                "problem": self.not_isolated or None,
                "rounds": isolated.rounds if isolated else 0,
                "step": to_record(isolated.step) if isolated else None,
                "phases": {phase: to_record(row) for phase, row in isolated.phases.items()} if isolated else {},
                "parts": {part: to_record(row) for part, row in isolated.parts.items()} if isolated else {},
                "agrees": within_intervals(isolated.step, step) if isolated and step else None,
                "verdict": self.verdict(),
                "stage": self.aside_stage,
                "duration_s": self.aside_s,
                "energy_j": self.aside_j,
            },
            "time-share": {"phases": {phase: to_record(row) for phase, row in self.time_shares.items()}},
        }


def row_text(phase: str, row: PerStep, whole: PerStep, sensed: EnergyFigure) -> str:
    share = percent_text(row.energy_j / whole.energy_j) if whole.energy_j else "-"
    power = "-" if row.power_w is None else power_text(row.power_w)
    # energy of a step is that of covered time, and no lower bound
    each = sensed.model_copy(update={"coverage": 1.0, "lower_bound": False})
    energy = amount_text(each.with_interval(row.energy_j, row.half_width_j))
    return f"{phase:<18}{energy:>20}{power:>10}{share:>9}  {row.method}"


STOP_REQUESTED = "the run was asked to stop meanwhile"


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
        self._first_pieces: list[CleanWindow] = []
        self._windows: list[LoopWindow] = []
        self._aside: TimeSpan | None = None
        self._not_isolated = f"training ended before its {warmup_steps} steps of warm-up did"

    def attach(self, bench: TrackerContext) -> None:
        self._bench = bench
        self._wait = device_synchronizer(bench.device)
        self._times = PhaseTimes(bench.device)
        self._stretches = CleanWindows(self._now_ns)
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
            self._stretches = CleanWindows(self._now_ns)

    def stop_train(self) -> None:
        self._interrupt()

    def _interrupt(self) -> None:
        self._wait()  # the training's stretch ends when the device has done it
        self._stretches.touch()
        self._stretches.interrupt()

    def _isolate(self) -> None:
        bench = self._bench
        self._not_isolated = missing_energy_reason(bench.meter, bench.device.type) or ""
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
                self._not_isolated = STOP_REQUESTED

    def _take_apart(self) -> None:
        """A measurement that fails must not end hours of training; one that cannot be undone must."""
        bench = self._bench
        before = Snapshot(bench.trainer)
        try:
            self._windows = Isolation(bench.trainer, self.plan, self._now_ns, self._wait).run()
        except EndedBySignal:  # nothing is lost: the loop looks for itself right after this, and saves before it leaves
            self._not_isolated = STOP_REQUESTED
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
        read = energy_reader(self._bench.meter, self._last_ns(), self._bench.device.type)
        found = self._findings(read)
        self._bench.result("energy", found.values())
        return found.text()

    def _findings(self, read: Reader) -> PhaseEnergyReport:
        step = energy_per_step(self._pieces(), read)
        return PhaseEnergyReport(
            step=step,
            long_phases=self._long.energy(read),
            isolated=self._isolated(read),
            not_isolated=self._not_isolated,
            time_shares=time_shares(step.step, self._times.shares()) if step.step else {},
            aside_stage=f"{self._bench.stage}.phases",
            aside_s=(self._aside[1] - self._aside[0]) / NS if self._aside else None,
            aside_j=read([self._aside]).energy_j if self._aside else None,
        )

    def _isolated(self, read: Reader) -> IsolatedEnergy | None:
        found = isolated_energy(self._windows, read) if self._windows else None
        if self._windows and found is None:
            self._not_isolated = "the trace has no whole round of its windows"
        return found

    def _pieces(self) -> list[CleanWindow]:
        """Undisturbed training; where it was too short to have any after the warm-up, the warm-up itself."""
        return self._stretches.pieces or self._first_pieces

    def _last_ns(self) -> int:
        ends = [window.end_ns for window in self._windows]
        ends += [end for piece in self._pieces() for _, end in piece.windows]
        return max([0, self._long.last_ns(), *ends])


# Energy per step as an average over the whole training: all its measured joules over all its steps.
#
# Nothing is measured step by step, so nothing is below the sensor's refresh. How the step divides over its phases is
# a `time-share`: the step's joules by device time, which is the weakest way; `energy` has a better one.


class AveragedEnergyStats(TrainerStats):
    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns

    def attach(self, bench: TrackerContext) -> None:
        self._bench = bench
        self._wait = device_synchronizer(bench.device)
        self._times = PhaseTimes(bench.device)
        self._stretches = CleanWindows(self._now_ns)

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
        found = energy_per_step(pieces, energy_reader(self._bench.meter, until_ns, self._bench.device.type))
        phases = time_shares(found.step, self._times.shares()) if found.step else {}
        self._bench.result(
            "averaged-energy",
            {
                "problem": found.problem,
                "steps": found.steps,
                "duration_s": found.duration_s,
                "figure": found.figure.model_dump(),
                "step": to_record(found.step) if found.step else None,
                "phases": {phase: to_record(row) for phase, row in phases.items()},
            },
        )
        return _averaged_text(found, phases)


def _averaged_text(found: StepEnergy, phases: dict[str, PerStep]) -> str:
    if found.step is None:
        return f"averaged energy: missing. {found.problem}"
    steps = f"{found.steps} steps in {duration_text(found.duration_s)}"
    rows = [row_text(phase, row, found.step, found.figure) for phase, row in {"step": found.step, **phases}.items()]
    return "\n".join([f"averaged energy ({method_text(found.figure)}) over {steps}", TABLE_HEADER, *rows])
