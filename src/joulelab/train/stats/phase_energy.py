"""The trackers `energy` and `averaged-energy`: energy per phase, each figure labeled with its method.

- `direct` needs windows that are long compared with the sensor's refresh: many steps together, and phases of seconds.
- `isolated` repeats parts of a step once, after the warm-up, in a separate stage, and restores the training state bit
  for bit (isolated.py). It is checked: the isolated step is compared with the undisturbed steps that follow it.
- `time-share` divides the step's energy by device time and is the weakest.

`averaged-energy` has no isolation: all energy over all steps, divided by time. During training only times are recorded;
energy is computed from the trace at the end.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from joulelab.clock import NS
from joulelab.errors import EndedBySignal, JoulelabError
from joulelab.meter.figures import COVERED, EnergyFigure, amount_text, coverage_text, gain_text, method_text
from joulelab.meter.trace import read_lines
from joulelab.train.stats.hooks import TrackerContext, TrainerStats, device_synchronizer
from joulelab.train.stats.isolated import (
    IsolatedEnergy,
    Isolation,
    LoopPlan,
    LoopWindow,
    Snapshot,
    TooLittleTime,
    isolated_energy,
)
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

TABLE_HEADER = f"{'phase':<18}{'energy per step':>20}{'power':>10}{'share':>9}  method"


ISOLATION_SHARE = 0.1
"""Of the training, which isolation may take unless the settings say otherwise."""


@dataclass(frozen=True)
class ShortenedIsolation:
    """Isolation that its limit made shorter, and its figures coarser."""

    limit_s: float
    whole_s: float
    """Time that it would have taken."""
    rounds: int
    window_s: float

    def text(self) -> str:
        return (
            f"Isolation was limited to {duration_text(self.limit_s)} instead of {duration_text(self.whole_s)} "
            f"({self.rounds} rounds with windows of {duration_text(self.window_s)}), so the figures per phase are "
            f"coarse: see their intervals. training.isolation_s={self.whole_s:.0f} measures them fully."
        )


@dataclass(frozen=True)
class PhaseEnergyReport:
    """Results of the tracker `energy`: as text for people, and as values for the record."""

    step: StepEnergy
    long_phases: Mapping[str, PerStep]
    isolated: IsolatedEnergy | None
    not_isolated: str
    """Why there is no isolated energy; empty if there is."""
    time_shares: Mapping[str, PerStep]
    isolation_stage: str
    isolation_s: float | None
    isolation_j: float | None
    shortened: ShortenedIsolation | None = None

    def text(self) -> str:
        if self.step.step is None and self.isolated is None:
            return f"energy per phase: missing. {self.step.problem}"
        lines = [f"energy per phase ({self.sensor}), one optimizer step", TABLE_HEADER, *self._rows(), *self._remarks()]
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
            yield f"Not isolated: {self.not_isolated}. Only time-shares are available, the weakest method."
        else:
            yield self.verdict() or "The isolated step could not be checked against undisturbed training."
        if self.isolation_s is not None:
            what = "Isolation" if self.isolated is not None else "The attempt"
            yield (
                f"{what} took {duration_text(self.isolation_s)} and {energy_text(self.isolation_j)}, billed to "
                f"{self.isolation_stage}; the training state was restored."
            )
        if self.shortened is not None and self.isolated is not None:
            yield self.shortened.text()
        if self.step.figure.method == "estimated":
            yield "The energy is estimated from CPU time; no sensor measured it."

    def verdict(self) -> str | None:
        """Whether the isolated step agrees with the steps of the training."""
        if self.isolated is None or self.step.step is None:
            return None
        isolated, direct = self.isolated.step, self.step.step
        difference = isolated.energy_j / direct.energy_j - 1 if direct.energy_j else 0.0
        if within_intervals(isolated, direct):
            return f"The isolated step agrees with undisturbed training ({100 * difference:+.1f} %, within intervals)."
        return (
            f"The isolated step differs from undisturbed training by {100 * difference:+.1f} %, more than the "
            "intervals allow: use the isolated energies as shares of a step, not as absolute values."
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
                "stage": self.isolation_stage,
                "duration_s": self.isolation_s,
                "energy_j": self.isolation_j,
                "shortened": asdict(self.shortened) if self.shortened and isolated else None,
            },
            "time-share": {"phases": {phase: to_record(row) for phase, row in self.time_shares.items()}},
        }


def row_text(phase: str, row: PerStep, whole: PerStep, sensed: EnergyFigure) -> str:
    share = percent_text(row.energy_j / whole.energy_j) if whole.energy_j else "-"
    power = "-" if row.power_w is None else power_text(row.power_w)
    # Energies per step are scaled to full coverage, so they are not lower bounds.
    each = sensed.model_copy(update={"coverage": 1.0, "lower_bound": False})
    energy = amount_text(each.with_interval(row.energy_j, row.half_width_j))
    return f"{phase:<18}{energy:>20}{power:>10}{share:>9}  {row.method}"


def _too_little(limit_s: float, least_s: float) -> str:
    return (
        f"it may take {duration_text(limit_s)} ({100 * ISOLATION_SHARE:g} % of the training, unless "
        f"training.isolation_s is set) and needs at least {duration_text(least_s)}"
    )


STOP_REQUESTED = "the run was asked to stop during isolation"


class UndisturbedStats(TrainerStats):
    """Energy of undisturbed steps and the times of their phases. The first step of an attempt is setup and is left out,
    as everywhere."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._steps = 0

    def attach(self, context: TrackerContext) -> None:
        self._context = context
        self._wait = device_synchronizer(context.device)
        self._times = PhaseTimes(context.device)
        self._clean = CleanWindows(self._now_ns, self._wait)

    def start(self, phase: str) -> None:
        if phase == "step":
            self._clean.start_step()
        elif phase in INTERRUPTIONS:
            self._clean.finish()
        self._times.start(phase)

    def stop(self, phase: str) -> None:
        self._times.stop(phase)
        if phase == "step":
            self._clean.stop_step()

    def log_loss(self, loss: float) -> None:
        self._clean.touch()

    def log_step(self, step: int) -> None:
        self._steps += 1
        self._times.harvest()
        if self._steps == 1:
            self._wait()
            self._clean = CleanWindows(self._now_ns, self._wait)

    def stop_train(self) -> None:
        self._clean.finish()


