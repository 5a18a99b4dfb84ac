"""A budget in joules needs somebody who tells joules: asked before anything is spent, and again by the loop."""

from __future__ import annotations

import time

from joulelab.errors import ConfigError
from joulelab.meter.monitor.tally import LiveEnergy
from joulelab.runs.context import RunContext
from joulelab.train.config import TrainingConfig

_PATIENCE_S = 3.0
"""A recorder that has just been started needs a moment for its first reading."""


def require_joules(run: RunContext, *trainings: TrainingConfig | None, energy_j: float | None = None) -> None:
    """That the joule budgets of these trainings, or one of `energy_j` for each of them, can be kept here.

    The stages before a training may take hours, and all of them are in vain where its budget cannot be kept.
    """
    for config in trainings:
        if config is not None and (energy_j is not None or config.max_energy_j is not None):
            joules_so_far(run, run.meter.live(), config)


def joules_so_far(run: RunContext, live: LiveEnergy, config: TrainingConfig) -> float:
    """What the sensors that count towards a budget have told; where there are none, the run ends here."""
    patience_s = max(_PATIENCE_S, 2 * run.spec.energy.sample_interval_s)
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
