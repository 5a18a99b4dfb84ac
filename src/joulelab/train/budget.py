"""How much training is allowed: in steps, epochs, tokens, seconds or joules, whichever is used up first.

Setup is not training: evaluations, compilation and the first step of an attempt spend neither seconds nor joules.

Steps, epochs and tokens follow from the position alone. Seconds and joules are looked at once a second, and more often
towards the end; what was seen is noted with its step, so that the run can be replayed elsewhere with the same learning
rates and the same end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from joulelab.errors import ConfigError
from joulelab.meter.monitor.tally import LiveEnergy
from joulelab.runs.context import RunContext
from joulelab.train.config import TrainingConfig

# Where training stands: the next micro-batch to draw, and what was done so far, over all ranks.


@dataclass(frozen=True)
class Position:
    drawn: int = 0
    """Micro-batches drawn by all ranks together; the next one follows from it alone."""
    step: int = 0
    """Optimiser steps."""
    samples: int = 0
    tokens: int = 0

    def after_step(self, samples: int, tokens: int) -> Position:
        return replace(self, step=self.step + 1, samples=self.samples + samples, tokens=self.tokens + tokens)


READ_EVERY_S = 1.0
READ_FRACTION_OF_REST = 0.1
"""Of the time that is left, at most, between two looks: a budget is not passed by a second's worth."""
MIN_FRACTION = 1e-3
"""Share that counts as spent while neither clock nor meter has advanced."""
BudgetReading = tuple[int, float]


@dataclass
class Budget:
    config: TrainingConfig
    micro_batches_per_epoch: int
    micro_batches_per_step: int
    """Over all ranks."""
    energy_j: Callable[[], float | None] = lambda: None
    """Joules that the job has used so far, from any origin; None where no sensor reports."""
    note: Callable[[int, float], None] = lambda step, fraction: None
    replayed: Sequence[BudgetReading] | None = None
    """Looks of an earlier run, in the order of their steps."""
    clock_s: Callable[[], float] = time.monotonic
    overshoot_j: float = 0.0
    """Energy beyond the joule budget when training stopped; negative where something else ended it."""
    _began_s: float = 0.0
    _began_j: float = 0.0
    _looked_s: float = -math.inf
    _look_every_s: float = 0.0
    _seen: float = 0.0
    _seen_at: float = 1.0
    """Steps that were done when `_seen` was read; the first one spends nothing, because it is setup."""
    _seen_below_1: float = 0.0
    _per_step: float = 0.0
    """Rise of `_seen` per step between the last two readings."""
    _earlier: dict[str, float] = field(default_factory=lambda: {"time_s": 0.0, "energy_j": 0.0})
    _before_pause: dict[str, float] | None = None
    """What was spent when the pause began; None while training."""

    def __post_init__(self) -> None:
        self._began_s = self.clock_s()

    def start(self) -> None:
        """Time and energy count from here; setting up is not training."""
        self._began_s = self.clock_s()
        if self.config.max_energy_j is not None and self.replayed is None:
            self._began_j = self.energy_j() or 0.0

    def stop(self) -> None:
        if self.config.max_energy_j is not None and self.replayed is None:
            self.overshoot_j = self.state()["energy_j"] - self.config.max_energy_j

    @property
    def steps(self) -> int | None:
        """Where steps or epochs end it; None where neither is limited."""
        config = self.config
        by_epochs = config.epochs and math.ceil(
            config.epochs * self.micro_batches_per_epoch / self.micro_batches_per_step
        )
        known = [limit for limit in (by_epochs, config.max_steps) if limit]
        return min(known) if known else None

    def fraction(self, position: Position) -> float:
        """The largest share that any limit has of itself spent."""
        shares = [self._seen]
        if self.steps:
            shares.append(position.step / self.steps)
        if self.config.max_tokens:
            shares.append(position.tokens / self.config.max_tokens)
        return max(shares)

    def fraction_amid(self, position: Position, tokens: int) -> float:
        """The same in the middle of the step under way, of so many tokens: above 0 in the first step and below 1 in the
        last, so that no step is made at learning rate 0.

        Between two readings of clock and meter the share advances by what the steps before took. That depends on noted
        readings and step numbers only, so a replay has the same learning rates.
        """
        shares = []
        if self.steps:
            shares.append((position.step + 0.5) / self.steps)
        if limit := self.config.max_tokens:
            shares.append((position.tokens + min(position.tokens + tokens, limit)) / 2 / limit)
        if self._is_looked_at:
            reached = self._seen + (position.step + 0.5 - self._seen_at) * self._per_step
            shares.append(min(max(reached, MIN_FRACTION), (1 + self._seen_below_1) / 2))
        return min(1.0, max(shares))

    @property
    def _is_looked_at(self) -> bool:
        limits = (self.replayed, self.config.max_time_s, self.config.max_energy_j)
        return any(limit is not None for limit in limits)

    def over(self, position: Position) -> bool:
        return self.fraction(position) >= 1

    def look(self, position: Position) -> float:
        """Read clock and meter if a look is due, and note what is newly known; the share of them that is spent."""
        if self.replayed is not None:
            return max((seen for step, seen in self.replayed if step <= position.step), default=0.0)
        if not self._is_looked_at:
            return 0.0
        if self.clock_s() - self._looked_s < self._look_every_s:
            return self._seen
        self._looked_s = self.clock_s()
        spent = self.state()
        shares = (
            (spent["time_s"], self.config.max_time_s),
            (spent["energy_j"], self.config.max_energy_j),
        )
        share = max(self._seen, max(value / limit for value, limit in shares if limit))
        # closer and closer to the end, where every step counts; every step while nothing is known yet
        left_s = spent["time_s"] * (1 - share) / share if share > 0 else 0.0
        self._look_every_s = min(READ_EVERY_S, READ_FRACTION_OF_REST * left_s)
        return share

    def see(self, position: Position, seen: float) -> None:
        """What all ranks go by from here on."""
        if seen == self._seen:
            return
        self.note(position.step, seen)
        # a reading comes after the backward pass, nearly at the end of its step
        done = position.step + 1
        if done > self._seen_at:
            self._per_step = max(0.0, seen - self._seen) / (done - self._seen_at)
        self._seen, self._seen_at = seen, done
        if seen < 1:
            self._seen_below_1 = seen

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is spent meanwhile (an evaluation, a compilation, the first step) is not training's; pauses may nest."""
        if self._before_pause is not None:
            yield
            return
        before = self._before_pause = self._spent()
        try:
            yield
        finally:
            self._before_pause = None
            after = self._spent()
            for name in self._earlier:
                self._earlier[name] -= after[name] - before[name]

    def state(self) -> dict[str, float]:
        """Spent over all attempts, for a checkpoint."""
        return {**self._spent(), "seen": self._seen, "seen_at": self._seen_at, "per_step": self._per_step}

    def _spent(self) -> dict[str, float]:
        if self._before_pause is not None:
            return self._before_pause
        return {
            "time_s": self._earlier["time_s"] + self.clock_s() - self._began_s,
            "energy_j": self._earlier["energy_j"] + self._energy_of_attempt_j(),
        }

    def _energy_of_attempt_j(self) -> float:
        if self.config.max_energy_j is None or self.replayed is not None:
            return 0.0
        now_j = self.energy_j()
        return 0.0 if now_j is None else now_j - self._began_j

    def load_state(self, state: dict[str, float]) -> None:
        self._earlier = {"time_s": state["time_s"], "energy_j": state["energy_j"]}
        self._seen = self._seen_below_1 = state["seen"]
        self._seen_at, self._per_step = state.get("seen_at", 1.0), state.get("per_step", 0.0)


