"""Training budgets: steps, epochs, tokens, seconds or joules. The limit that is reached first ends the training.

Setup does not count: evaluations, compilation and the first step of an attempt spend neither time nor energy.

Steps, epochs and tokens follow from the position alone. Clock and meter are read about once a second, and more often
toward the end. Every reading is recorded with its step, so that a run can be replayed on another machine with the same
learning rates and the same last step.

The module also has early stopping, and the check that a sensor exists before an energy budget is used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from joulelab.meter.monitor.tally import LiveEnergy
from joulelab.runs.context import RunContext
from joulelab.train.config import TrainingConfig, unmeasured_budget


@dataclass(frozen=True)
class Position:
    """Progress of a training, summed over all ranks."""

    drawn: int = 0
    """Micro-batches drawn by all ranks; determines the next one."""
    step: int = 0
    """Optimizer steps."""
    samples: int = 0
    tokens: int = 0

    def after_step(self, samples: int, tokens: int) -> Position:
        return replace(self, step=self.step + 1, samples=self.samples + samples, tokens=self.tokens + tokens)


READ_EVERY_S = 1.0
READ_FRACTION_OF_REST = 0.1
"""Largest interval between two readings, as a fraction of the remaining time, so that the budget is not overshot by a
whole second."""
RATE_AFTER_S = 5.0
"""Training after which its power is known well enough to say when an energy budget will end it. A counter refreshes
every 0.1 s to 1 s, so the error is at most a fifth."""
MIN_FRACTION = 1e-3
"""Fraction that counts as spent while neither clock nor meter has advanced."""
BudgetReading = tuple[int, float]
"""Step, and the fraction of the time or energy budget that was spent by then."""


@dataclass
class Budget:
    """Fraction of the budget that is spent, over all attempts of a run."""

    config: TrainingConfig
    micro_batches_per_epoch: int
    micro_batches_per_step: int
    """Over all ranks."""
    energy_j: Callable[[], float | None] = lambda: None
    """Energy of the job so far, from an arbitrary origin; None where no sensor reports."""
    on_reading: Callable[[int, float], None] = lambda step, fraction: None
    replayed: Sequence[BudgetReading] | None = None
    """Readings of an earlier run, sorted by step, used in place of clock and meter."""
    clock_s: Callable[[], float] = time.monotonic
    overshoot_j: float = 0.0
    """Energy beyond the budget when training stopped; negative if another limit ended it."""
    _start_s: float = 0.0
    _start_j: float = 0.0
    _read_s: float = -math.inf
    _read_every_s: float = 0.0
    _spent_fraction: float = 0.0
    _read_at_step: float = 1.0
    """Steps done at the last reading. Starts at 1: the first step is setup and spends nothing."""
    _last_fraction_below_1: float = 0.0
    _per_step: float = 0.0
    """Increase of the fraction per step between the last two readings."""
    _spent_before: dict[str, float] = field(default_factory=lambda: {"time_s": 0.0, "energy_j": 0.0})
    _before_pause: dict[str, float] | None = None
    """Spent time and energy when the pause began; None while training."""

    def __post_init__(self) -> None:
        self._start_s = self.clock_s()

    def start(self) -> None:
        """Time and energy count from here."""
        self._start_s = self.clock_s()
        if self.config.max_energy_j is not None and self.replayed is None:
            self._start_j = self.energy_j() or 0.0

    def stop(self) -> None:
        if self.config.max_energy_j is not None and self.replayed is None:
            self.overshoot_j = self.state()["energy_j"] - self.config.max_energy_j

    def total_steps(self, position: Position) -> int | None:
        """Total steps of a training that is at this position, if steps or epochs are limited, else None."""
        known = [self.config.max_steps] if self.config.max_steps else []
        if (drawn := self._drawn_in_all(position)) is not None:
            known.append(position.step + (drawn - position.drawn) // self.micro_batches_per_step)
        return min(known, default=None)

    def _drawn_in_all(self, position: Position) -> int | None:
        """Micro-batches that a budget of epochs draws. In micro-batches and not in steps, whose size depends on the
        number of ranks: an earlier attempt may have had another one."""
        if not self.config.epochs:
            return None
        left = math.ceil(self.config.epochs * self.micro_batches_per_epoch) - position.drawn
        # Rounded up: a budget of one epoch sees every sample, the last step also a few of the next epoch.
        return position.drawn + max(0, -(-left // self.micro_batches_per_step)) * self.micro_batches_per_step

    def expected_s(self, position: Position, step_s: float) -> float | None:
        """Time of the whole training, if its steps take `step_s`; None while the power of an energy budget is unknown,
        infinite without a limit."""
        config, times = self.config, [math.inf]
        if steps := self.total_steps(position):
            times.append(step_s * steps)
        if config.max_tokens and position.tokens:
            times.append(step_s * position.step * config.max_tokens / position.tokens)
        if self.replayed is not None:
            times += [step_s * (step + 1) for step, fraction in self.replayed if fraction >= 1]
            return min(times)
        if config.max_time_s:
            times.append(config.max_time_s)
        if config.max_energy_j is not None:
            spent = self._spent()
            if spent["time_s"] < RATE_AFTER_S or spent["energy_j"] <= 0:
                return None
            times.append(spent["time_s"] * config.max_energy_j / spent["energy_j"])
        return min(times)

    def fraction(self, position: Position) -> float:
        """Fraction spent of the limit that is closest to its end."""
        fractions = [self._spent_fraction]
        if self.config.max_steps:
            fractions.append(position.step / self.config.max_steps)
        if drawn := self._drawn_in_all(position):
            fractions.append(position.drawn / drawn)
        if self.config.max_tokens:
            fractions.append(position.tokens / self.config.max_tokens)
        return max(fractions)

    def fraction_amid(self, position: Position, tokens: int) -> float:
        """The fraction in the middle of the current step, which has drawn its micro-batches and trains on `tokens`
        tokens: above 0 in the first step and below 1 in the last, so that no step has learning rate 0.

        Between two readings of clock and meter the fraction is extrapolated linearly. The extrapolation uses recorded
        readings and step numbers only, so a replay has the same learning rates.
        """
        fractions = []
        if self.config.max_steps:
            fractions.append((position.step + 0.5) / self.config.max_steps)
        if drawn := self._drawn_in_all(position):
            fractions.append((position.drawn - self.micro_batches_per_step / 2) / drawn)
        if limit := self.config.max_tokens:
            # The middle of the step by tokens; its end is capped at the limit, because the last
            # step may overshoot it.
            fractions.append((position.tokens + min(position.tokens + tokens, limit)) / 2 / limit)
        if self._needs_readings:
            reached = self._spent_fraction + (position.step + 0.5 - self._read_at_step) * self._per_step
            # The extrapolation may pass 1 while the meter has not: at most half of the rest since
            # the last reading, so that the schedule never reaches its end, a learning rate of 0,
            # before the training does.
            fractions.append(min(max(reached, MIN_FRACTION), (1 + self._last_fraction_below_1) / 2))
        return min(1.0, max(fractions))

    @property
    def _needs_readings(self) -> bool:
        limits = (self.replayed, self.config.max_time_s, self.config.max_energy_j)
        return any(limit is not None for limit in limits)

    def exhausted(self, position: Position) -> bool:
        return self.fraction(position) >= 1

    def read(self, position: Position) -> float:
        """Read clock and meter if a reading is due; returns the spent fraction of the time or energy budget."""
        if self.replayed is not None:
            return max((fraction for step, fraction in self.replayed if step <= position.step), default=0.0)
        if not self._needs_readings:
            return 0.0
        if self.clock_s() - self._read_s < self._read_every_s:
            return self._spent_fraction
        self._read_s = self.clock_s()
        spent = self.state()
        limits = (
            (spent["time_s"], self.config.max_time_s),
            (spent["energy_j"], self.config.max_energy_j),
        )
        # Never backward: a counter read a refresh earlier than before would make the learning rate
        # rise again.
        fraction = max(self._spent_fraction, max(value / limit for value, limit in limits if limit))
        # More often toward the end, where every step counts, and at every step before the first estimate.
        # At the mean rate so far. The overshoot is what is spent between two readings: at most a
        # tenth of what was left at the first of them, or one step.
        left_s = spent["time_s"] * (1 - fraction) / fraction if fraction > 0 else 0.0
        self._read_every_s = min(READ_EVERY_S, READ_FRACTION_OF_REST * left_s)
        return fraction

    def update(self, position: Position, fraction: float) -> None:
        """Set the reading that all ranks use from here on."""
        if fraction == self._spent_fraction:
            return
        self.on_reading(position.step, fraction)
        done = position.step + 1  # readings are taken after the backward pass, nearly at the end of the step
        if done > self._read_at_step:
            self._per_step = max(0.0, fraction - self._spent_fraction) / (done - self._read_at_step)
        self._spent_fraction, self._read_at_step = fraction, done
        if fraction < 1:
            self._last_fraction_below_1 = fraction

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude what is spent inside (an evaluation, a compilation, the first step); pauses may nest."""
        if self._before_pause is not None:
            yield
            return
        before = self._before_pause = self._spent()
        try:
            yield
        finally:
            self._before_pause = None
            after = self._spent()
            for name in self._spent_before:
                # Spent is (now - start) plus this offset, so a pause lowers the offset, which may
                # become negative.
                self._spent_before[name] -= after[name] - before[name]

    def state(self) -> dict[str, float]:
        """Spent time and energy over all attempts, for a checkpoint."""
        return {
            **self._spent(),
            "seen": self._spent_fraction,
            "seen_at": self._read_at_step,
            "per_step": self._per_step,
        }

    def _spent(self) -> dict[str, float]:
        if self._before_pause is not None:
            return self._before_pause
        return {
            "time_s": self._spent_before["time_s"] + self.clock_s() - self._start_s,
            "energy_j": self._spent_before["energy_j"] + self._attempt_energy_j(),
        }

    def _attempt_energy_j(self) -> float:
        if self.config.max_energy_j is None or self.replayed is not None:
            return 0.0
        now_j = self.energy_j()
        return 0.0 if now_j is None else now_j - self._start_j

    def load_state(self, state: dict[str, float]) -> None:
        self._spent_before = {"time_s": state["time_s"], "energy_j": state["energy_j"]}
        self._spent_fraction = self._last_fraction_below_1 = state["seen"]
        self._read_at_step, self._per_step = state.get("seen_at", 1.0), state.get("per_step", 0.0)


