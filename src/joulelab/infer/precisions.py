"""In which numbers an inference is computed.

`autocast-*` keeps fp32 weights and casts them in every call, as `with torch.autocast(...)` around a call does; `bf16`
and `fp16` are weights and inputs that were cast once. `fp32` is fp32: no tf32 in matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from joulelab.train.precision import matrix_products

_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}


def cast_model(model: nn.Module, dtype: str) -> nn.Module:
    return model.to(_TORCH[dtype]) if dtype in _TORCH else model


def cast_inputs(inputs: Sequence[Any], dtype: str) -> tuple[Any, ...]:
    """Numbers are cast, indices and anything else stay."""

    def cast(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(_TORCH[dtype]) if floats and dtype in _TORCH else value

    return tuple(cast(value) for value in inputs)


def autocast_of(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """To be entered in every call: outside of it torch would keep the casted weights from call to call."""
    kind = _TORCH.get(dtype.removeprefix("autocast-")) if dtype.startswith("autocast-") else None
    return nullcontext() if kind is None else torch.autocast(device.type, dtype=kind)


@contextmanager
def inference(dtype: str) -> Iterator[None]:
    """Around everything of one measurement: no gradients, and tf32 only where it was asked for.

    Products in bf16 and fp16 are not touched by the switch for fp32.
    """
    with matrix_products("fp32" if dtype == "fp32" else "tf32"), torch.inference_mode():
        yield


def peak_name(dtype: str) -> str:
    """The row of the data sheet whose peak applies."""
    return dtype.removeprefix("autocast-")
