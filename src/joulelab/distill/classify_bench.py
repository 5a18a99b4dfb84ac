"""What every stage of `classify` works with: the run, its settings, the device, the sets, and the count of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from joulelab.data import sources, tokenised
from joulelab.data.tokenised import TokenisedSet
from joulelab.distill.classify_config import ClassifySpec
from joulelab.distill.prepare_delivery import bill_of
from joulelab.runs.artifacts import Artifact
from joulelab.runs.bills import Bill, external
from joulelab.runs.context import RunContext, Stage


@dataclass(frozen=True)
class Bench:
    run: RunContext
    spec: ClassifySpec
    data: Artifact

    @cached_property
    def device(self) -> torch.device:
        return device_of(self.spec.device)

    @cached_property
    def classes(self) -> int:
        return int(self.set("train").labels.max()) + 1

    def set(self, split: str) -> TokenisedSet:
        return tokenised.open_set(self.data.folder / split)

    def ticks(self, stage: Stage) -> Callable[[int, int], None]:
        def tick(samples: int, tokens: int) -> None:
            stage.count(samples=samples, tokens=tokens)
            self.run.progress.advance(samples)
            self.run.stop.check()

        return tick


class Pace(nn.Module):
    """Counts the optimiser steps. A module, so that checkpoints keep the count."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def after_step(self) -> None:
        self.steps += 1


def from_elsewhere(run: RunContext, name: str, source: str, kind: str) -> Bill:
    """Something the user named: known by what it is, its joules missing, unless one of our runs has prepared it."""
    path = sources.parse(source).path
    return run.uses(name, external(source, kind, source)) if path is None else bill_of(run, name, path, kind, source)


def device_of(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
