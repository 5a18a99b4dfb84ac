"""How a forward pass is run: eagerly, compiled, from a CUDA graph, or by the quickest of several such recipes.

At batch 1 a GPU waits for the host: an eager encoder of 12 layers spends milliseconds on launching 150 kernels that
take microseconds. A CUDA graph launches all of them at once. What remains is the number of kernels and how well each
fills the card, which is what compiling and trying several matrix kernels changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from joulelab.infer.capture import captured
from joulelab.infer.precisions import autocast_of

Call = Callable[[], Any]
_WARM_UP_CALLS = 3
# one process may measure dozens of models, dtypes and shapes that share their code
_VARIANTS = 512
_ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Recipe:
    name: str
    compiled: bool = False
    compile_mode: str | None = None
    """One of torch.compile's own modes."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of its compiler, in place of a mode."""
    graph: bool = False
    """Whether the kernels of a call are captured once and launched together from then on."""
    attention: str = ""
    """Which attention kernel; empty: torch's choice."""

    def described(self) -> str:
        parts = ["compiled" if self.compiled else "eager kernels"]
        parts += [self.compile_mode] if self.compile_mode else []
        parts += [f"{name}={value}" for name, value in self.options.items()]
        parts += [f"{self.attention} attention"] if self.attention else []
        parts += ["one CUDA graph"] if self.graph else []
        return ", ".join(parts)


RECIPES: dict[str, Recipe] = {
    "eager": Recipe("eager"),
    "compiled": Recipe("compiled", compiled=True),
    "cuda-graph": Recipe("cuda-graph", graph=True),
    "reduce-overhead": Recipe("reduce-overhead", compiled=True, compile_mode="reduce-overhead"),
}


def prepare_call(model: nn.Module, inputs: Sequence[Any], recipe: Recipe, dtype: str, device: torch.device) -> Call:
    """A call that does one whole inference; when it returns, compiling, capturing and tuning are over.

    To be used inside `precisions.inference`, as the call it returns.
    """

    def eager(*arguments: Any) -> Any:
        with autocast_of(dtype, device):
            return model(*arguments)

    run = _compiled(model, eager, recipe, dtype) if recipe.compiled else eager
    with _attention(recipe.attention):
        if recipe.graph:
            return Graphed(run, inputs)
        for _ in range(_WARM_UP_CALLS):
            run(*inputs)
    if not recipe.attention:
        return lambda: run(*inputs)

    def call() -> Any:
        with _attention(recipe.attention):
            return run(*inputs)

    return call


def _compiled(model: nn.Module, eager: Callable[..., Any], recipe: Recipe, dtype: str) -> Callable[..., Any]:
    config: Any = torch._dynamo.config
    config.recompile_limit = config.accumulated_recompile_limit = _VARIANTS
    options = None if recipe.compile_mode else {"triton.cudagraphs": False, **recipe.options}
    # without autocast the model itself is compiled, so that nothing of ours stands between two calls
    target: Any = eager if dtype.startswith("autocast-") else model
    run: Any = torch.compile(target, mode=recipe.compile_mode, options=options, dynamic=False)
    return run  # type: ignore[no-any-return]


def _attention(name: str) -> AbstractContextManager[None]:
    return sdpa_kernel(_ATTENTION[name]) if name else nullcontext()


class Graphed:
    """A forward pass captured as one CUDA graph; each call copies the inputs into its buffers and launches it."""

    def __init__(self, run: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self._inputs = [value for value in inputs if isinstance(value, torch.Tensor)]
        self._buffers = [value.clone() for value in self._inputs]
        buffers = iter(self._buffers)
        arguments = [next(buffers) if isinstance(value, torch.Tensor) else value for value in inputs]
        self._replay = captured(lambda: run(*arguments))

    def __call__(self) -> Any:
        for buffer, value in zip(self._buffers, self._inputs, strict=True):
            buffer.copy_(value)
        return self._replay()


def shallow(model: nn.Module, layers: int) -> nn.Module:
    """A copy with fewer blocks, on which a recipe can be tried in seconds; and without a head, behind which two classes
    are two numbers, too few to tell rounding from a wrong kernel."""
    made = copy.deepcopy(model)
    made.blocks = made.blocks[:layers]  # type: ignore[index]
    made.head = nn.Identity()
    return made
