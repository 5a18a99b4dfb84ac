"""The repeated blocks of a model (its layers or stages): what activation checkpointing and sharding work on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of every list of equal modules, the outermost lists only."""
    return list(_walk(model))


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        members = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        if len(members) > 1 and len({type(member) for member in members}) == 1 and any(members[0].children()):
            yield from members
        else:
            yield from _walk(child)


def checkpoint_activations(model: nn.Module) -> int:
    """Make every block forget its activations and recompute them in the backward pass; how many blocks that were.

    The forward method is wrapped, not the module: names of parameters stay what they are.
    """
    blocks = [block for block in repeated_blocks(model) if any(p.requires_grad for p in block.parameters())]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)
