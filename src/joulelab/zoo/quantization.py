"""Quantized weights: which formats there are and what each needs. Importable without torch.

int8 is LLM.int8() (Dettmers et al., 2022): products in int8, columns of the activations with outliers in bfloat16. nf4
stores four bits per weight in blocks of 64 with one scale each (Dettmers et al., 2023) and computes in bfloat16. fp8
quantizes weights and activations per row and multiplies in FP8; fp8-weights and int4 keep bfloat16 activations.
"""

from __future__ import annotations

import logging
from typing import Literal, get_args

from joulelab import lookup
from joulelab.errors import DeviceMissing

Quantization = Literal["int8", "nf4", "fp8", "fp8-weights", "int4"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
PACKAGE = {
    "int8": "bitsandbytes",
    "nf4": "bitsandbytes",
    "fp8": "torchao",
    "fp8-weights": "torchao",
    "int4": "torchao",
}
WEIGHT_BYTES = {"int8": 1.0, "nf4": 0.5, "fp8": 1.0, "fp8-weights": 1.0, "int4": 0.5}
GPU_ONLY = ("fp8", "int4")


def quiet_bitsandbytes() -> None:
    """Call it before bitsandbytes is imported, also by peft: on a CPU it warns that an optional kernel could not be
    downloaded, and later in every product that LLM.int8() quantizes from float16."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def is_quantized(dtype: str) -> bool:
    return dtype in QUANTIZATIONS


def quantization_packages(*dtypes: str) -> list[str]:
    """The packages that these formats need; none for those that are not quantized."""
    return list(dict.fromkeys(PACKAGE[dtype] for dtype in dtypes if is_quantized(dtype)))


def require_quantization(kind: str, on_gpu: bool) -> None:
    """Check package and device before anything is loaded."""
    if kind in GPU_ONLY and not on_gpu:
        usable = ", ".join(name for name in QUANTIZATIONS if name not in GPU_ONLY)
        raise DeviceMissing(
            f"{kind} weights need an NVIDIA GPU: {PACKAGE[kind]} has no kernel for them on a CPU",
            f"use a GPU, or one of {usable}",
        )
    lookup.require_packages(f"{kind} weights", *quantization_packages(kind))
