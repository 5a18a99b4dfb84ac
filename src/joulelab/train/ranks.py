"""The processes that train one model together, as torchrun started them; one process alone is a group of one.

Once a step the ranks tell each other over the CPU (gloo) what was counted and whether to stop. It is one small message,
sent while the device still works off its queue, and it keeps every decision of the loop the same on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

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


ALONE = Ranks()


def started_by_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined() -> Iterator[Ranks]:
    """This process's place among those torchrun started, for as long as they work together."""
    ranks = join()
    try:
        yield ranks
    finally:
        if ranks.world > 1:
            dist.destroy_process_group()


def join() -> Ranks:
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
