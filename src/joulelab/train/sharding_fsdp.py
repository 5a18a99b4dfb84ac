"""A model in shards (FSDP2). Apart from parallel.py because torch takes seconds to import what only shards need."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard

from joulelab.train.budget import Position
from joulelab.train.checkpoint import KEEP, LoopState, ModelState
from joulelab.train.optim import repeated_blocks
from joulelab.train.parallel import Ranks


def shard_modules(modules: Iterable[nn.Module]) -> None:
    """In place, before the optimiser is made: what it holds is then sharded too."""
    for module in modules:
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()  # channels-last weights cannot be cut into shards
        for block in repeated_blocks(module):
            fully_shard(block)
        # what is never trained sees no backward pass, which is where a root gives back what it gathered
        trained = any(parameter.requires_grad for parameter in module.parameters())
        fully_shard(module, reshard_after_forward=None if trained else True)


def gather_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """Of a model in shards, gathered on the CPU of the first rank; None for a model that has all of itself."""
    if not isinstance(model, FSDPModule):
        return None
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


# Checkpoints of several ranks, by torch's distributed checkpoint: each rank writes its part, any number can read
# them.
#
# A folder is complete when torch has written its `.metadata`, which it does last. What belongs to one rank alone (its
# random state) lies beside it, in a file per rank.


_COMPLETE = ".metadata"
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class ShardedCheckpoints:
    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder = folder
        self._ranks = ranks
        # the writer's messages run beside the loop's and must not meet them
        self._group = dist.new_group(backend="gloo")
        self._writing: Any = None

    def save(self, position: Position, heavy: ModelState, light: LoopState, wait: bool) -> None:
        self.finish()
        folder = self.folder / f"step-{position.step:09d}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"position": asdict(position), "light": light}, self._own_file(folder))
        self._ranks.barrier()
        state = _state_dicts(heavy)
        self._writing = dcp.async_save(state, checkpoint_id=folder, process_group=self._group)  # type: ignore[attr-defined]
        if wait:
            self.finish()

    def load(self, heavy: ModelState) -> tuple[Position, LoopState] | None:
        folders = self._complete()
        if not folders:
            return None
        state = _state_dicts(heavy)
        dcp.load(state, checkpoint_id=folders[-1], process_group=self._group)  # type: ignore[attr-defined]
        set_state_dict(
            heavy.trained,
            heavy.optimizer,
            model_state_dict=state["trained"],
            optim_state_dict=state["optimizer"],
            options=_OPTIONS,
        )
        own = self._own_file(folders[-1])
        # a rank that the earlier attempt did not have goes on with the first one's light state
        content = torch.load(own if own.exists() else folders[-1] / "rank-00000.pt", weights_only=True)
        return Position(**content["position"]), content["light"]

    def finish(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            getattr(writing, "upload_completion", writing).result()
            self._ranks.barrier()
            if self._ranks.is_first:
                for old in self._complete()[:-KEEP]:
                    shutil.rmtree(old)

    def clear(self) -> None:
        self.finish()
        self._ranks.barrier()
        if self._ranks.is_first and self.folder.is_dir():
            shutil.rmtree(self.folder)

    def _own_file(self, folder: Path) -> Path:
        return folder / f"rank-{self._ranks.rank:05d}.pt"

    def _complete(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob(f"step-*/{_COMPLETE}"))


def _state_dicts(heavy: ModelState) -> dict[str, Any]:
    model, optimizer = get_state_dict(heavy.trained, heavy.optimizer, options=_OPTIONS)
    return {"trained": model, "optimizer": optimizer}
