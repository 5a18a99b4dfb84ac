"""Sharded models (FSDP2) and their checkpoints. A separate module because its torch imports take seconds.

Checkpoints use torch.distributed.checkpoint: each rank writes its shards, and any number of ranks can read them. A
folder is complete when torch has written `.metadata`, which it does last. State that belongs to one rank, such as its
random state, is stored next to it in one file per rank.
"""

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
    """Shard in place. Call before the optimizer is created, so that its state is sharded too."""
    for module in modules:
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()  # FSDP cannot shard channels-last weights
        for block in repeated_blocks(module):
            fully_shard(block)
        # FSDP reshards the root module in the backward pass, which a frozen module never has.
        trained = any(parameter.requires_grad for parameter in module.parameters())
        fully_shard(module, reshard_after_forward=None if trained else True)


def gather_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """Full weights of a sharded model, gathered on the CPU of the first rank; None for a model that is not sharded."""
    if not isinstance(model, FSDPModule):
        return None
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


_COMPLETE = ".metadata"
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class ShardedCheckpoints:
    """Checkpoints of several ranks: one folder each."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder = folder
        self._ranks = ranks
        # The writer thread communicates while the loop does; a separate group keeps their messages apart.
        self._group = dist.new_group(backend="gloo")
        self._writing: Any = None

    def save(self, position: Position, model_state: ModelState, loop_state: LoopState, wait: bool) -> None:
        self.finish()
        folder = self.folder / f"step-{position.step:09d}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"position": asdict(position), "light": loop_state}, self._rank_file(folder))
        self._ranks.barrier()
        state = _state_dicts(model_state)
        self._writing = dcp.async_save(state, checkpoint_id=folder, process_group=self._group)  # type: ignore[attr-defined]
        if wait:
            self.finish()

    def load(self, model_state: ModelState) -> tuple[Position, LoopState] | None:
        folders = self._complete_folders()
        if not folders:
            return None
        state = _state_dicts(model_state)
        dcp.load(state, checkpoint_id=folders[-1], process_group=self._group)  # type: ignore[attr-defined]
        set_state_dict(
            model_state.trained,
            model_state.optimizer,
            model_state_dict=state["trained"],
            optim_state_dict=state["optimizer"],
            options=_OPTIONS,
        )
        own = self._rank_file(folders[-1])
        # A rank that the earlier attempt did not have starts from the first rank's state.
        content = torch.load(own if own.exists() else folders[-1] / "rank-00000.pt", weights_only=True)
        return Position(**content["position"]), content["light"]

    def finish(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            getattr(writing, "upload_completion", writing).result()
            self._ranks.barrier()
            if self._ranks.is_first:
                for old in self._complete_folders()[:-KEEP]:
                    shutil.rmtree(old)

    def clear(self) -> None:
        self.finish()
        self._ranks.barrier()
        if self._ranks.is_first and self.folder.is_dir():
            shutil.rmtree(self.folder)

    def _rank_file(self, folder: Path) -> Path:
        return folder / f"rank-{self._ranks.rank:05d}.pt"

    def _complete_folders(self) -> list[Path]:
        return sorted(path.parent for path in self.folder.glob(f"step-*/{_COMPLETE}"))


def _state_dicts(model_state: ModelState) -> dict[str, Any]:
    model, optimizer = get_state_dict(model_state.trained, model_state.optimizer, options=_OPTIONS)
    return {"trained": model, "optimizer": optimizer}