class EarlyStopping:
    """Ends training when the held-out loss has not improved in `patience` evaluations."""

    def __init__(self, patience: int | None) -> None:
        self.patience = patience
        self.best = math.inf
        self.evaluations_since_best = 0

    def update(self, loss: float) -> None:
        better = loss < self.best
        self.best = min(self.best, loss)
        self.evaluations_since_best = 0 if better else self.evaluations_since_best + 1

    @property
    def triggered(self) -> bool:
        return self.patience is not None and self.evaluations_since_best >= self.patience

    def state(self) -> dict[str, float]:
        return {"best": self.best, "evaluations_since_best": self.evaluations_since_best}

    def load_state(self, state: dict[str, float]) -> None:
        # checkpoints of earlier versions have the second key
        since = state.get("evaluations_since_best", state.get("looks_since_best", 0))
        self.best, self.evaluations_since_best = state["best"], int(since)


_READING_TIMEOUT_S = 3.0
"""A recorder that has just been started needs a moment for its first reading."""


def require_energy_reading(run: RunContext, *trainings: TrainingConfig | None, energy_j: float | None = None) -> None:
    """Require a sensor if one of these trainings has an energy budget, or if `energy_j` sets one for each of them.

    Call it before any work: the stages before a training may take hours.
    """
    for config in trainings:
        if config is not None and (energy_j is not None or config.max_energy_j is not None):
            wait_for_energy_reading(run, run.meter.live(), config)


def wait_for_energy_reading(run: RunContext, live: LiveEnergy, config: TrainingConfig) -> float:
    """Energy from the sensors that count toward a budget; raises ConfigError if none reports."""
    timeout_s = max(_READING_TIMEOUT_S, 2 * run.spec.energy.sample_interval_s)
    start_s = time.monotonic()
    while (reading_j := live.read_now(config.budget_counts_estimates)) is None:
        if time.monotonic() - start_s > timeout_s:
            raise unmeasured_budget()
        run.stop.check()
        time.sleep(0.1)
    return reading_j
