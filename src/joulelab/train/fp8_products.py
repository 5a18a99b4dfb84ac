"""Linear layers whose matrix products are computed in 8-bit floating point; everything else stays as it is.

A training step multiplies three times for each linear layer: inputs by weights, gradients by weights, and gradients by
inputs. Tensor cores of GPUs from Ada and Hopper on multiply 8-bit numbers at twice the rate of bf16. Inputs and weights
are e4m3 (4 bits of exponent, 3 of mantissa, up to 448), gradients e5m2 (5 and 2, up to 57,344), because gradients vary
more in size and need less precision (Micikevicius et al., 2022). A tensor has one scale, which maps its largest number
to the largest one of the format. It is computed from the tensor itself in every step, so that no state is kept and
nothing overflows. Sums are taken in higher precision; the backward products ask for exact float32 sums.

Weights, gradients of weights and the optimizer keep their dtype. Only the forward method is replaced, so the types of
modules, the names of parameters and saved models do not change, and in evaluation mode a layer computes as before.

Shapes: N tokens, D inputs of a layer, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from joulelab.errors import ConfigError
from joulelab.train.config import TrainingConfig
from joulelab.train.optim import repeated_blocks

_VALUES, _GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_MULTIPLE = 16
"""The kernels need rows of 16 bytes."""
_SMALLEST_SCALE = 1e-30
"""Of a tensor of zeros; far below those of real tensors, and its inverse is a float32 number."""
_CAPABILITY = (8, 9)
_OTHERWISE = "set training.matmul=precision"
FP8_NOT_COMPILED = (
    "matmul=fp8 with compile=off uses more energy than bf16: finding scales and converting take longer than the "
    "products save; set training.compile=blocks or default"
)


def require_fp8(device: torch.device) -> None:
    """Raise if the device has no 8-bit products."""
    if device.type != "cuda":
        raise ConfigError(f"matmul=fp8 needs an NVIDIA GPU, but the device is {device.type}", _OTHERWISE)
    found = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or found < _CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"matmul=fp8 needs an NVIDIA GPU with compute capability 8.9 or higher (Ada, Hopper or newer); {name} has "
            f"{found[0]}.{found[1]}",
            _OTHERWISE,
        )


def check_products(device: str, trainings: Iterable[TrainingConfig]) -> None:
    """Raise if a training wants fp8 and the device of a run (auto, cpu, cuda, mps) has none."""
    if any(training.matmul == "fp8" for training in trainings):
        chosen = "cuda" if torch.cuda.is_available() else "cpu"
        require_fp8(torch.device(chosen if device == "auto" else device))


def use_fp8_products(model: nn.Module) -> int:
    """Make the linear layers of a model's repeated blocks compute their products in fp8; returns their number.

    The head and the embeddings are outside of the blocks. Layers with adapters, quantized layers and frozen ones are
    left alone, and so are layers whose sizes are no multiples of 16.
    """
    layers = [layer for block in repeated_blocks(model) for layer in _plain_layers(block) if _fits(layer)]
    if not layers:
        raise ConfigError(
            f"matmul=fp8: {type(model).__name__} has no trained linear layer in repeated blocks whose sizes are "
            f"multiples of {_MULTIPLE}, without an adapter",
            _OTHERWISE,
        )
    for layer in layers:
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


def _plain_layers(module: nn.Module) -> Iterator[nn.Linear]:
    if hasattr(module, "base_layer"):  # peft: a layer and its adapters
        return
    if type(module) is nn.Linear:  # quantized layers are subclasses
        yield module
    for child in module.children():
        yield from _plain_layers(child)


def _fits(layer: nn.Linear) -> bool:
    return layer.weight.requires_grad and not (layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE)


def _forward(layer: nn.Linear, values: Tensor) -> Tensor:
    if not layer.training:  # evaluations are of the model that is saved
        return F.linear(values, layer.weight, layer.bias)
    return fp8_linear(values, layer.weight, layer.bias)


def fp8_linear(values: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear` with 8-bit products, in the dtype that it has here, autocast included."""
    kind = values.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else values.dtype
    values_ND = values.reshape(-1, values.shape[-1])
    tokens = len(values_ND)
    if tokens % _MULTIPLE:  # the sum over tokens in the weight's gradient needs whole rows, too
        values_ND = F.pad(values_ND, (0, 0, 0, -tokens % _MULTIPLE))
    output_NO: Tensor = _Fp8Linear.apply(values_ND, weight_OD, dtype)  # type: ignore[no-untyped-call]
    output = output_NO[:tokens].view(*values.shape[:-1], len(weight_OD))
    return output if bias_O is None else output + bias_O.to(dtype)


def quantize(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers in 8 bits, and the scale that multiplies them back."""
    scale = _scale(values, dtype)
    return _quantized(values, scale, dtype), scale


def _scale(values: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.abs().amax().float() / torch.finfo(dtype).max).clamp(min=_SMALLEST_SCALE)


def _quantized(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # Clamped, because the largest number may exceed the limit by a rounding error and would become NaN.
    largest = torch.finfo(dtype).max
    return (values.float() * scale.reciprocal()).clamp(-largest, largest).to(dtype)


class _Fp8Linear(torch.autograd.Function):
    """The kernels take rows of the first matrix and columns of the second one, each stored without gaps. So every
    operand of a backward product that is stored in the other order is copied in 8 bits."""

    @staticmethod
    def forward(ctx: Any, values_ND: Tensor, weight_OD: Tensor, dtype: torch.dtype) -> Tensor:
        values8_ND, values_scale = quantize(values_ND, _VALUES)
        weight8_OD, weight_scale = quantize(weight_OD, _VALUES)
        # The inputs are kept in 8 bits, half of bf16's memory; the weight is in memory anyway.
        ctx.save_for_backward(values8_ND, values_scale, weight_OD, weight_scale)
        ctx.dtype = values_ND.dtype
        return torch._scaled_mm(
            values8_ND, weight8_OD.t(), scale_a=values_scale, scale_b=weight_scale, out_dtype=dtype,
            use_fast_accum=True,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        values8_ND, values_scale, weight_OD, weight_scale = ctx.saved_tensors
        grad8_NO, grad_scale = quantize(grads[0], _GRADIENTS)
        weight8_DO = _quantized(weight_OD.t(), weight_scale, _VALUES).contiguous()
        grad_ND = torch._scaled_mm(
            grad8_NO, weight8_DO.t(), scale_a=grad_scale, scale_b=weight_scale, out_dtype=grads[0].dtype,
            use_fast_accum=False,
        )  # fmt: skip
        grad_OD = torch._scaled_mm(
            grad8_NO.t().contiguous(), values8_ND.t().contiguous().t(), scale_a=grad_scale, scale_b=values_scale,
            out_dtype=weight_OD.dtype, use_fast_accum=False,
        )  # fmt: skip
        return grad_ND.to(ctx.dtype), grad_OD, None
