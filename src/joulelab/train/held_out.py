"""The loss on held-out batches: the training's own objective, without gradients and without a trace in the training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from joulelab.train.precision import autocast
from joulelab.zoo.workload import Workload

Tick = Callable[[Any], None]


@torch.no_grad()
def held_out_loss(workload: Workload, batches: int, device: torch.device, precision: str, tick: Tick) -> float:
    """Mean over the first `batches` held-out batches; `tick` sees each of them."""
    source = workload.validation
    assert source is not None
    loss_sum, count = torch.zeros((), device=device), 0
    with _as_it_was(workload, device), autocast(precision, device):
        for index in range(min(batches, source.batches_per_epoch)):
            batch = source.at(0, index).to(device)
            output = workload.objective(workload.model, batch, lambda name: nullcontext())
            loss_sum, count = loss_sum + output.loss_sum.float(), count + output.count
            tick(batch)
    return float(loss_sum) / max(1, count)


def _as_it_was(workload: Workload, device: torch.device) -> ExitStack:
    """Dropout off, and afterwards modes and random numbers as before: looking must not change what is trained."""
    stack = ExitStack()
    stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
    for module in (workload.model, *workload.objective.modules().values()):
        stack.callback(module.train, module.training)
        module.eval()
    return stack
