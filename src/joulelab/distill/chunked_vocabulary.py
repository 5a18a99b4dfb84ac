"""Losses over the vocabulary without a full tensor of logits: chunk by chunk, gradients made in the forward pass.

32,768 positions over 30,522 words are 4 GB of float32 for each tensor of logits, and a plain step holds several. Here a
chunk of positions is projected, its loss and the gradient of its logits are computed, the gradient goes on at once to
the hidden states and the projection, and the logits are forgotten. Nothing is computed twice, and the backward pass
only scales what the forward pass has found.

Shapes: N positions, C positions of a chunk, V vocabulary, D student's features, E teacher's features.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joulelab.distill.vocabulary_losses import NO_TARGET

_IMPOSSIBLE = -1e4
"""Logit of a padded word: finite in half precision, and its probability is 0."""
_HALF_SCALE = 256.0
"""Gradients of logits are carried times this in fp16, whose smallest number is above many of them."""


@dataclass(frozen=True)
class TermWeights:
    """What a summed term is multiplied by; a term with weight 0 is not computed."""

    kl: float = 0.0
    mse: float = 0.0
    ce: float = 0.0
    temperature: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in ("kl", "mse", "ce") if getattr(self, name) > 0)

    @property
    def compares(self) -> bool:
        return self.kl > 0 or self.mse > 0


class Projection(NamedTuple):
    """From features to logits, as the computation wants it."""

    weight_VD: Tensor
    bias_V: Tensor | None


@dataclass(frozen=True, eq=False)
class Positions:
    """Which rows of the features enter, in the order in which they are worked off; all counted on the host."""

    targets_N: Tensor
    """What is to be predicted there, or NO_TARGET."""
    counted_N: Tensor
    """1.0 for a token, 0.0 for padding."""
    entering: int
    """Only the first of them count at all."""
    targeted: int
    """Only the first of them have targets."""
    order_N: Tensor | None = None
    """Rows of the features; nothing: as they lie."""


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


def chunk_terms(
    student_CV: Tensor, teacher_CV: Tensor | None, targets_C: Tensor | None, counted_C: Tensor, weights: TermWeights
) -> tuple[Tensor, Tensor]:
    """Sums of the terms (kl, mse, ce) over a chunk, and the gradient of their weighted sum by the student's logits."""
    own_CV, zero = student_CV.float(), counted_C.new_zeros(())
    kl = mse = ce = zero
    grad_CV = torch.zeros_like(own_CV)
    T = weights.temperature
    if teacher_CV is not None and weights.kl > 0:
        said_log_CV, own_log_CV = F.log_softmax(teacher_CV.float() / T, -1), F.log_softmax(own_CV / T, -1)
        said_CV = said_log_CV.exp()
        kl = T * T * torch.dot((said_CV * (said_log_CV - own_log_CV)).sum(-1), counted_C)
        grad_CV = grad_CV + weights.kl * T * (own_log_CV.exp() - said_CV)
    if teacher_CV is not None and weights.mse > 0:
        apart_CV = own_CV - teacher_CV.float()
        mse = torch.dot(apart_CV.square().sum(-1), counted_C)
        grad_CV = grad_CV + 2 * weights.mse * apart_CV
    grad_CV = grad_CV * counted_C[:, None]
    if targets_C is not None and weights.ce > 0:
        asked_C = (targets_C != NO_TARGET).float()
        log_CV = F.log_softmax(own_CV, -1)
        # compared, not scattered: this way all of it is one kernel when compiled
        hit_CV = torch.arange(own_CV.shape[1], device=own_CV.device) == targets_C[:, None]
        ce = -torch.where(hit_CV, log_CV, 0.0).sum()
        grad_CV = grad_CV + weights.ce * (log_CV.exp() - hit_CV.float()) * asked_C[:, None]
    return torch.stack([kl, mse, ce]), grad_CV


