"""How a forward pass is run: eagerly, compiled, from a CUDA graph, or by the quickest of several such recipes.

At batch 1 a GPU waits for the host: an eager encoder of 12 layers spends milliseconds on launching 150 kernels that
take microseconds. A CUDA graph launches all of them at once. What remains is the number of kernels and how well each
fills the card, which is what compiling and trying several matrix kernels changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

from joulelab.train.optim import float32_matmul_precision
from joulelab.zoo.norms.encoders import Encoder

# Kernels that are launched together: what a call does on the GPU, recorded once and replayed from then on.


_WARM_UP_CALLS = 3


def capture_cuda_graph(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run` as one CUDA graph, whose output every replay writes over.

    It is called a few times before; what it changes, the caller sets back. All it reads must stay where it is: the
    graph knows addresses alone, so it holds on to `run` and to what that keeps.
    """
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # libraries make their plans here, which capturing would not allow
        for _ in range(_WARM_UP_CALLS):
            run()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()

    def replay(_kept: Callable[[], Any] = run) -> Any:
        graph.replay()
        return output

    return replay


# In which numbers an inference is computed.
#
# `autocast-*` keeps fp32 weights and casts them in every call, as `with torch.autocast(...)` around a call does;
# `bf16` and `fp16` are weights and inputs that were cast once. `fp32` is fp32: no tf32 in matrix products.


_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def cast_model(model: nn.Module, dtype: str) -> nn.Module:
    return model.to(_TORCH_DTYPES[dtype]) if dtype in _TORCH_DTYPES else model


