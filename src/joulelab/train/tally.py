"""Loss and its parts since the last look, summed on the device: looking at them makes the host wait."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from joulelab.train.ranks import Ranks
from joulelab.zoo.objective import ObjectiveOutput


class Tally:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, output: ObjectiveOutput) -> None:
        for name, value in {"loss": output.loss_sum.detach(), **output.parts}.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()
        self._count += output.count

    def take(self, ranks: Ranks) -> tuple[float, dict[str, float]]:
        """Mean loss and mean parts over all ranks; begins anew."""
        names = list(self._sums)
        *sums, count = ranks.sum([*(float(self._sums[name]) for name in names), self._count])
        means = {name: value / max(1.0, count) for name, value in zip(names, sums, strict=True)}
        self._sums, self._count = {}, 0
        return means.pop("loss", math.nan), means

    def peek(self) -> float:
        return float(self._sums["loss"]) if self._sums else 0.0

    def state(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "count": self._count}

    def load_state(self, state: dict[str, Any]) -> None:
        self._sums = {name: value.to(self._device, copy=True) for name, value in state["sums"].items()}
        self._count = state["count"]
