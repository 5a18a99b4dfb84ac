"""What every stage of `classify` works with: the run, its settings, the device and the sets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from joulelab.data import sources, tokenised
from joulelab.data.tokenised import TokenisedSet
from joulelab.distill.classify_config import ClassifySpec
from joulelab.distill.prepare_delivery import bill_of
from joulelab.runs.artifacts import Artifact
from joulelab.runs.bills import Bill, external
from joulelab.runs.context import RunContext
from joulelab.train.devices import device_of
from joulelab.zoo.pretrained import import_transformers


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


def import_models() -> None:
    """Before a stage loads the first model: importing what all models need takes longer than loading a small one, and
    would stand on the bill of the teacher, whom only the first of its students has to ask."""
    _ = import_transformers().PreTrainedModel


def from_elsewhere(run: RunContext, name: str, source: str, kind: str) -> Bill:
    """Something the user named: known by what it is, its joules missing, unless one of our runs has prepared it."""
    path = sources.parse(source).path
    return run.uses(name, external(source, kind, source)) if path is None else bill_of(run, name, path, kind, source)
