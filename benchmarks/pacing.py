"""How a benchmark's loop keeps in step with the device: settled first, then as far ahead as a training loop is."""

from __future__ import annotations

import time
from typing import Any

import torch

from joulelab.train.simple_trainer import SimpleTrainer

SETTLING_S = 2.0


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def warm_up(trainer: SimpleTrainer[Any], device: torch.device) -> float:
    """Until compiling and the allocator have settled, some time after the third step. The loss of the first step."""
    trainer.step()
    first, _ = trainer._tally.take(trainer.ranks)
    for _ in range(2):
        trainer.step()
    wait(device)
    end = time.monotonic() + SETTLING_S
    while time.monotonic() < end:
        trainer.step()
        wait(device)
    trainer._tally.take(trainer.ranks)
    return first


def keep_pace(marks: list[torch.cuda.Event], device: torch.device) -> None:
    """As far ahead as a loop that logs now and then runs, and the clock still means something."""
    if device.type == "cuda":
        marks.append(torch.cuda.Event())
        marks[-1].record()
        if len(marks) > 4:
            marks.pop(0).synchronize()
