"""What the setting `compile` does to a model: torch.compile over all of it, or over each of its repeated blocks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from joulelab import clock
from joulelab.errors import ConfigError
from joulelab.train.blocks import repeated_blocks

OFF, DEFAULT, BLOCKS = "off", "default", "blocks"
# all blocks share the code of nn.Module's call; every kind, shape and mode of one is a variant of it
_VARIANTS = 64


def mode_of(setting: str) -> str | None:
    """torch.compile's own name for it."""
    return None if setting == DEFAULT else setting


def compile_in_place(model: nn.Module, setting: str) -> None:
    """The module stays what it is, by name and by type; only its calls are compiled."""
    if setting == OFF:
        return
    _let_setuptools_in()
    if setting != BLOCKS:
        model.compile(mode=mode_of(setting))
        return
    blocks = repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            f"compile 'blocks': {type(model).__name__} has no list of equal layers", "use compile 'default'"
        )
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VARIANTS)
    for block in blocks:
        block.compile()


@contextmanager
def compilation_marks(
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
    _let_setuptools_in()
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


def _let_setuptools_in() -> None:
    """torch's compiler imports setuptools, which before Python 3.12 swaps distutils for its own
    and fails where that was imported already. The compiler needs neither."""
    if sys.version_info < (3, 12):
        os.environ.setdefault("SETUPTOOLS_USE_DISTUTILS", "stdlib")