def project_chunk(
    own_CD: Tensor,
    own: Projection,
    said_CE: Tensor | None,
    said: Projection | None,
    targets_C: Tensor | None,
    counted_C: Tensor,
    weights: TermWeights,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Sums of the terms, and the logits' gradient in the computation's numbers."""
    student_CV = F.linear(own_CD, own.weight_VD, own.bias_V)
    teacher_CV = None if said_CE is None or said is None else F.linear(said_CE, said.weight_VD, said.bias_V)
    sums, grad_CV = chunk_terms(student_CV, teacher_CV, targets_C, counted_C, weights)
    return sums, (grad_CV * scale).to(own_CD.dtype)


class VocabularyLoss:
    """The weighted sum of the terms over all positions; holds what one training needs, and no state."""

    def __init__(self, weights: TermWeights, chunk: int, compile_mode: str = "off") -> None:
        self.weights = weights
        self.chunk = chunk
        self.step = project_chunk if compile_mode == "off" else _compiled(project_chunk, compile_mode)

    def __call__(
        self,
        features_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        positions: Positions,
        said_NE: Tensor | None = None,
        said: Projection | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and the terms it is made of, each a sum without its weight."""
        call = _Call(self, positions, said_NE, said, _numbers(features_ND), gradients=torch.is_grad_enabled())
        loss, sums = _ChunkedLoss.apply(features_ND, weight_VD, bias_V, call)  # type: ignore[no-untyped-call]
        by_name = dict(zip(("kl", "mse", "ce"), sums.unbind(), strict=True))
        return loss, {name: by_name[name] for name in self.weights.names}


@dataclass(frozen=True, eq=False)
class _Call:
    loss: VocabularyLoss
    positions: Positions
    said_NE: Tensor | None
    said: Projection | None
    dtype: torch.dtype
    gradients: bool


@dataclass(eq=False)
class _Gradients:
    features_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor

    def add(self, rows: Any, grad_CV: Tensor, own_CD: Tensor, weight_VD: Tensor, scale: float) -> None:
        there_CD = (grad_CV @ weight_VD).to(self.features_ND.dtype) / scale
        if isinstance(rows, slice):
            self.features_ND[rows] = there_CD
        else:
            self.features_ND.index_copy_(0, rows, there_CD)  # every row stands once in the order
        self.weight_VD.add_(grad_CV.T @ own_CD, alpha=1 / scale)
        self.bias_V.add_(grad_CV.sum(0, dtype=torch.float32), alpha=1 / scale)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, call: _Call) -> Any:
        with torch.autocast(features_ND.device.type, enabled=False):
            sums, found = _work_off(features_ND, weight_VD, bias_V, call)
        if found is not None:
            grad_bias_V = found.bias_V[: len(weight_VD)] if bias_V is not None else None
            ctx.save_for_backward(found.features_ND, found.weight_VD[: len(weight_VD)], grad_bias_V)
        weights = call.loss.weights
        ctx.mark_non_differentiable(sums)
        return weights.kl * sums[0] + weights.mse * sums[1] + weights.ce * sums[2], sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        scale = grads[0]
        features_ND, weight_VD, bias_V = ctx.saved_tensors
        grad_bias_V = None if bias_V is None else bias_V * scale
        return features_ND * scale.to(features_ND.dtype), weight_VD * scale, grad_bias_V, None


def _work_off(
    features_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, call: _Call
) -> tuple[Tensor, _Gradients | None]:
    dtype = call.dtype
    own = padded_projection(weight_VD, bias_V, dtype)
    scale = _HALF_SCALE if dtype == torch.float16 else 1.0
    sums = features_ND.new_zeros(3, dtype=torch.float32)
    found = None
    if call.gradients:
        found = _Gradients(
            torch.zeros_like(features_ND),
            torch.zeros_like(own.weight_VD, dtype=torch.float32),
            torch.zeros(len(own.weight_VD), dtype=torch.float32, device=features_ND.device),
        )
    own_ND, said_NE = features_ND.to(dtype), None if call.said_NE is None else call.said_NE.to(dtype)
    positions, loss = call.positions, call.loss
    for start in range(0, positions.entering, loss.chunk):
        rows = slice(start, start + loss.chunk)
        place = rows if positions.order_N is None else positions.order_N[rows]
        own_CD, said_CE = own_ND[place], None if said_NE is None else said_NE[place]
        targets_C = positions.targets_N[rows] if start < positions.targeted else None
        counted_C = positions.counted_N[rows]
        some, grad_CV = loss.step(own_CD, own, said_CE, call.said, targets_C, counted_C, loss.weights, scale)
        sums += some
        if found is not None:
            found.add(place, grad_CV, own_CD, own.weight_VD, scale)
    return sums, found


def _numbers(features: Tensor) -> torch.dtype:
    """What a matrix product would be computed in here."""
    kind = features.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else features.dtype


def _compiled(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Compiled, or as it is where compiling fails: without a C++ compiler, say, the result is the same and slower."""
    # a chunk is milliseconds of work, so CUDA graphs would spare nothing
    kind = "max-autotune-no-cudagraphs" if mode == "max-autotune" else None
    compiled: list[Callable[..., Any]] = [torch.compile(function, mode=kind)]

    def call(*arguments: Any) -> Any:
        try:
            return compiled[0](*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            warnings.warn(f"the losses are not compiled: {str(error).splitlines()[0]}", stacklevel=2)
            compiled[0] = function
            return function(*arguments)

    return call
