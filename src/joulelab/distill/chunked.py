"""Losses over a vocabulary, computed chunk by chunk, with the gradients made in the forward pass.

32,768 positions over 30,522 tokens are 4 GB of float32 for each tensor of logits, and a plain step holds several. Here
a chunk of positions is projected to the vocabulary, its loss and the gradient of its logits are computed, that gradient
is multiplied back to the hidden states and the projection at once, and the logits are freed. Nothing is computed twice:
the backward pass only scales what the forward pass has stored (as in Liger's fused linear cross-entropy, with the
teacher's projection in the same chunk).

`chunked_loss` does this for any loss (`ChunkTerms`); `VocabularyLoss` is the one of masked and causal students against
a live teacher. The losses from a logit cache are in `logit_cache`.

Shapes: N positions, C positions of a chunk, V vocabulary, D student's features, E teacher's features.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.function import once_differentiable

from joulelab.distill.losses import NO_TARGET, forward_kl, logit_difference, teacher_log_softmax
from joulelab.train.bf16_weights import has_triton

_PADDED_LOGIT = -1e4
"""Logit of a padded token: finite in half precision, and its probability is 0."""
_FP16_GRADIENT_SCALE = 256.0
"""Gradients of logits are carried times this in fp16, whose smallest number is above many of them."""


class Projection(NamedTuple):
    """From features to logits, in the dtype and padding of the matrix products."""

    weight_VD: Tensor
    bias_V: Tensor | None


class ChunkTerms(Protocol):
    def __call__(
        self, rows: slice, place: Any, features_CD: Tensor, projection: Projection, scale: float, /
    ) -> tuple[Tensor, Tensor]:
        """Sums of the loss's terms over a chunk, and `scale` times the gradient of their weighted sum by the logits.

        `rows` counts in processing order, `place` indexes the features.
        """


@dataclass(frozen=True, eq=False)
class ChunkedJob:
    """A loss, apart from the student's features and projection."""

    terms: ChunkTerms
    weights: tuple[float, ...]
    """Factor of each sum in the loss."""
    positions: int
    """Positions that enter, counted on the host; those after them in the last chunk must have weight 0."""
    chunk: int
    dtype: torch.dtype
    """Dtype of the matrix products."""
    order_N: Tensor | None = None
    """Rows of the features in processing order; None: as stored."""


def chunked_loss(
    features_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, job: ChunkedJob
) -> tuple[Tensor, Tensor]:
    """The weighted sum of the terms over all positions, and the terms' sums without their weights."""
    result: tuple[Tensor, Tensor] = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        features_ND, weight_VD, bias_V, job, torch.is_grad_enabled()
    )
    return result


def padded_projection(weight_VD: Tensor, bias_V: Tensor | None, dtype: torch.dtype) -> Projection:
    """In the dtype of the computation, with a vocabulary that is a multiple of 64 in half precision.

    Rows of 30,522 half-precision numbers do not start at multiples of 16 bytes, which rules the fast kernels out.
    """
    # Tensor cores need rows aligned to 16 bytes (8 half-precision numbers); 64 also fills whole
    # tiles of the library's kernels.
    missing = -len(weight_VD) % 64 if dtype in (torch.bfloat16, torch.float16) else 0
    weight_VD = weight_VD.detach().to(dtype)
    bias_V = None if bias_V is None else bias_V.detach().to(dtype)
    if not missing:
        return Projection(weight_VD, bias_V)
    bias_V = weight_VD.new_zeros(len(weight_VD)) if bias_V is None else bias_V
    return Projection(F.pad(weight_VD, (0, 0, 0, missing)), F.pad(bias_V, (0, missing), value=_PADDED_LOGIT))


def matmul_dtype(features: Tensor) -> torch.dtype:
    """The dtype that a matrix product of these features has here, autocast included."""
    device = features.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype


