"""One model on several ranks, by torch's own means: copies that average gradients (DDP), or shards (shards.py).

Both average the ranks' gradients; the loop turns that mean of sums into the sum over the true count of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from joulelab.errors import ConfigError
from joulelab.train.config import TrainingConfig
from joulelab.train.ranks import Ranks


def kind_of(config: TrainingConfig, ranks: Ranks) -> str:
    if config.parallel in ("ddp", "fsdp") and ranks.world == 1:
        raise ConfigError(
            f"parallel={config.parallel} needs several ranks and there is one",
            "start with torchrun --nproc-per-node N, or leave `parallel` at auto",
        )
    if config.parallel == "fsdp" and config.precision == "fp16":
        raise ConfigError("fp16's loss scaling is not supported on shards", "use precision=bf16 with parallel=fsdp")
    if config.parallel == "none" and ranks.world > 1:
        raise ConfigError(
            f"parallel=none with {ranks.world} ranks would train {ranks.world} models apart",
            "leave `parallel` at auto, or start one process",
        )
    return "ddp" if config.parallel == "auto" and ranks.world > 1 else config.parallel


def copy_on_ranks(model: nn.Module, device: torch.device) -> nn.Module:
    places: Any = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=places, gradient_as_bucket_view=True)


def share_gradients(called: nn.Module, now: bool) -> None:
    """Gradients travel with the last micro-batch of a step only; set before its forward pass."""
    if isinstance(called, DistributedDataParallel):
        called.require_backward_grad_sync = now
    elif hasattr(called, "set_requires_gradient_sync"):  # shards; their module takes seconds to import
        called.set_requires_gradient_sync(now)  # type: ignore[operator]


def average_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """For modules that train beside the wrapped model (a connector): small, so one message each."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks.world
