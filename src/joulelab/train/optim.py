"""The optimisers by name, from torch itself; biases and norms are left out of weight decay."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from joulelab import clock
from joulelab.errors import ConfigError
from joulelab.train.config import TrainingConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    rate = config.learning_rate
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=rate)
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=rate, momentum=config.betas[0], foreach=True)  # fused has no shards
    return torch.optim.AdamW(groups, lr=rate, betas=config.betas, eps=config.eps, fused=True)


# In which numbers a step is computed: autocast, loss scaling, and what fp32 means to the matrix units.
#
# `fp32` here is fp32: torch lets convolutions use tf32 unless told otherwise, so it is told.


_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Losses are sums, not means: the scale that keeps a mean's gradients inside fp16 is smaller by the count of terms.
_MEAN_LOSS_SCALE = 2.0**16


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    kind = _AUTOCAST.get(precision)
    return nullcontext() if kind is None else torch.autocast(device.type, dtype=kind)


@contextmanager
def float32_matmul_precision(precision: str) -> Iterator[None]:
    """tf32 for fp32 matrix products and convolutions, or not; as it was afterwards."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    tf32 = precision != "fp32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def make_scaler(precision: str, device: torch.device, count: int) -> torch.amp.GradScaler:
    """Scales the loss so that fp16 gradients do not vanish; passes everything through for the other precisions."""
    scale = _MEAN_LOSS_SCALE / 2 ** max(0, count.bit_length() - 1)
    return torch.amp.GradScaler(device.type, init_scale=scale, enabled=precision == "fp16")


# The repeated blocks of a model (its layers or stages): what activation checkpointing and sharding work on.


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of every list of equal modules, the outermost lists only."""
    return list(_find_blocks(model))


def _find_blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        members = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        if len(members) > 1 and len({type(member) for member in members}) == 1 and any(members[0].children()):
            yield from members
        else:
            yield from _find_blocks(child)


def checkpoint_activations(model: nn.Module) -> int:
    """Make every block forget its activations and recompute them in the backward pass; how many blocks that were.

    The forward method is wrapped, not the module: names of parameters stay what they are.
    """
    blocks = [block for block in repeated_blocks(model) if any(p.requires_grad for p in block.parameters())]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)


# What the setting `compile` does to a model: torch.compile over all of it, or over each of its repeated blocks.


OFF, DEFAULT, BLOCKS = "off", "default", "blocks"
# all blocks share the code of nn.Module's call; every kind, shape and mode of one is a variant of it
_RECOMPILE_LIMIT = 64


def torch_compile_mode(setting: str) -> str | None:
    """torch.compile's own name for it."""
    return None if setting == DEFAULT else setting


def compile_in_place(model: nn.Module, setting: str) -> None:
    """The module stays what it is, by name and by type; only its calls are compiled."""
    if setting == OFF:
        return
    _use_stdlib_distutils()
    if setting != BLOCKS:
        model.compile(mode=torch_compile_mode(setting))
        return
    blocks = repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            f"compile 'blocks': {type(model).__name__} has no list of equal layers", "use compile 'default'"
        )
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _RECOMPILE_LIMIT)
    for block in blocks:
        block.compile()


@contextmanager
def track_compilations(
    setting: str,
    note: Callable[[str, int, int], None],
    paused: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[None]:
    """Report the time of every compilation, autotuning and CUDA-graph capture as `note("compile", begin_ns, end_ns)`.

    Each of them runs inside `paused()`: a budget of training does not count it.

    They come when a graph or shape is first met: mostly in the first step, and in any later one with a new shape.
    torch counts nested ones itself and reports the outermost begin and end.
    """
    if setting == OFF:
        yield
        return
    _use_stdlib_distutils()
    from torch._dynamo.callback import callback_handler  # imports the compiler, which takes seconds

    begin_ns = 0
    pause = ExitStack()

    def start(*_: object) -> None:
        nonlocal begin_ns
        begin_ns = clock.now().mono_ns
        pause.enter_context(paused())

    def end(*_: object) -> None:
        pause.close()
        note("compile", begin_ns, clock.now().mono_ns)

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)


def _use_stdlib_distutils() -> None:
    """torch's compiler imports setuptools, which before Python 3.12 swaps distutils for its own
    and fails where that was imported already. The compiler needs neither."""
    if sys.version_info < (3, 12):
        os.environ.setdefault("SETUPTOOLS_USE_DISTUTILS", "stdlib")
