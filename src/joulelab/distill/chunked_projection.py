"""From features to a loss over the vocabulary, chunk by chunk, with the gradients made in the forward pass.

32,768 positions over 30,522 words are 4 GB of float32 for each tensor of logits, and a plain step holds several. Here a
chunk of positions is projected, its loss and the gradient of its logits are computed, the gradient goes on at once to
the hidden states and the projection, and the logits are forgotten. Nothing is computed twice, and the backward pass
only scales what the forward pass has found. What the loss is stands elsewhere: `ChunkWork` is handed in.

Shapes: N positions, C positions of a chunk, V vocabulary, D features.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_IMPOSSIBLE = -1e4
"""Logit of a padded word: finite in half precision, and its probability is 0."""
_HALF_SCALE = 256.0
"""Gradients of logits are carried times this in fp16, whose smallest number is above many of them."""


class Projection(NamedTuple):
    """From features to logits, as the computation wants it."""

    weight_VD: Tensor
    bias_V: Tensor | None


class ChunkWork(Protocol):
    def __call__(self, rows: slice, place: Any, own_CD: Tensor, own: Projection, scale: float) -> tuple[Tensor, Tensor]:
        """Sums of the loss's terms over a chunk, and `scale` times the gradient of their weighted sum by the logits.

        `rows` counts in the order in which positions are worked off, `place` says where they lie among the features.
        """


@dataclass(frozen=True, eq=False)
class ChunkedJob:
    """All that a loss needs beside the features and the projection."""

    work: ChunkWork
    weights: tuple[float, ...]
    """What each sum is multiplied by in the loss."""
    entering: int
    """So many positions enter, counted on the host; those behind them in the last chunk must weigh nothing."""
    chunk: int
    dtype: torch.dtype
    """Of the matrix products."""
    order_N: Tensor | None = None
    """Rows of the features in the order in which they are worked off; nothing: as they lie."""


def chunked_loss(
    features_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, job: ChunkedJob
) -> tuple[Tensor, Tensor]:
    """The weighted sum of the terms over all positions, and the terms' sums without their weights."""
    found: tuple[Tensor, Tensor] = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        features_ND, weight_VD, bias_V, job, torch.is_grad_enabled()
    )
    return found


def padded_projection(weight_VD: Tensor, bias_V: Tensor | None, dtype: torch.dtype) -> Projection:
    """In the computation's numbers, with a vocabulary that is a multiple of 64 in half precision.

    Rows of 30,522 half-precision numbers do not begin at multiples of 16 bytes, which rules the fast kernels out.
    """
    missing = -len(weight_VD) % 64 if dtype in (torch.bfloat16, torch.float16) else 0
    weight_VD = weight_VD.detach().to(dtype)
    bias_V = None if bias_V is None else bias_V.detach().to(dtype)
    if not missing:
        return Projection(weight_VD, bias_V)
    bias_V = weight_VD.new_zeros(len(weight_VD)) if bias_V is None else bias_V
    return Projection(F.pad(weight_VD, (0, 0, 0, missing)), F.pad(bias_V, (0, missing), value=_IMPOSSIBLE))


def computed_in(features: Tensor) -> torch.dtype:
    """What a matrix product would be computed in here."""
    kind = features.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else features.dtype


def compiled(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Compiled, or as it is where compiling fails: without a C++ compiler, say, the result is the same and slower."""
    if mode == "off":
        return function
    # a chunk is milliseconds of work, so CUDA graphs would spare nothing
    kind = "max-autotune-no-cudagraphs" if mode == "max-autotune" else None
    made: list[Callable[..., Any]] = [torch.compile(function, mode=kind)]

    def call(*arguments: Any) -> Any:
        try:
            return made[0](*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            warnings.warn(f"the losses are not compiled: {str(error).splitlines()[0]}", stacklevel=2)
            made[0] = function
            return function(*arguments)

    return call


def add_product(sum_VD: Tensor, left_VC: Tensor, right_CD: Tensor, factor: float = 1.0) -> None:
    """sum += factor left @ right; in the same numbers without another matrix as large as the vocabulary."""
    if left_VC.dtype == sum_VD.dtype:
        sum_VD.addmm_(left_VC, right_CD, alpha=factor)
    else:
        sum_VD.add_(left_VC @ right_CD, alpha=factor)


@dataclass(eq=False)
class _Gradients:
    features_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None

    def add(self, rows: Any, grad_CV: Tensor, own_CD: Tensor, weight_VD: Tensor, scale: float) -> None:
        there_CD = (grad_CV @ weight_VD).to(self.features_ND.dtype)
        there_CD = there_CD if scale == 1 else there_CD / scale
        if isinstance(rows, slice):
            self.features_ND[rows] = there_CD
        else:
            self.features_ND.index_copy_(0, rows, there_CD)  # every row stands once in the order
        add_product(self.weight_VD, grad_CV.T, own_CD, 1 / scale)
        if self.bias_V is not None:
            self.bias_V.add_(grad_CV.sum(0, dtype=torch.float32), alpha=1 / scale)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, job: ChunkedJob, gradients: bool
    ) -> Any:
        with torch.autocast(features_ND.device.type, enabled=False):
            sums, found = _work_off(features_ND, weight_VD, bias_V, job, gradients)
        if found is not None:
            grad_bias_V = None if found.bias_V is None else found.bias_V[: len(weight_VD)]
            ctx.save_for_backward(found.features_ND, found.weight_VD[: len(weight_VD)], grad_bias_V)
        ctx.mark_non_differentiable(sums)
        weighted = [weight * term for weight, term in zip(job.weights, sums.unbind(), strict=True)]
        return torch.stack(weighted).sum(), sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        scale = grads[0]
        features_ND, weight_VD, bias_V = ctx.saved_tensors
        grad_bias_V = None if bias_V is None else bias_V * scale
        return features_ND * scale.to(features_ND.dtype), weight_VD * scale, grad_bias_V, None, None


def _work_off(
    features_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, job: ChunkedJob, gradients: bool
) -> tuple[Tensor, _Gradients | None]:
    own = padded_projection(weight_VD, bias_V, job.dtype)
    scale = _HALF_SCALE if job.dtype == torch.float16 else 1.0
    sums = features_ND.new_zeros(len(job.weights), dtype=torch.float32)
    found = _no_gradients_yet(features_ND, own, bias_V is not None) if gradients else None
    own_ND = features_ND.to(job.dtype)
    for start in range(0, job.entering, job.chunk):
        rows = slice(start, start + job.chunk)
        place = rows if job.order_N is None else job.order_N[rows]
        own_CD = own_ND[place]
        some, grad_CV = job.work(rows, place, own_CD, own, scale)
        sums += some
        if found is not None:
            found.add(place, grad_CV, own_CD, own.weight_VD, scale)
    return sums, found


def _no_gradients_yet(features_ND: Tensor, own: Projection, biased: bool) -> _Gradients:
    weight_VD = torch.zeros_like(own.weight_VD, dtype=torch.float32)
    return _Gradients(torch.zeros_like(features_ND), weight_VD, weight_VD.new_zeros(len(weight_VD)) if biased else None)
