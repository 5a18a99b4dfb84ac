"""How a forward pass is run: eager, compiled, from a CUDA graph, or by the fastest of several recipes.

At batch 1 a GPU waits for the host: an eager 12-layer encoder spends milliseconds on launching 150 kernels that take
microseconds each. A CUDA graph launches them together. What remains is the number of kernels and how well each fills
the GPU, which compilation and autotuning change.

Precisions: `autocast-*` keeps fp32 weights and casts them in every call, as `with torch.autocast(...)` does; `bf16` and
`fp16` cast weights and inputs once. `fp32` is IEEE fp32, without tf32 in matrix products. Quantized weights (int8, nf4,
...) come with bf16 activations.

The mode `fastest` tries recipes on a truncated model for a quarter of a second each and runs the whole model with the
best. Which attention kernel is fastest for 197 tokens, or whether autotuned matrix kernels beat the library's, has to
be measured. Each recipe must reproduce the eager result.
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
from joulelab.zoo.pretrained import cast_for_inference
from joulelab.zoo.quantization import QUANTIZATIONS, is_quantized
from joulelab.zoo.quantized_layers import quantize

_WARM_UP_CALLS = 3


def capture_cuda_graph(run: Callable[[], Any]) -> Callable[[], Any]:
    """Capture `run` as one CUDA graph. Every replay overwrites the returned output.

    `run` is called a few times before the capture; the caller restores what it changes. The graph stores addresses, so
    all tensors it reads must stay alive: the returned function keeps a reference to `run`.
    """
    # Warm-up on a side stream, as torch documents for capture: the caching allocator must not hand
    # out memory of the default stream's pool to the graph.
    side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):  # cuBLAS and cuDNN initialize here, which is not allowed during capture
        for _ in range(_WARM_UP_CALLS):
            run()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()

    def replay(_kept: Callable[[], Any] = run) -> Any:
        graph.replay()
        return output

    return replay


# Activations of a model with quantized weights are bfloat16.
_TORCH_DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    **dict.fromkeys(QUANTIZATIONS, torch.bfloat16),
}


def cast_model(model: nn.Module, dtype: str) -> nn.Module:
    """In place. Weights of fp32, tf32 and autocast are float32, whatever type the checkpoint has."""
    if is_quantized(dtype):
        return quantize(model, dtype)  # type: ignore[no-any-return]
    return cast_for_inference(model, _TORCH_DTYPES.get(dtype, torch.float32))


def cast_inputs(inputs: Sequence[Any], dtype: str) -> tuple[Any, ...]:
    """Cast floating-point tensors; leave everything else."""

    def cast(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(_TORCH_DTYPES[dtype]) if floats and dtype in _TORCH_DTYPES else value

    return tuple(cast(value) for value in inputs)


def autocast_context(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """Enter it in every call: around several calls, torch would cache the cast weights."""
    kind = _TORCH_DTYPES.get(dtype.removeprefix("autocast-")) if dtype.startswith("autocast-") else None
    return nullcontext() if kind is None else torch.autocast(device.type, dtype=kind)


@contextmanager
def inference_context(dtype: str) -> Iterator[None]:
    """No gradients, and tf32 only if requested. The tf32 switch does not affect bf16 and fp16."""
    with float32_matmul_precision("fp32" if dtype == "fp32" else "tf32"), torch.inference_mode():
        yield


def peak_precision(dtype: str) -> str:
    """The precision whose peak FLOP/s applies."""
    return dtype.removeprefix("autocast-")


Call = Callable[[], Any]
# One process may measure dozens of models, dtypes and shapes that share their code.
_RECOMPILE_LIMIT = 512
_ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Recipe:
    """How a call is compiled and launched."""

    name: str
    compiled: bool = False
    compile_mode: str | None = None
    """A mode of torch.compile."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of torch.compile, instead of a mode."""
    graph: bool = False
    """Capture the call as a CUDA graph."""
    attention: str = ""
    """Attention kernel; empty: torch's choice."""

    def describe(self) -> str:
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
    """A function that runs one inference. Compilation, capture and tuning are done when this returns.

    Call it, and the returned function, inside `inference_context`.
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
    # Without autocast the model itself is compiled, to avoid a Python wrapper around each call.
    target: Any = eager if dtype.startswith("autocast-") else model
    run: Any = torch.compile(target, mode=recipe.compile_mode, options=options, dynamic=False)
    return run  # type: ignore[no-any-return]


def _attention_backend(name: str) -> AbstractContextManager[None]:
    return sdpa_kernel(_ATTENTION[name]) if name else nullcontext()


class CudaGraphCall:
    """A forward pass captured as one CUDA graph. Each call copies the inputs into its buffers and replays it."""

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
    """A copy with fewer blocks, for quick trials, and without a head: the two numbers of a two-class head are too few
    to distinguish rounding from a wrong kernel."""
    made = copy.deepcopy(model)
    made.blocks = made.blocks[:layers]  # type: ignore[index]
    made.head = nn.Identity()
    return made


_TRIAL_LAYERS = 3
_TRIAL_S = 0.25
# bf16 has 8 significant bits: three layers differ by 1 to 2 % from fp32. A wrong kernel differs by about 100 %.
_ALLOWED_ERROR = 0.05

ATTENTION = ("flash", "cudnn", "efficient")
TUNE_OPTIONS: dict[str, Any] = {"max_autotune_gemm": True, "autotune_num_choices_displayed": 0}
EXTRA_TUNE_OPTIONS: tuple[dict[str, Any], ...] = (
    {"max_autotune_pointwise": True, "coordinate_descent_tuning": True},
    {"triton.enable_persistent_tma_matmul": True},
    {"triton.enable_pdl": True},  # programmatic dependent launch: a kernel may start while the previous one ends
)
# Smaller differences between two trials are noise.
_MIN_SPEEDUP = 0.99
CPU_RECIPES = (
    Recipe("eager"),
    Recipe("compiled", compiled=True),
    Recipe("compiled, weights packed", compiled=True, options={"freezing": True}),
)


@dataclass(frozen=True)
class Trial:
    """One recipe tried: its time, or why it is not used."""

    recipe: Recipe
    seconds: float | None
    """Time per call of the truncated model."""
    problem: str = ""
    on: str = ""
    """Part of the model that was tried; empty: all of it."""

    def __str__(self) -> str:
        result = f"{1000 * self.seconds:.3f} ms" if self.seconds is not None else f"not used: {self.problem}"
        return f"{self.recipe.describe()}{self.on and ' on '}{self.on}: {result}"


def autotune(
    model: nn.Module,
    inputs: Sequence[Any],
    dtype: str,
    device: torch.device,
    on_trial: Callable[[Trial], None] = lambda trial: None,
    tune: bool = False,
) -> tuple[Recipe, list[Trial]]:
    """The fastest recipe for this model and these inputs, and all trials; `tune` also autotunes matrix kernels."""
    small = truncate_layers(model, _TRIAL_LAYERS) if isinstance(model, Encoder) else model
    part = trial_scope(model)
    expected = _first_tensor(prepare_call(small, inputs, RECIPES["eager"], dtype, device)()).float()
    found: list[Trial] = []

    def attempt(recipe: Recipe) -> float:
        found.append(replace(_run_trial(small, inputs, recipe, dtype, device, expected), on=part))
        on_trial(found[-1])
        return _trial_seconds(found[-1])

    if device.type == "cuda":
        _run_gpu_trials(attempt, tune, is_short=isinstance(model, Encoder))
    else:
        for recipe in CPU_RECIPES:
            attempt(recipe)
    return replace(min(found, key=_trial_seconds).recipe, name="fastest"), found


def trial_scope(model: nn.Module) -> str:
    """For example `3 of 12 layers`, which the times of a trial refer to; empty for the whole model."""
    layers = len(model.blocks) if isinstance(model, Encoder) else 0
    return f"{_TRIAL_LAYERS} of {layers} layers" if layers > _TRIAL_LAYERS else ""


def _trial_seconds(tried: Trial) -> float:
    return float("inf") if tried.seconds is None else tried.seconds


def _run_gpu_trials(attempt: Callable[[Recipe], float], tune: bool, is_short: bool) -> None:
    """First the attention kernel, which needs no compilation; then compiler options with that attention.

    A model that cannot be truncated takes minutes to compile, so the extra options are not tried.
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
            return Trial(recipe, None, f"its result differs by {100 * error:.1f} %")
        threads = torch.get_num_threads()
        timer = Timer("call()", globals={"call": call}, num_threads=threads)
        return Trial(recipe, timer.blocked_autorange(min_run_time=_TRIAL_S).median)
    except Exception as error:  # a kernel that this GPU or torch does not support is skipped
        return Trial(recipe, None, (str(error) or type(error).__name__).splitlines()[0][:160])


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Relative to the norm of the whole output, so that single values near 0 do not matter."""
    return float((found.float() - expected).norm() / expected.norm())


def _first_tensor(output: Any) -> Tensor:
    """The first tensor of a model's output."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if hasattr(output, "values") else output
    return next(_first_tensor(value) for value in values if isinstance(value, Tensor | tuple | list))
