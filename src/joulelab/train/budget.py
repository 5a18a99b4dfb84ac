"""How much training is allowed: in steps, epochs, tokens, seconds or joules, whichever is used up first.

Steps, epochs and tokens follow from the position alone. Seconds and joules are looked at about once a second; what was
seen is noted with its step, so that the run can be replayed elsewhere with the same learning rates and the same end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from joulelab.train.config import TrainingConfig
from joulelab.train.position import Position

LOOK_EVERY_S = 1.0
Look = tuple[int, float]


@dataclass
class Budget:
    config: TrainingConfig
    micro_batches_per_epoch: int
    micro_batches_per_step: int
    """Over all ranks."""
    energy_j: Callable[[], float | None] = lambda: None
    """Joules that training has taken in this attempt, as far as a sensor has told."""
    note: Callable[[int, float], None] = lambda step, fraction: None
    replayed: Sequence[Look] | None = None
    """Looks of an earlier run, in the order of their steps."""
    clock_s: Callable[[], float] = time.monotonic
    _began_s: float = 0.0
    _looked_s: float = -math.inf
    _seen: float = 0.0
    _earlier: dict[str, float] = field(default_factory=lambda: {"time_s": 0.0, "energy_j": 0.0})

    def __post_init__(self) -> None:
        self._began_s = self.clock_s()

    def start(self) -> None:
        """Time counts from here; setting up is not training."""
        self._began_s = self.clock_s()

    @property
    def steps(self) -> int | None:
        """Where steps or epochs end it; None where neither is limited."""
        config = self.config
        by_epochs = config.epochs and math.ceil(
            config.epochs * self.micro_batches_per_epoch / self.micro_batches_per_step
        )
        known = [limit for limit in (by_epochs, config.max_steps) if limit]
        return min(known) if known else None

    def fraction(self, position: Position, ahead: float = 0.0) -> float:
        """The largest share that any limit has of itself spent; `ahead` counts part of the step that is under way."""
        shares = [self._seen]
        if self.steps:
            shares.append((position.step + ahead) / self.steps)
        if self.config.max_tokens:
            a_step = position.tokens / position.step if position.step else 0.0
            shares.append((position.tokens + ahead * a_step) / self.config.max_tokens)
        return max(shares)

    def over(self, position: Position) -> bool:
        return self.fraction(position) >= 1

    def look(self, position: Position) -> float:
        """Read clock and meter if a look is due, and note what is newly known; the share of them that is spent."""
        if self.replayed is not None:
            return max((seen for step, seen in self.replayed if step <= position.step), default=0.0)
        if self.config.max_time_s is None and self.config.max_energy_j is None:
            return 0.0
        if self.clock_s() - self._looked_s < min(LOOK_EVERY_S, 0.01 * (self.config.max_time_s or math.inf)):
            return self._seen
        self._looked_s = self.clock_s()
        spent = self.state()
        shares = (
            (spent["time_s"], self.config.max_time_s),
            (spent["energy_j"], self.config.max_energy_j),
        )
        return max(self._seen, max(value / limit for value, limit in shares if limit))

    def see(self, position: Position, seen: float) -> None:
        """What all ranks go by from here on."""
        if seen != self._seen:
            self.note(position.step, seen)
        self._seen = seen

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is spent meanwhile is not training's; joules are told with a lag of a second, so to within that."""
        before = self.state()
        yield
        after = self.state()
        for name in self._earlier:
            self._earlier[name] -= after[name] - before[name]

    def state(self) -> dict[str, float]:
        """Spent over all attempts, for a checkpoint."""
        return {
            "time_s": self._earlier["time_s"] + self.clock_s() - self._began_s,
            "energy_j": self._earlier["energy_j"] + (self.energy_j() or 0.0),
            "seen": self._seen,
        }

    def load_state(self, state: dict[str, float]) -> None:
        self._earlier = {"time_s": state["time_s"], "energy_j": state["energy_j"]}
        self._seen = state["seen"]


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
