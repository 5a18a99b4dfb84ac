"""The teacher behind one call: from its cache, or live in the same step. The student learns the same from both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from joulelab.distill.classify_view import Look, View
from joulelab.train.optim import compile_in_place


class Teacher(Protocol):
    def answer(self, batch: Any, features: bool) -> View:
        """What it says about a batch, without gradients."""


@dataclass(frozen=True)
class LiveTeacher:
    """Runs at every step: no cache to make or to keep, and it may see what was drawn anew; paid for in every epoch."""

    model: nn.Module
    look: Look

    def answer(self, batch: Any, features: bool) -> View:
        with torch.no_grad():
            return self.look(self.model, batch, features)


def made_ready(model: nn.Module, device: torch.device, precision: str, compiled: str = "off") -> nn.Module:
    """As a teacher runs, live or into a cache: no dropout, no gradients, and weights already in bf16 where that is the
    precision, since casting them again in every step costs more than it keeps."""
    model.eval().requires_grad_(False).to(device)
    if precision == "bf16":
        model.to(torch.bfloat16)
    compile_in_place(model, compiled)
    return model