class EarlyStopping:
    """Ends training when held-out loss has not improved for some looks."""

    def __init__(self, patience: int | None) -> None:
        self.patience = patience
        self.best = math.inf
        self.looks_since_best = 0

    def take(self, loss: float) -> None:
        better = loss < self.best
        self.best = min(self.best, loss)
        self.looks_since_best = 0 if better else self.looks_since_best + 1

    @property
    def over(self) -> bool:
        return self.patience is not None and self.looks_since_best >= self.patience

    def state(self) -> dict[str, float]:
        return {"best": self.best, "looks_since_best": self.looks_since_best}

    def load_state(self, state: dict[str, float]) -> None:
        self.best, self.looks_since_best = state["best"], int(state["looks_since_best"])


# A budget in joules needs somebody who tells joules: asked before anything is spent, and again by the loop.


_READING_TIMEOUT_S = 3.0
"""A recorder that has just been started needs a moment for its first reading."""


def require_energy_reading(run: RunContext, *trainings: TrainingConfig | None, energy_j: float | None = None) -> None:
    """That the joule budgets of these trainings, or one of `energy_j` for each of them, can be kept here.

    The stages before a training may take hours, and all of them are in vain where its budget cannot be kept.
    """
    for config in trainings:
        if config is not None and (energy_j is not None or config.max_energy_j is not None):
            wait_for_energy_reading(run, run.meter.live(), config)


def wait_for_energy_reading(run: RunContext, live: LiveEnergy, config: TrainingConfig) -> float:
    """What the sensors that count towards a budget have told; where there are none, the run ends here."""
    patience_s = max(_READING_TIMEOUT_S, 2 * run.spec.energy.sample_interval_s)
    begun_s = time.monotonic()
    while (told_j := live.read_now(config.budget_counts_estimates)) is None:
        if time.monotonic() - begun_s > patience_s:
            raise ConfigError(
                "a joule budget was set and no sensor tells joules here",
                "`joulelab doctor` says why; or let estimates count: energy.estimate_cpu=true "
                "training.budget_counts_estimates=true; or give the budget in tokens",
            )
        run.stop.check()
        time.sleep(0.1)
    return told_j
