"""A model in shards (FSDP2). Apart from parallel.py because torch takes seconds to import what only shards need."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

from joulelab.train.blocks import repeated_blocks


def shard(modules: Iterable[nn.Module]) -> None:
    """In place, before the optimiser is made: what it holds is then sharded too."""
    for module in modules:
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()  # channels-last weights cannot be cut into shards
        for block in repeated_blocks(module):
            fully_shard(block)
        # what is never trained sees no backward pass, which is where a root gives back what it gathered
        trained = any(parameter.requires_grad for parameter in module.parameters())
        fully_shard(module, reshard_after_forward=None if trained else True)


def whole_weights(model: nn.Module) -> dict[str, Tensor] | None:
    """Of a model in shards, gathered on the CPU of the first rank; None for a model that has all of itself."""
    if not isinstance(model, FSDPModule):
        return None
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}