def cast_inputs(inputs: Sequence[Any], dtype: str) -> tuple[Any, ...]:
    """Numbers are cast, indices and anything else stay."""

    def cast(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(_TORCH_DTYPES[dtype]) if floats and dtype in _TORCH_DTYPES else value

    return tuple(cast(value) for value in inputs)


def autocast_context(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """To be entered in every call: outside of it torch would keep the casted weights from call to call."""
    kind = _TORCH_DTYPES.get(dtype.removeprefix("autocast-")) if dtype.startswith("autocast-") else None
    return nullcontext() if kind is None else torch.autocast(device.type, dtype=kind)


@contextmanager
def inference_context(dtype: str) -> Iterator[None]:
    """Around everything of one measurement: no gradients, and tf32 only where it was asked for.

    Products in bf16 and fp16 are not touched by the switch for fp32.
    """
    with float32_matmul_precision("fp32" if dtype == "fp32" else "tf32"), torch.inference_mode():
        yield


def peak_precision(dtype: str) -> str:
    """The row of the data sheet whose peak applies."""
    return dtype.removeprefix("autocast-")


Call = Callable[[], Any]
# one process may measure dozens of models, dtypes and shapes that share their code
_RECOMPILE_LIMIT = 512
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
        with autocast_context(dtype, device):
            return model(*arguments)

    run = _compile(model, eager, recipe, dtype) if recipe.compiled else eager
    with _attention_backend(recipe.attention):
        if recipe.graph:
            return CudaGraphCall(run, inputs)
        for _ in range(_WARM_UP_CALLS):
            run(*inputs)
    if not recipe.attention:
        return lambda: run(*inputs)

    def call() -> Any:
        with _attention_backend(recipe.attention):
            return run(*inputs)

    return call


def _compile(model: nn.Module, eager: Callable[..., Any], recipe: Recipe, dtype: str) -> Callable[..., Any]:
    config: Any = torch._dynamo.config
    config.recompile_limit = config.accumulated_recompile_limit = _RECOMPILE_LIMIT
    options = None if recipe.compile_mode else {"triton.cudagraphs": False, **recipe.options}
    # without autocast the model itself is compiled, so that nothing of ours stands between two calls
    target: Any = eager if dtype.startswith("autocast-") else model
    run: Any = torch.compile(target, mode=recipe.compile_mode, options=options, dynamic=False)
    return run  # type: ignore[no-any-return]


def _attention_backend(name: str) -> AbstractContextManager[None]:
    return sdpa_kernel(_ATTENTION[name]) if name else nullcontext()


class CudaGraphCall:
    """A forward pass captured as one CUDA graph; each call copies the inputs into its buffers and launches it."""

    def __init__(self, run: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self._inputs = [value for value in inputs if isinstance(value, torch.Tensor)]
        self._buffers = [value.clone() for value in self._inputs]
        buffers = iter(self._buffers)
        arguments = [next(buffers) if isinstance(value, torch.Tensor) else value for value in inputs]
        self._replay = capture_cuda_graph(lambda: run(*arguments))

    def __call__(self) -> Any:
        for buffer, value in zip(self._buffers, self._inputs, strict=True):
            buffer.copy_(value)
        return self._replay()


def truncate_layers(model: nn.Module, layers: int) -> nn.Module:
    """A copy with fewer blocks, on which a recipe can be tried in seconds; and without a head, behind which two classes
    are two numbers, too few to tell rounding from a wrong kernel."""
    made = copy.deepcopy(model)
    made.blocks = made.blocks[:layers]  # type: ignore[index]
    made.head = nn.Identity()
    return made


# The mode `fastest`: try a few recipes on a shortened model for a second each, and run the whole one by the best.
#
# Recipes differ in what no rule of thumb foretells: which attention kernel is quickest for 197 tokens, and, where
# asked for, whether matrix kernels chosen by trial beat the library's, which takes minutes. Each must give the eager
# result.


_TRIAL_LAYERS = 3
_TRIAL_S = 0.25
# bf16 has 8 bits: three layers of it are off by 1 to 2 %, and a wrong kernel by everything
_ALLOWED_ERROR = 0.05

ATTENTION = ("flash", "cudnn", "efficient")
TUNE_OPTIONS: dict[str, Any] = {"max_autotune_gemm": True, "autotune_num_choices_displayed": 0}
EXTRA_TUNE_OPTIONS: tuple[dict[str, Any], ...] = (
    {"max_autotune_pointwise": True, "coordinate_descent_tuning": True},
    {"triton.enable_persistent_tma_matmul": True},
    {"triton.enable_pdl": True},  # a kernel may start while the one before it ends
)
# below this a difference between two tries is noise
_MIN_SPEEDUP = 0.99
CPU_RECIPES = (
    Recipe("eager"),
    Recipe("compiled", compiled=True),
    Recipe("compiled, weights packed", compiled=True, options={"freezing": True}),
)


@dataclass(frozen=True)
class Trial:
    recipe: Recipe
    seconds: float | None
    """Of the shortened model."""
    problem: str = ""
    on: str = ""
    """Which part of the model it was tried on; empty: the whole."""

    def __str__(self) -> str:
        result = f"{1000 * self.seconds:.3f} ms" if self.seconds is not None else f"not used: {self.problem}"
        return f"{self.recipe.described()}{self.on and ' on '}{self.on}: {result}"


def autotune(
    model: nn.Module,
    inputs: Sequence[Any],
    dtype: str,
    device: torch.device,
    tell: Callable[[Trial], None] = lambda tried: None,
    tune: bool = False,
) -> tuple[Recipe, list[Trial]]:
    """The quickest recipe for this model and these inputs, and all that were tried; `tune`: matrix kernels too."""
    small = truncate_layers(model, _TRIAL_LAYERS) if isinstance(model, Encoder) else model
    part = trial_scope(model)
    expected = _first_tensor(prepare_call(small, inputs, RECIPES["eager"], dtype, device)()).float()
    found: list[Trial] = []

    def attempt(recipe: Recipe) -> float:
        found.append(replace(_run_trial(small, inputs, recipe, dtype, device, expected), on=part))
        tell(found[-1])
        return _trial_seconds(found[-1])

    if device.type == "cuda":
        _run_gpu_trials(attempt, tune, is_short=isinstance(model, Encoder))
    else:
        for recipe in CPU_RECIPES:
            attempt(recipe)
    return replace(min(found, key=_trial_seconds).recipe, name="fastest"), found


def trial_scope(model: nn.Module) -> str:
    """`3 of 12 layers`: its times are not those of the whole model."""
    layers = len(model.blocks) if isinstance(model, Encoder) else 0
    return f"{_TRIAL_LAYERS} of {layers} layers" if layers > _TRIAL_LAYERS else ""


def _trial_seconds(tried: Trial) -> float:
    return float("inf") if tried.seconds is None else tried.seconds


def _run_gpu_trials(attempt: Callable[[Recipe], float], tune: bool, is_short: bool) -> None:
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
    tuned = compiled(TUNE_OPTIONS)
    if not is_short:
        return
    helped = [extra for extra in EXTRA_TUNE_OPTIONS if compiled({**TUNE_OPTIONS, **extra}) < _MIN_SPEEDUP * tuned]
    if len(helped) > 1:
        compiled({**TUNE_OPTIONS, **{name: value for extra in helped for name, value in extra.items()}})


def _run_trial(
    model: nn.Module, inputs: Sequence[Any], recipe: Recipe, dtype: str, device: torch.device, expected: Tensor
) -> Trial:
    try:
        call = prepare_call(model, inputs, recipe, dtype, device)
        error = relative_error(_first_tensor(call()), expected)
        if not error < _ALLOWED_ERROR:
            return Trial(recipe, None, f"its result is off by {100 * error:.1f} %")
        threads = torch.get_num_threads()
        timer = Timer("call()", globals={"call": call}, num_threads=threads)
        return Trial(recipe, timer.blocked_autorange(min_run_time=_TRIAL_S).median)
    except Exception as error:  # a kernel this card or this torch does not have is a candidate less, nothing more
        return Trial(recipe, None, (str(error) or type(error).__name__).splitlines()[0][:160])


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Relative to the length of the whole output, so that single numbers near 0 do not count."""
    return float((found.float() - expected).norm() / expected.norm())


def _first_tensor(output: Any) -> Tensor:
    """The first tensor of what a model returns."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output
    return next(_first_tensor(value) for value in values if isinstance(value, Tensor | tuple | list))
