"""Log-probabilities of given tokens without a full tensor of logits, chunk by chunk, and with gradients.

A preference loss weighs a token by what came out for its whole pair, so gradients cannot be made while the logits are
there for the first time, as for cross-entropy. Logits are kept for the backward pass up to a limit of memory, in the
numbers they were computed in, and beyond it projected a second time.

Shapes: N tokens, C tokens of a chunk, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joulelab.distill.chunked import Projection, add_product, compiled, matmul_dtype, padded_projection


@dataclass(frozen=True, eq=False)
class Projecting:
    """How log-probabilities are computed; no state."""

    chunk: int = 4096
    """Tokens whose logits exist at a time."""
    kept_bytes: int = 4 * 2**30
    """Logits that may be kept for the backward pass; more than these are computed twice."""
    compile_mode: str = "off"

    def __post_init__(self) -> None:
        pieces: dict[str, Callable[..., Any]] = {"_score": score_chunk, "_differentiate": gradient_chunk}
        for name, function in pieces.items():
            made = compiled(function, self.compile_mode)
            object.__setattr__(self, name, made)

    def __call__(self, features_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
        """logs_N in float32, differentiable by features and weight."""
        call = _Call(self, targets_N, matmul_dtype(features_ND), torch.is_grad_enabled())
        logs_N: Tensor = _TargetLogs.apply(features_ND, weight_VD, call)  # type: ignore[no-untyped-call]
        return logs_N

    def score(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        return self._score(*arguments)  # type: ignore[attr-defined,no-any-return]

    def differentiate(self, *arguments: Any) -> Tensor:
        return self._differentiate(*arguments)  # type: ignore[attr-defined,no-any-return]


def score_chunk(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets, and the logarithms of the sums they were divided by."""
    summed_C = torch.logsumexp(logits_CV.float(), -1)
    return logits_CV.gather(-1, targets_C[:, None]).squeeze(-1).float() - summed_C, summed_C


def gradient_chunk(logits_CV: Tensor, summed_C: Tensor, targets_C: Tensor, grads_C: Tensor) -> Tensor:
    """By the logits, in their own numbers."""
    chances_CV = (logits_CV.float() - summed_C[:, None]).exp_()
    if not torch.compiler.is_compiling():  # every pass over all words counts
        grads_C1 = grads_C[:, None].float()
        return chances_CV.mul_(-grads_C1).scatter_add_(1, targets_C[:, None], grads_C1).to(logits_CV.dtype)
    # compared, not scattered: this way all of it is one kernel when compiled
    hit_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
    return ((hit_CV.float() - chances_CV) * grads_C[:, None]).to(logits_CV.dtype)


@dataclass(frozen=True, eq=False)
class _Call:
    how: Projecting
    targets_N: Tensor
    dtype: torch.dtype
    gradients: bool

    def chunks(self) -> list[slice]:
        return [slice(at, at + self.how.chunk) for at in range(0, len(self.targets_N), self.how.chunk)]


class _TargetLogs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features_ND: Tensor, weight_VD: Tensor, call: _Call) -> Tensor:
        with torch.autocast(features_ND.device.type, enabled=False):
            own, own_ND = padded_projection(weight_VD, None, call.dtype), features_ND.detach().to(call.dtype)
            bytes_all = len(call.targets_N) * own.weight_VD.shape[0] * own.weight_VD.element_size()
            keeps = call.gradients and bytes_all <= call.how.kept_bytes
            logs, sums, kept = [features_ND.new_zeros(0, dtype=torch.float32)], [], []
            for some in call.chunks():
                logits_CV = _project(own_ND[some], own)
                logs_C, summed_C = call.how.score(logits_CV, call.targets_N[some])
                logs.append(logs_C)
                sums.append(summed_C)
                kept.append(logits_CV if keeps else None)
        if call.gradients:
            ctx.call, ctx.kept, ctx.sums = call, kept, sums
            ctx.save_for_backward(features_ND, weight_VD)
        return torch.cat(logs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        features_ND, weight_VD = ctx.saved_tensors
        call: _Call = ctx.call
        with torch.autocast(features_ND.device.type, enabled=False):
            own, own_ND = padded_projection(weight_VD, None, call.dtype), features_ND.detach().to(call.dtype)
            grad_ND = torch.empty_like(features_ND)
            grad_VD = torch.zeros_like(own.weight_VD, dtype=torch.float32)
            for number, some in enumerate(call.chunks()):
                logits_CV, ctx.kept[number] = ctx.kept[number], None
                logits_CV = _project(own_ND[some], own) if logits_CV is None else logits_CV
                grad_CV = call.how.differentiate(logits_CV, ctx.sums[number], call.targets_N[some], grads[0][some])
                grad_ND[some] = (grad_CV @ own.weight_VD).to(grad_ND.dtype)
                add_product(grad_VD, grad_CV.T, own_ND[some])
        return grad_ND, grad_VD[: len(weight_VD)].to(weight_VD.dtype), None


def _project(own_CD: Tensor, own: Projection) -> Tensor:
    return F.linear(own_CD, own.weight_VD, own.bias_V)
