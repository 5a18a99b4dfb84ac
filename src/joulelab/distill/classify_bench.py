"""What every stage of `classify` works with: the run, its settings, the device and the sets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from joulelab.data import labeled_text
from joulelab.data.labeled_text import TokenizedSet
from joulelab.distill.classify_config import ClassifySpec
from joulelab.runs.artifacts import Artifact
from joulelab.runs.context import RunContext
from joulelab.train.devices import device_of


@dataclass(frozen=True)
class Bench:
    run: RunContext
    spec: ClassifySpec
    data: Artifact

    @cached_property
    def device(self) -> torch.device:
        return device_of(self.spec.device, self.run)

    @cached_property
    def classes(self) -> int:
        return int(self.set("train").labels.max()) + 1

    def set(self, split: str) -> TokenizedSet:
        return labeled_text.open_set(self.data.folder / split)
