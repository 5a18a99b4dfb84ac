"""The mode `fastest`: try a few recipes on a shortened model for a second each, and run the whole one by the best.

Recipes differ in what no rule of thumb foretells: which attention kernel is quickest for 197 tokens, and, where asked
for, whether matrix kernels chosen by trial beat the library's, which takes minutes. Each must give the eager result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from joulelab.infer.recipes import RECIPES, Recipe, prepare_call, shallow
from joulelab.zoo.norms.layers import Encoder

_TRIED_LAYERS = 3
_TRY_S = 0.25
# bf16 has 8 bits: three layers of it are off by 1 to 2 %, and a wrong kernel by everything
_ALLOWED_ERROR = 0.05

ATTENTION = ("flash", "cudnn", "efficient")
TUNED: dict[str, Any] = {"max_autotune_gemm": True, "autotune_num_choices_displayed": 0}
EXTRAS: tuple[dict[str, Any], ...] = (
    {"max_autotune_pointwise": True, "coordinate_descent_tuning": True},
    {"triton.enable_persistent_tma_matmul": True},
    {"triton.enable_pdl": True},  # a kernel may start while the one before it ends
)
# below this a difference between two tries is noise
_WORTH = 0.99
CPU_RECIPES = (
    Recipe("eager"),
    Recipe("compiled", compiled=True),
    Recipe("compiled, weights packed", compiled=True, options={"freezing": True}),
)


@dataclass(frozen=True)
class Tried:
    recipe: Recipe
    seconds: float | None
    """Of the shortened model."""
    problem: str = ""
    on: str = ""
    """Which part of the model it was tried on; empty: the whole."""

    def __str__(self) -> str:
        result = f"{1000 * self.seconds:.3f} ms" if self.seconds is not None else f"not used: {self.problem}"
        return f"{self.recipe.described()}{self.on and ' on '}{self.on}: {result}"


def choose(
    model: nn.Module,
    inputs: Sequence[Any],
    dtype: str,
    device: torch.device,
    tell: Callable[[Tried], None] = lambda tried: None,
    tune: bool = False,
) -> tuple[Recipe, list[Tried]]:
    """The quickest recipe for this model and these inputs, and all that were tried; `tune`: matrix kernels too."""
    small = shallow(model, _TRIED_LAYERS) if isinstance(model, Encoder) else model
    part = tried_part(model)
    expected = _tensor(prepare_call(small, inputs, RECIPES["eager"], dtype, device)()).float()
    found: list[Tried] = []

    def attempt(recipe: Recipe) -> float:
        found.append(replace(_try(small, inputs, recipe, dtype, device, expected), on=part))
        tell(found[-1])
        return _seconds(found[-1])

    if device.type == "cuda":
        _attempt_on_gpu(attempt, tune, is_short=isinstance(model, Encoder))
    else:
        for recipe in CPU_RECIPES:
            attempt(recipe)
    return replace(min(found, key=_seconds).recipe, name="fastest"), found


def tried_part(model: nn.Module) -> str:
    """`3 of 12 layers`: its times are not those of the whole model."""
    layers = len(model.blocks) if isinstance(model, Encoder) else 0
    return f"{_TRIED_LAYERS} of {layers} layers" if layers > _TRIED_LAYERS else ""


def _seconds(tried: Tried) -> float:
    return float("inf") if tried.seconds is None else tried.seconds


def _attempt_on_gpu(attempt: Callable[[Recipe], float], tune: bool, is_short: bool) -> None:
    """First the attention, which can be judged without compiling; then the compiler's options with that attention.

    A model that cannot be shortened takes minutes to compile, and is spared the finer ones.
    """
    times = {name: attempt(Recipe("graph", graph=True, attention=name)) for name in ATTENTION}
    attention = min(times, key=times.__getitem__)
    if times[attention] == float("inf"):
        attention = ""
        attempt(Recipe("graph", graph=True))

    def compiled(options: Mapping[str, Any]) -> float:
        return attempt(Recipe("compiled, graph", compiled=True, graph=True, attention=attention, options=options))

    compiled({})
    if not tune:
        return
    tuned = compiled(TUNED)
    if not is_short:
        return
    helped = [extra for extra in EXTRAS if compiled({**TUNED, **extra}) < _WORTH * tuned]
    if len(helped) > 1:
        compiled({**TUNED, **{name: value for extra in helped for name, value in extra.items()}})


def _try(
    model: nn.Module, inputs: Sequence[Any], recipe: Recipe, dtype: str, device: torch.device, expected: Tensor
) -> Tried:
    try:
        call = prepare_call(model, inputs, recipe, dtype, device)
        error = distance(_tensor(call()), expected)
        if not error < _ALLOWED_ERROR:
            return Tried(recipe, None, f"its result is off by {100 * error:.1f} %")
        threads = torch.get_num_threads()
        timer = Timer("call()", globals={"call": call}, num_threads=threads)
        return Tried(recipe, timer.blocked_autorange(min_run_time=_TRY_S).median)
    except Exception as error:  # a kernel this card or this torch does not have is a candidate less, nothing more
        return Tried(recipe, None, (str(error) or type(error).__name__).splitlines()[0][:160])


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative to the length of the whole output, so that single numbers near 0 do not count."""
    return float((found.float() - expected).norm() / expected.norm())


def _tensor(output: Any) -> Tensor:
    """The first tensor of what a model returns."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output
    return next(_tensor(value) for value in values if isinstance(value, Tensor | tuple | list))
