"""In which numbers a step is computed: autocast, loss scaling, and what fp32 means to the matrix units.

`fp32` here is fp32: torch lets convolutions use tf32 unless told otherwise, so it is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Losses are sums, not means: the scale that keeps a mean's gradients inside fp16 is smaller by the count of terms.
_SCALE_OF_A_MEAN = 2.0**16


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    kind = _AUTOCAST.get(precision)
    return nullcontext() if kind is None else torch.autocast(device.type, dtype=kind)


@contextmanager
def matrix_products(precision: str) -> Iterator[None]:
    """tf32 for fp32 matrix products and convolutions, or not; as it was afterwards."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    tf32 = precision != "fp32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def make_scaler(precision: str, device: torch.device, count: int) -> torch.amp.GradScaler:
    """Scales the loss so that fp16 gradients do not vanish; passes everything through for the other precisions."""
    scale = _SCALE_OF_A_MEAN / 2 ** max(0, count.bit_length() - 1)
    return torch.amp.GradScaler(device.type, init_scale=scale, enabled=precision == "fp16")
