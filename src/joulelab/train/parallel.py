"""One model on several ranks started by torchrun: replicas (DDP) or shards (FSDP, in sharding_fsdp.py).

Both average gradients over ranks; the trainer rescales that to the mean over the terms of all ranks.

Once per step the ranks exchange counts and stop requests over gloo, on the CPU. It is one small message, sent while the
device still works through its queue, and it keeps every decision of the loop the same on all ranks. A single process is
a group of one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from joulelab.runs.execute import host_count, started_by_torchrun
from joulelab.train.config import TrainingConfig

TIMEOUT = timedelta(minutes=10)
_POLL_S = 1.0
T = TypeVar("T")


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
        # float64 holds integers exactly up to 2^53: token counts of any training, which float32
        # would round above 16.7 million.
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return [float(value) for value in tensor]

    def barrier(self) -> None:
        self.sum([0.0])

    def of_first(self, values: Iterable[float]) -> list[float]:
        """The first rank's values, on all ranks."""
        return self.sum([value if self.is_first else 0.0 for value in values])

    def on_first(self, work: Callable[[], T]) -> T | None:
        """Work of the first rank alone, for which the others wait; they get None. A single operation of all ranks would
        time out after minutes, and writing a large model takes longer on a slow file system."""
        if self.world == 1:
            return work()
        with ThreadPoolExecutor(1, thread_name_prefix="joulelab-first-rank") as pool:
            working, has_ended = pool.submit(work) if self.is_first else None, False
            while not has_ended:
                if working is not None:
                    wait([working], timeout=_POLL_S)
                has_ended = self.sum([float(working is not None and working.done())])[0] > 0
            return None if working is None else working.result()


SINGLE_RANK = Ranks()


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP has sharded; any other tensor as it is."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


@contextmanager
def process_group() -> Iterator[Ranks]:
    """The ranks that torchrun started, inside a process group that is destroyed at the end of the block."""
    ranks = init_ranks()
    try:
        yield ranks
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def init_ranks() -> Ranks:
    """Initialize the process group if torchrun started several ranks."""
    if not started_by_torchrun():
        return Ranks()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        # gloo for the counts, so that exchanging them neither launches a kernel nor waits for the
        # device; nccl for gradients.
        dist.init_process_group(backend, timeout=TIMEOUT)
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))
    if torch.cuda.is_available():
        torch.cuda.set_device(ranks.local_rank)
    return ranks


def has_process_group() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, without gradients; all ranks must call it. Other tensors are returned as they
    are."""
    full: Any = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full().detach()


def parallel_mode(config: TrainingConfig, ranks: Ranks) -> str:
    config.require_ranks(ranks.world > 1 or has_process_group(), ranks.world, host_count())
    return "ddp" if config.parallel == "auto" and ranks.world > 1 else config.parallel


def wrap_ddp(model: nn.Module, device: torch.device) -> nn.Module:
    device_ids: Any = [device] if device.type == "cuda" else None
    # Gradients are views into DDP's communication buckets: no copy, and one gradient's memory less.
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


def set_gradient_sync(called: nn.Module, now: bool) -> None:
    """Synchronize gradients only for the last micro-batch of a step; call before its forward pass."""
    if isinstance(called, DistributedDataParallel):
        # DDP reads this flag in the forward pass, where it decides whether the next backward pass
        # communicates.
        called.require_backward_grad_sync = now
    elif hasattr(called, "set_requires_gradient_sync"):  # FSDP, whose class takes seconds to import
        called.set_requires_gradient_sync(now)  # type: ignore[operator]


def average_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """For modules outside the wrapped model, such as a connector. They are small, so each tensor is one message."""
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            # Averaged like DDP's gradients, so that the trainer's factor world / count is right for
            # all parameters.
            parameter.grad /= ranks.world
