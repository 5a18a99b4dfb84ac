"""How a training step is computed: optimizer, precision, activation checkpointing and compilation.

The optimizers are torch's own. `fp32` means IEEE fp32: torch allows tf32 in convolutions by default, so it is switched
off explicitly.
"""

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
from joulelab.train.bf16_weights import Bf16Updates
from joulelab.train.config import TrainingConfig
from joulelab.zoo.quantization import quiet_bitsandbytes


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: TrainingConfig, rounding_seed: int = 0, shard: int = 0
) -> torch.optim.Optimizer:
    """The optimizer of the trained parameters. `rounding_seed` is the same on all ranks and `shard` the number of this
    rank's part of a sharded model; both matter only to weights in bf16."""
    optimizer = _plain_optimizer(parameters, config)
    if config.weights == "fp32":
        return optimizer
    moments = torch.bfloat16 if config.moments == "bf16" else torch.float32
    return Bf16Updates(optimizer, config.rounding, rounding_seed, shard, moments)


def _plain_optimizer(parameters: Iterable[nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        # Matrices decay, biases and norm gains (one dimension) do not: decay would pull a gain to 0
        # and not to the identity. The usual split of GPT-2 and BERT trainings.
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    rate = config.learning_rate
    if config.optimizer == "adamw-8bit":
        quiet_bitsandbytes()
        import bitsandbytes

        # Blocks of 256 numbers share one scale (Dettmers et al., 2022). Tensors below 4,096 elements
        # keep 32-bit moments, which is bitsandbytes' default.
        made: torch.optim.Optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=rate, betas=config.betas, eps=config.eps)
        return made
    if config.optimizer == "adafactor":
        if any(hasattr(parameter, "full_tensor") for parameter in trained):
            from joulelab.train.sharding_fsdp import ShardedAdafactor  # torch.distributed, seconds to import

            return ShardedAdafactor(groups, lr=rate)
        return torch.optim.Adafactor(groups, lr=rate)
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            groups, lr=rate, momentum=config.betas[0], foreach=True
        )  # fused SGD does not support DTensor shards
    # Fused: one kernel for all parameters instead of several per tensor, the same arithmetic.
    return torch.optim.AdamW(groups, lr=rate, betas=config.betas, eps=config.eps, fused=True)


_AUTOCAST = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# GradScaler's default suits a mean loss. Our losses are sums, so the initial scale is divided by the number of terms.
_MEAN_LOSS_SCALE = 2.0**16


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    kind = _AUTOCAST[precision]
    return nullcontext() if kind is None else torch.autocast(device.type, dtype=kind)


@contextmanager
def float32_matmul_precision(precision: str) -> Iterator[None]:
    """Allow or forbid tf32 in fp32 matrix products and convolutions inside the block."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    tf32 = precision != "fp32"
    # "high" lets tensor cores round fp32 inputs to tf32 (10 bits of mantissa); sums stay in fp32.
    # With bf16 autocast the remaining fp32 products gain speed and lose less than bf16 does
    # elsewhere.
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def make_scaler(precision: str, device: torch.device, count: int) -> torch.amp.GradScaler:
    """Scales the loss so that fp16 gradients do not underflow; disabled for the other precisions."""
    # A power of 2, so that scaling changes no mantissa bits.
    scale = _MEAN_LOSS_SCALE / 2 ** max(0, count.bit_length() - 1)
    return torch.amp.GradScaler(device.type, init_scale=scale, enabled=precision == "fp16")


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers or stages of a model: the members of every outermost list of modules of one type."""
    return list(_find_blocks(model))


def _find_blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        members = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        if len(members) > 1 and len({type(member) for member in members}) == 1 and any(members[0].children()):
            yield from members
        else:
            yield from _find_blocks(child)


def checkpoint_activations(model: nn.Module) -> int:
    """Make every block recompute its activations in the backward pass; returns the number of blocks.

    The forward method is wrapped, not the module, so parameter names do not change.
    """
    blocks = [block for block in repeated_blocks(model) if any(p.requires_grad for p in block.parameters())]
    for block in blocks:
        # The non-reentrant variant works with frozen inputs, keyword arguments and torch.compile;
        # the reentrant one silently drops gradients of blocks whose inputs need none.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return len(blocks)


OFF, DEFAULT, BLOCKS = "off", "default", "blocks"
# All blocks share the code object of nn.Module's call, and each type, shape and mode of a block is one recompilation.
_RECOMPILE_LIMIT = 64


def torch_compile_mode(setting: str) -> str | None:
    """The `mode` argument of torch.compile."""
    return None if setting == DEFAULT else setting


def compile_in_place(model: nn.Module, setting: str) -> None:
    """Compile the calls of a module; its type and parameter names do not change."""
    if setting == OFF:
        return
    _use_stdlib_distutils()
    if setting != BLOCKS:
        model.compile(mode=torch_compile_mode(setting))
        return
    blocks = repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            f"compile=blocks: {type(model).__name__} has no list of identical layers", "use compile=default"
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

    Each runs inside `paused()`, so that a training budget does not count it. Compilations happen when a graph or shape
    is first seen: mostly in the first step, and in later steps with a new shape. torch reports nested compilations as
    one.
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
    """torch's compiler imports setuptools, which before Python 3.12 replaces distutils with its own copy and fails if
    distutils was already imported."""
    if sys.version_info < (3, 12):
        os.environ.setdefault("SETUPTOOLS_USE_DISTUTILS", "stdlib")
