"""One model on several ranks, by torch's own means: copies that average gradients (DDP), or shards (shards.py).

Both average the ranks' gradients; the loop turns that mean of sums into the sum over the true count of all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from joulelab.errors import ConfigError
from joulelab.train.config import TrainingConfig

# The processes that train one model together, as torchrun started them; one process alone is a group of one.
#
# Once a step the ranks tell each other over the CPU (gloo) what was counted and whether to stop. It is one small
# message, sent while the device still works off its queue, and it keeps every decision of the loop the same on every
# rank.


TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def barrier(self) -> None:
        self.sum([0.0])


SINGLE_RANK = Ranks()


def started_by_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def process_group() -> Iterator[Ranks]:
    """This process's place among those torchrun started, for as long as they work together."""
    ranks = init_ranks()
    try:
        yield ranks
    finally:
        if ranks.world > 1:
            dist.destroy_process_group()


def init_ranks() -> Ranks:
    """This process's place among those torchrun started."""
    if not started_by_torchrun():
        return Ranks()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))
    if torch.cuda.is_available():
        torch.cuda.set_device(ranks.local_rank)
    return ranks


def parallel_mode(config: TrainingConfig, ranks: Ranks) -> str:
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


def wrap_ddp(model: nn.Module, device: torch.device) -> nn.Module:
    places: Any = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=places, gradient_as_bucket_view=True)


def set_gradient_sync(called: nn.Module, now: bool) -> None:
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