class EnergyStats(UndisturbedStats):
    """The tracker `energy`."""

    def __init__(
        self,
        warmup_steps: int = 10,
        plan: LoopPlan | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(now_ns)
        self.warmup_steps = warmup_steps
        self.plan = plan or LoopPlan()
        self._is_bounded = plan is None
        self._shortened: ShortenedIsolation | None = None
        self._warmup_windows: list[CleanWindow] = []
        self._loop_windows: list[LoopWindow] = []
        self._isolation_span: TimeSpan | None = None
        self._isolation_trace: Path | None = None
        """Of the earlier attempt that has isolated the phases."""
        self._expected_s: float | None = None
        """Time that the training is expected to take; None during the warm-up."""
        self._not_isolated = f"training ended within the {warmup_steps} warm-up steps"

    def attach(self, context: TrackerContext) -> None:
        super().attach(context)
        self._long = LongPhases(self._wait, self._now_ns)

    def start(self, phase: str) -> None:
        super().start(phase)
        if self._times.watching:
            self._long.start(phase)

    def stop(self, phase: str) -> None:
        if self._times.watching:
            self._long.stop(phase)
        super().stop(phase)

    def log_step(self, step: int) -> None:
        super().log_step(step)
        if self._steps < self.warmup_steps or self._expected_s is not None:
            return
        self._expected_s = self._expected_time()
        if self._expected_s is None:
            self._not_isolated = "training ended before its length could be estimated"
            return
        self._clean.finish()
        self._warmup_windows = self._clean.windows
        self._long.choose(self._times.per_step_s(), self._context.trainer.config.accumulate)
        self._isolate()
        self._clean = CleanWindows(self._now_ns, self._wait)

    def _expected_time(self) -> float | None:
        """By the first rank's clock and meter, for all ranks; None if it cannot be known yet."""
        trainer, unknown = self._context.trainer, -1.0
        if not self._is_bounded or trainer.config.isolation_s is not None:
            return math.inf  # isolation does not depend on it
        expected_s = trainer.budget.expected_s(trainer.position, sum(self._times.per_step_s().values()))
        found = trainer.ranks.of_first([unknown if expected_s is None else expected_s])[0]
        return None if found == unknown else found

    def _isolate(self) -> None:
        context = self._context
        self._find_earlier_isolation()
        if context.trainer.ranks.sum([float(self._isolation_trace is not None)])[0]:
            self._not_isolated = "" if self._loop_windows else "an earlier attempt isolated the phases"
            return
        self._not_isolated = missing_energy_reason(context.meter, context.device.type) or ""
        limit_s, least_s = self._plan().limit_s, self._least_s()
        if not self._not_isolated and limit_s < least_s:
            self._not_isolated = _too_little(limit_s, least_s)
            context.write(f"energy: the phases are not isolated: {self._not_isolated}")
        # All ranks isolate together or none does; one rank with a sensor is enough.
        if not context.trainer.ranks.sum([not self._not_isolated])[0]:
            return
        with context.trainer.pause():
            try:
                with context.aside(f"{context.stage}.phases"):
                    context.write(f"energy: isolating the phases of a step, billed to {context.stage}.phases")
                    self._run_isolation()
            except EndedBySignal:  # raised on entering the stage, before any work
                self._not_isolated = STOP_REQUESTED
            except Exception as error:
                ranks = context.trainer.ranks
                if ranks.world == 1:
                    raise
                # The others are in collective operations of the isolation: this rank's next step would pair with them.
                raise JoulelabError(
                    f"isolating the phases failed on rank {ranks.rank}: {type(error).__name__}: {error}",
                    "leave the tracker energy out of training.stats, or lower the batch size, and resume",
                ) from error

    def _run_isolation(self) -> None:
        """A failing measurement must not end hours of training on one rank; a failing restore must."""
        context = self._context
        # Isolation runs after the warm-up: kernels are loaded and compiled, clocks and temperature
        # are those of training, and the state to restore is that of a step boundary.
        begin_ns, plan = self._now_ns(), self._plan()
        before = Snapshot(context.trainer)
        try:
            isolation = Isolation(context.trainer, plan, self._now_ns, self._wait, self._copies_s(plan, begin_ns))
            self._loop_windows = isolation.run()
            if isolation.shortened_from_s is not None:
                plan = isolation.plan
                self._shortened = ShortenedIsolation(
                    plan.limit_s, isolation.shortened_from_s, plan.rounds, plan.window_s
                )
        except TooLittleTime as short:
            self._not_isolated = _too_little(plan.limit_s, short.args[0])
            context.write(f"energy: the phases are not isolated: {self._not_isolated}")
        except EndedBySignal:  # the loop checks right after this and saves before it stops
            self._not_isolated = STOP_REQUESTED
        except Exception as error:
            if context.trainer.ranks.world > 1:
                raise
            self._not_isolated = f"{type(error).__name__}: {error}"
            context.write(f"energy: the phases could not be isolated ({self._not_isolated})")
        before.restore()
        self._wait()
        self._isolation_span = (begin_ns, self._now_ns())
        # A killed run can be evaluated from its trace, and its resume need not repeat this.
        if self._loop_windows and context.meter is not None:
            context.meter.event(
                "isolated", stage=context.stage, windows=[window.fields() for window in self._loop_windows],
                span=self._isolation_span, shortened=asdict(self._shortened) if self._shortened else None,
                machine=self._machine,
            )  # fmt: skip

    def _copies_s(self, plan: LoopPlan, begin_ns: int) -> float:
        """Time within the limit that the loops do not have: restoring the state takes about as long as copying it."""
        if not self._is_bounded:
            return 0.0
        ranks = self._context.trainer.ranks
        # Means over ranks, because all decide alike.
        sums = ranks.sum([2 * (self._now_ns() - begin_ns) / NS, self._least_s()])
        copies_s, least_s = (value / ranks.world for value in sums)
        if plan.limit_s - copies_s < least_s:
            raise TooLittleTime(copies_s + least_s)
        return copies_s

    def _find_earlier_isolation(self) -> None:
        """The loops of an earlier attempt on such a machine, whose energy is in the trace of that attempt."""
        for events, trace in self._context.earlier_attempts:
            for line in read_lines(events):
                # Earlier versions did not record the machine and the span.
                found = (line.get("kind"), line.get("stage"), line.get("machine"))
                if found != ("isolated", self._context.stage, self._machine):
                    continue
                self._loop_windows = [LoopWindow(**window) for window in line["windows"]]
                self._isolation_span, self._isolation_trace = tuple(line["span"]), trace
                self._shortened = ShortenedIsolation(**line["shortened"]) if line["shortened"] else None
                return

    @property
    def _machine(self) -> str:
        device, ranks = self._context.device, self._context.trainer.ranks.world
        return f"{ranks} x {torch.cuda.get_device_name(device) if device.type == 'cuda' else platform.machine()}"

    def _least_s(self) -> float:
        """What isolation takes at least: of every loop about four repetitions to time it, and two rounds of three."""
        seconds = self._times.per_step_s()
        until_backward = seconds["forward"] + seconds["backward"]
        until_optimizer = until_backward + seconds["optimizer_step"]
        return 10 * (2 * seconds["forward"] + until_backward + until_optimizer + sum(seconds.values()))

    def _plan(self) -> LoopPlan:
        """Without a plan of the caller: `training.isolation_s`, else a share of the training's expected time."""
        if not self._is_bounded:
            return self.plan
        limit_s = self._context.trainer.config.isolation_s
        if limit_s is None:
            limit_s = min(self.plan.limit_s, ISOLATION_SHARE * (self._expected_s or 0.0))
        return replace(self.plan, limit_s=limit_s)

    def log_stats(self) -> str:
        self._wait()
        self._times.harvest()
        if not self._loop_windows:  # an attempt that ended within its warm-up
            self._find_earlier_isolation()
            self._not_isolated = "" if self._loop_windows else self._not_isolated
        read = energy_reader(self._context.meter, self._last_ns(), self._context.device.type)
        report = self._report(read)
        self._context.result("energy", report.values())
        return report.text()

    def _report(self, read: Reader) -> PhaseEnergyReport:
        earlier, context = self._isolation_trace, self._context
        read_loops = energy_reader(context.meter, 0, context.device.type, earlier) if earlier else read
        step = energy_per_step(self._clean_windows(), read)
        return PhaseEnergyReport(
            step=step,
            long_phases=self._long.energy(read),
            isolated=self._isolated(read_loops),
            not_isolated=self._not_isolated,
            time_shares=time_shares(step.step, self._times.shares()) if step.step else {},
            isolation_stage=f"{self._context.stage}.phases",
            isolation_s=(self._isolation_span[1] - self._isolation_span[0]) / NS if self._isolation_span else None,
            isolation_j=read_loops([self._isolation_span]).energy_j if self._isolation_span else None,
            shortened=self._shortened,
        )

    def _isolated(self, read: Reader) -> IsolatedEnergy | None:
        found = isolated_energy(self._loop_windows, read) if self._loop_windows else None
        if self._loop_windows and found is None:
            self._not_isolated = "the trace covers no complete round of its windows"
        return found

    def _clean_windows(self) -> list[CleanWindow]:
        """Undisturbed training after the warm-up; the warm-up itself if the training was too short."""
        return self._clean.windows or self._warmup_windows

    def _last_ns(self) -> int:
        ends = [] if self._isolation_trace else [window.end_ns for window in self._loop_windows]
        ends += [end for window in self._clean_windows() for _, end in window.spans]
        return max([0, self._long.last_ns(), *ends])


class AveragedEnergyStats(UndisturbedStats):
    """The tracker `averaged-energy`: measured energy over all steps, divided over the phases by time.

    Nothing is measured per step, so nothing is below the sensor's refresh interval.
    """

    def log_stats(self) -> str:
        self._times.harvest()
        windows = self._clean.windows
        until_ns = max((end for window in windows for _, end in window.spans), default=0)
        found = energy_per_step(windows, energy_reader(self._context.meter, until_ns, self._context.device.type))
        phases = time_shares(found.step, self._times.shares()) if found.step else {}
        self._context.result(
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