def compiled(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """The function compiled, or itself where compiling fails (for example without a C++ compiler): slower, but with the
    same result."""
    if mode == "off":
        return function
    # a chunk is milliseconds of work, so CUDA graphs would save nothing
    kind = "max-autotune-no-cudagraphs" if mode == "max-autotune" else None
    current: list[Callable[..., Any]] = [torch.compile(function, mode=kind)]

    def call(*arguments: Any) -> Any:
        try:
            return current[0](*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            warnings.warn(f"the losses are not compiled: {str(error).splitlines()[0]}", stacklevel=2)
            current[0] = function
            return function(*arguments)

    return call


def add_product(sum_VD: Tensor, left_VC: Tensor, right_CD: Tensor, factor: float = 1.0) -> None:
    """sum += factor left @ right, without another matrix of the vocabulary's size where torch can do that."""
    if left_VC.dtype == sum_VD.dtype:
        sum_VD.addmm_(left_VC, right_CD, alpha=factor)
    elif _adds_to_float32(left_VC.device, left_VC.dtype):
        torch.addmm(sum_VD, left_VC, right_CD, alpha=factor, out_dtype=torch.float32, out=sum_VD)
    else:
        sum_VD.add_(left_VC @ right_CD, alpha=factor)


@cache
def _adds_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of half-precision matrices can be added to float32 numbers before it is rounded. Tried on a
    small product: newer versions of torch do it on CUDA devices, with an argument that older ones do not know."""
    if device.type != "cuda":
        return False
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, ones.T, ones, alpha=2.0, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError):
        return False
    return bool((total == 33).all())


@dataclass(eq=False)
class _Gradients:
    """Gradients of the loss with respect to its inputs; None for inputs that are not trained."""

    features_ND: Tensor
    weight_VD: Tensor | None
    bias_V: Tensor | None

    @classmethod
    def zeros(cls, features_ND: Tensor, projection: Projection, by_weight: bool, by_bias: bool) -> _Gradients:
        # The projection's gradient adds up over all chunks. In bf16 a sum stops growing when an
        # addend falls below 1/256 of it, so it is kept in float32 whatever the products' type.
        found_VD = projection.weight_VD
        weight_VD = torch.zeros_like(found_VD, dtype=torch.float32) if by_weight else None
        bias_V = found_VD.new_zeros(len(found_VD), dtype=torch.float32) if by_bias else None
        return cls(torch.zeros_like(features_ND), weight_VD, bias_V)

    def add(self, rows: Any, grad_CV: Tensor, features_CD: Tensor, weight_VD: Tensor, scale: float) -> None:
        grad_CD = (grad_CV @ weight_VD).to(self.features_ND.dtype)
        grad_CD = grad_CD if scale == 1 else grad_CD / scale
        if isinstance(rows, slice):
            self.features_ND[rows] = grad_CD
        else:
            self.features_ND.index_copy_(0, rows, grad_CD)  # each row occurs once in the order
        # dL/dW = (dL/dlogits)^T features, summed over chunks; with dL/dfeatures = dL/dlogits W this
        # is all that backpropagation needs of the logits, which can be freed now.
        if self.weight_VD is not None:
            add_product(self.weight_VD, grad_CV.T, features_CD, 1 / scale)
        if self.bias_V is not None:
            self.bias_V.add_(grad_CV.sum(0, dtype=torch.float32), alpha=1 / scale)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, job: ChunkedJob, needs_grad: bool
    ) -> Any:
        _, by_weight, by_bias, *_ = ctx.needs_input_grad
        # `job.dtype` is autocast's type already; inside, float32 sums must stay float32.
        with torch.autocast(features_ND.device.type, enabled=False):
            sums, gradients = _process_chunks(
                features_ND, weight_VD, bias_V, job, (by_weight, by_bias) if needs_grad else None
            )
        # Not saved by autograd: the backward pass overwrites them.
        ctx.gradients, ctx.words = gradients, len(weight_VD)
        ctx.dtypes = weight_VD.dtype, None if bias_V is None else bias_V.dtype
        ctx.mark_non_differentiable(sums)
        weighted = [weight * term for weight, term in zip(job.weights, sums.unbind(), strict=True)]
        return torch.stack(weighted).sum(), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # The loss is linear in its upstream gradient, so the gradients of the forward pass only
        # need to be scaled: by 1 / count in the trainer, or by the fp16 loss scale. That is done in
        # place, because another float32 matrix of the vocabulary's size may be the peak of memory.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradient of a chunked loss can be computed only once; compute the loss again")
        scale, (weight_dtype, bias_dtype) = grads[0], ctx.dtypes
        grad_ND = gradients.features_ND.mul_(scale.to(gradients.features_ND.dtype))
        grad_VD = _scaled(gradients.weight_VD, scale, ctx.words, weight_dtype)
        return grad_ND, grad_VD, _scaled(gradients.bias_V, scale, ctx.words, bias_dtype), None, None


def _scaled(gradient: Tensor | None, scale: Tensor, words: int, dtype: torch.dtype) -> Tensor | None:
    """Times the scale, without padded words, in the dtype of the parameter; overwritten if it has that dtype."""
    if gradient is None:
        return None
    gradient = gradient[:words]
    if gradient.dtype == dtype:
        return gradient.mul_(scale)
    # One pass: autograd would cast the scaled numbers in a second one.
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


def _process_chunks(
    features_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, job: ChunkedJob, trained: tuple[bool, bool] | None
) -> tuple[Tensor, _Gradients | None]:
    """`trained`: whether weight and bias are; None computes no gradient at all."""
    projection = padded_projection(weight_VD, bias_V, job.dtype)
    # Like a loss scaler, but constant: gradients by logits have the size of the terms' weights (at most
    # that for KL and cross-entropy), so 256 times them stays far below fp16's largest number, 65,504,
    # and the smallest one that survives is 2.3e-10 instead of 6e-8.
    scale = _FP16_GRADIENT_SCALE if job.dtype == torch.float16 else 1.0
    sums = features_ND.new_zeros(len(job.weights), dtype=torch.float32)
    gradients = None if trained is None else _Gradients.zeros(features_ND, projection, *trained)
    cast_ND = features_ND.to(job.dtype)
    for start in range(0, job.positions, job.chunk):
        rows = slice(start, start + job.chunk)
        place = rows if job.order_N is None else job.order_N[rows]
        features_CD = cast_ND[place]
        chunk_sums, grad_CV = job.terms(rows, place, features_CD, projection, scale)
        sums += chunk_sums
        if gradients is not None:
            gradients.add(place, grad_CV, features_CD, projection.weight_VD, scale)
    return sums, gradients


@dataclass(frozen=True)
class TermWeights:
    """Factor of each summed term; a term with weight 0 is not computed."""

    kl: float = 0.0
    mse: float = 0.0
    ce: float = 0.0
    temperature: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in ("kl", "mse", "ce") if getattr(self, name) > 0)

    @property
    def needs_teacher(self) -> bool:
        return self.kl > 0 or self.mse > 0


@dataclass(frozen=True, eq=False)
class Positions:
    """Which rows of the features enter a loss, in processing order; all counts are known on the host."""

    targets_N: Tensor
    """The token to predict, or NO_TARGET."""
    weights_N: Tensor
    """1.0 for a token, 0.0 for padding."""
    count: int
    """Only the first `count` positions enter at all."""
    with_targets: int
    """Only the first `with_targets` positions have targets."""
    order_N: Tensor | None = None
    """Rows of the features; None: as stored."""


def chunk_terms(
    student_CV: Tensor, teacher_CV: Tensor | None, targets_C: Tensor | None, weights_C: Tensor, weights: TermWeights
) -> tuple[Tensor, Tensor]:
    """Sums of the terms (kl, mse, ce) over a chunk, and the gradient of their weighted sum by the student's logits."""
    logits_CV, zero = student_CV.float(), weights_C.new_zeros(())
    kl = mse = ce = zero
    grad_CV = torch.zeros_like(logits_CV)
    T = weights.temperature
    if teacher_CV is not None and weights.kl > 0:
        # `slope_CV` is the derivative by z / T. By the chain rule T^2 d/dz = T^2 (1 / T) slope = T
        # slope, hence one T in the gradient and two in the value.
        divergence_C, slope_CV = forward_kl(F.log_softmax(logits_CV / T, -1), teacher_log_softmax(teacher_CV, T))
        kl = T * T * torch.dot(divergence_C, weights_C)
        grad_CV = grad_CV + weights.kl * T * slope_CV
    if teacher_CV is not None and weights.mse > 0:
        difference_CV = logit_difference(logits_CV, teacher_CV.float())
        mse = torch.dot(difference_CV.square().sum(-1), weights_C)
        grad_CV = grad_CV + 2 * weights.mse * difference_CV
    grad_CV = grad_CV * weights_C[:, None]
    if targets_C is not None and weights.ce > 0:
        # d CE / d z_j = softmax_j - [j = target] at positions with a target, 0 elsewhere. NO_TARGET
        # is -100 and equals no column, so the comparison below selects nothing at those positions.
        has_target_C = (targets_C != NO_TARGET).float()
        log_CV = F.log_softmax(logits_CV, -1)
        # compared, not scattered: this way all of it is one kernel when compiled
        hit_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
        ce = -torch.where(hit_CV, log_CV, 0.0).sum()
        grad_CV = grad_CV + weights.ce * (log_CV.exp() - hit_CV.float()) * has_target_C[:, None]
    return torch.stack([kl, mse, ce]), grad_CV


def project_chunk(
    student_CD: Tensor,
    student: Projection,
    teacher_CE: Tensor | None,
    teacher: Projection | None,
    targets_C: Tensor | None,
    weights_C: Tensor,
    weights: TermWeights,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Sums of the terms, and the logits' gradient in the dtype of the matrix products."""
    student_CV = F.linear(student_CD, student.weight_VD, student.bias_V)
    teacher_CV = None
    if teacher_CE is not None and teacher is not None:
        teacher_CV = F.linear(teacher_CE, teacher.weight_VD, teacher.bias_V)
    sums, grad_CV = chunk_terms(student_CV, teacher_CV, targets_C, weights_C, weights)
    return sums, (grad_CV * scale).to(student_CD.dtype)


def label_and_kl_terms(
    student_CD: Tensor,
    student: Projection,
    teacher_CE: Tensor | None,
    teacher: Projection | None,
    targets_C: Tensor | None,
    weights_C: Tensor,
    weights: TermWeights,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As `project_chunk` for KL and cross-entropy, by the kernel (`takes_kernel`)."""
    from joulelab.distill.vocabulary_kernel import overwrite_with_gradient

    student_CV = F.linear(student_CD, student.weight_VD, student.bias_V)
    teacher_CV = None
    if teacher_CE is not None and teacher is not None:
        teacher_CV = F.linear(teacher_CE, teacher.weight_VD, teacher.bias_V)
    kl, ce = overwrite_with_gradient(
        student_CV, teacher_CV, targets_C if weights.ce > 0 else None, weights_C,
        kl=weights.kl, ce=weights.ce, temperature=weights.temperature, scale=scale,
    ).sum(1)  # fmt: skip
    return torch.stack([kl, torch.zeros_like(kl), ce]), student_CV


def takes_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and has_triton()


class VocabularyLoss:
    """The weighted sum of KL, logit MSE and cross-entropy over all positions; without state between calls."""

    def __init__(self, weights: TermWeights, chunk: int, compile_mode: str = "off") -> None:
        self.weights = weights
        self.chunk = chunk
        self.step = compiled(project_chunk, compile_mode)

    def __call__(
        self,
        features_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        positions: Positions,
        teacher_NE: Tensor | None = None,
        teacher: Projection | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and its terms, each a sum without its weight."""
        weights, dtype = self.weights, matmul_dtype(features_ND)
        cast_NE = None if teacher_NE is None else teacher_NE.to(dtype)

        def terms(
            rows: slice, place: Any, student_CD: Tensor, student: Projection, scale: float
        ) -> tuple[Tensor, Tensor]:
            teacher_CE = None if cast_NE is None else cast_NE[place]
            targets_C = positions.targets_N[rows] if rows.start < positions.with_targets else None
            by_kernel = weights.mse == 0 and takes_kernel(student_CD.device, dtype)
            sums: tuple[Tensor, Tensor] = (label_and_kl_terms if by_kernel else self.step)(
                student_CD, student, teacher_CE, teacher, targets_C, positions.weights_N[rows], weights, scale
            )
            return sums

        factors = (weights.kl, weights.mse, weights.ce)
        job = ChunkedJob(terms, factors, positions.count, self.chunk, dtype, positions.order_N)
        loss, sums = chunked_loss(features_ND, weight_VD, bias_V, job)
        by_name = dict(zip(("kl", "mse", "ce"), sums.unbind(), strict=True))
        return loss, {name: by_name[name] for name in weights.names}
