"""Quantized weights in a loaded model.

Linear layers are replaced after loading, except the projection to the vocabulary, which decides the answers most; all
other weights and the activations are bfloat16. So every checkpoint works, randomly initialized ones included, and all
formats start from the same weights.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from torch import nn

from joulelab.errors import DeviceMissing, JoulelabError
from joulelab.zoo.pretrained import cast_for_inference
from joulelab.zoo.quantization import PACKAGE, quiet_bitsandbytes

# Tensor cores multiply FP8 from this compute capability on (Ada, Hopper).
_FP8_CAPABILITY = (8, 9)
_INT4_GROUPS = (128, 64, 32)
_CPU_ROWS, _NF4_BLOCK = 32, 64
_MARK = "_joulelab_quantization"
# torchao would otherwise change settings of torch.compile for the whole process, and with them what is measured next.
_NO_GLOBALS = {"set_inductor_config": False}


def quantize(model: Any, kind: str) -> Any:
    """The model with quantized linear layers, in place, on the device where it is. A second call has no effect."""
    if quantization_of(model) == kind:
        return model
    cast_for_inference(model, torch.bfloat16)
    package = PACKAGE[kind]
    try:
        if package == "bitsandbytes":
            _replace_by_bitsandbytes(model, kind)
        else:
            _quantize_by_torchao(model, kind)
    except torch.OutOfMemoryError:
        raise
    except (ImportError, AttributeError, AssertionError, NotImplementedError, RuntimeError) as error:
        # A package whose compiled part does not fit the torch or CUDA version imports, and fails here.
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise JoulelabError(
            f"{package} {_version(package)} cannot make {kind} weights with torch {torch.__version__}"
            f"{f' for CUDA {torch.version.cuda}' if torch.version.cuda else ''}: {reason:.200}",
            f"install a version of {package} for this torch, or use another format",
        ) from error
    setattr(model, _MARK, kind)
    return model


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


def quantization_of(model: Any) -> str | None:
    """What `quantize` made of the model."""
    return getattr(model, _MARK, None)


def _linear_layers(model: Any) -> list[tuple[Any, str, Any]]:
    """(parent, name, layer) of every linear layer but the output projection."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child is not head
    ]


def _replace_by_bitsandbytes(model: Any, kind: str) -> None:
    quiet_bitsandbytes()
    import bitsandbytes as bnb

    for parent, name, old in _linear_layers(model):
        device, has_bias = old.weight.device, old.bias is not None
        if kind == "nf4" and device.type == "cpu" and (old.out_features % _CPU_ROWS or old.in_features % _NF4_BLOCK):
            continue  # on a CPU bitsandbytes packs whole blocks; layers of tiny models may not fill one
        made: Any
        if kind == "int8":
            made = bnb.nn.Linear8bitLt(
                old.in_features, old.out_features, bias=has_bias, has_fp16_weights=False, threshold=6.0
            )
            # quantized when it is moved from the CPU to its device
            made.weight = bnb.nn.Int8Params(old.weight.data.cpu(), requires_grad=False, has_fp16_weights=False)
        else:
            made = bnb.nn.Linear4bit(
                old.in_features, old.out_features, bias=has_bias, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            made.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4")
        if has_bias:
            made.bias = old.bias
        setattr(parent, name, made.to(device).requires_grad_(False))


def _quantize_by_torchao(model: Any, kind: str) -> None:
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Float8WeightOnlyConfig,
        Int4WeightOnlyConfig,
        PerRow,
        quantize_,
    )

    layers = {id(layer): layer for _, _, layer in _linear_layers(model)}
    if kind == "fp8" and torch.cuda.get_device_capability() < _FP8_CAPABILITY:
        raise DeviceMissing(
            f"{torch.cuda.get_device_name()} has no FP8 tensor cores (compute capability 8.9 or newer)",
            "use int8, nf4 or fp8-weights",
        )
    if kind != "int4":
        config: Any = Float8WeightOnlyConfig(**_NO_GLOBALS)
        if kind == "fp8":
            config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), **_NO_GLOBALS)
        quantize_(model, config, filter_fn=lambda module, name: id(module) in layers)
        return
    for group in _INT4_GROUPS:  # the largest groups that divide a layer's input; others keep bfloat16
        some = {key for key, layer in layers.items() if layer.in_features % group == 0}
        if some:
            # The format of torch's own kernel (`_weight_int4pack_mm`); the others need the package mslk.
            config = Int4WeightOnlyConfig(group_size=group, int4_packing_format="tile_packed_to_4d", **_NO_GLOBALS)
            quantize_(model, config, filter_fn=lambda module, name, some=some: id(module) in some)
        layers = {key: layer for key, layer in layers.items() if key not in some}
