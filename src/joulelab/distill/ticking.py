"""How a pass over data tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

from joulelab.runs.context import RunContext, Stage


def ticks(run: RunContext, stage: Stage) -> Callable[[int, int], None]:
    """To be called with the samples and tokens of this pass so far; what other passes of the stage counted stays."""
    before = {"samples": 0, "tokens": 0, **stage.counts}

    def tick(samples: int, tokens: int) -> None:
        stage.count(samples=before["samples"] + samples, tokens=before["tokens"] + tokens)
        run.progress.advance(samples)
        run.stop.check()

    return tick
