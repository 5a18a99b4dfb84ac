"""alpha CE + (1 - alpha) T^2 KL of a student against a teacher, cached or live, at the trained tokens only.

No full tensor of logits exists (`distill.chunked`), and no value is read back from a GPU on the way: all counts are
known on the host. Each chunk function returns the sums of (CE, T^2 KL) and the gradient of their weighted sum by the
student's logits.

Sparse targets. The gradient of KL(teacher || student) by the logits is softmax - teacher. It is dense, but except at
the few tokens that the teacher lists it is the student's own softmax. So the softmax is written once, and then the
listed tokens are overwritten with their gradients, computed in float32: in half precision, subtracting the teacher's
probability from a rounded 0.996 would lose most of a small difference. Each listed token gets its complete value, so a
token that is listed twice is written twice with the same value.

Why the terms here are not those of `distill.chunked.VocabularyLoss`: both use its one autograd function, but the sums
are taken in another order (a gathered column instead of the whole matrix, which saves a pass over the vocabulary when
not compiled), so sharing them would change recorded losses in the last bits.

Shapes: B rows, T tokens, N trained tokens, C of them in a chunk, D student's features, E teacher's features, V the
student's vocabulary, W tokens of both vocabularies, K listed tokens (in `sparse_chunk` the label is the last of them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joulelab.distill.chunked import (
    ChunkedJob,
    ChunkTerms,
    Projection,
    chunked_loss,
    compiled,
    matmul_dtype,
    padded_projection,
    takes_kernel,
)
from joulelab.distill.logit_cache.aligned_loss import AlignedTargets, span_terms
from joulelab.distill.logit_cache.codecs import CacheManifest, Codec, Divergence, require_usable
from joulelab.distill.logit_cache.scored_tokens import ScoredTargets, scored_chunk
from joulelab.distill.logit_cache.target_encoding import decode_targets
from joulelab.distill.losses import DIVERGENCES, NO_TARGET, jensen_shannon, teacher_log_softmax
from joulelab.distill.preferences.preference_loss import TargetLogProbabilities
from joulelab.errors import ConfigError, JoulelabError

# targets: what a loss is given of the teacher at the positions of a batch


@dataclass(frozen=True, eq=False)
class SparseTargets:
    """KL(teacher || student) = constant - sum of weights x student log-probabilities - ghost x its log-remainder."""

    ids_NK: Tensor
    weights_NK: Tensor
    constant_N: Tensor
    ghost_N: Tensor | None = None
    """Probability of all other tokens together, if they are compared as one class."""
    gold_N: Tensor | None = None
    """Probability that is assigned to the label."""

    def rows(self, rows: slice) -> SparseChunk:
        ghost_C = None if self.ghost_N is None else self.ghost_N[rows]
        gold_C = None if self.gold_N is None else self.gold_N[rows]
        return SparseChunk(self.ids_NK[rows], self.weights_NK[rows], self.constant_N[rows], ghost_C, gold_C)

    def padded(self, count: int) -> SparseTargets:
        """With empty positions up to this count."""
        tensors = (self.ids_NK, self.weights_NK, self.constant_N, self.ghost_N, self.gold_N)
        return SparseTargets(*(_padded(tensor, count) for tensor in tensors))  # type: ignore[arg-type]


class SparseChunk(NamedTuple):
    """A chunk of `SparseTargets`."""

    ids_CK: Tensor
    weights_CK: Tensor
    constant_C: Tensor
    ghost_C: Tensor | None
    gold_C: Tensor | None


class DenseChunk(NamedTuple):
    """A chunk of `DenseTargets`."""

    hidden_CE: Tensor
    projection: Projection
    vocabulary: int


@dataclass(frozen=True, eq=False)
class DenseTargets:
    """The teacher's hidden states: exact; the loss projects them to logits chunk by chunk."""

    hidden_NE: Tensor
    head: TeacherHead
    vocabulary: int

    @property
    def count(self) -> int:
        return len(self.hidden_NE)

    def require(self, temperature: float, divergence: Divergence) -> None:
        """Any temperature and divergence can be used."""

    def decoded(self) -> DenseTargets:
        return self

    def rows(self, rows: slice) -> DenseChunk:
        projection = self.head.projection(self.hidden_NE.device, self.hidden_NE.dtype)
        return DenseChunk(self.hidden_NE[rows], projection, self.vocabulary)

    def padded(self, count: int) -> DenseTargets:
        hidden_NE = _padded(self.hidden_NE, count)
        assert hidden_NE is not None
        return replace(self, hidden_NE=hidden_NE)


class TeacherHead:
    """A teacher's projection to its vocabulary, converted once for each device and dtype."""

    def __init__(self, weight_VE: Tensor, bias_V: Tensor | None = None) -> None:
        self._weight_VE, self._bias_V = weight_VE.detach(), None if bias_V is None else bias_V.detach()
        self._converted: dict[tuple[torch.device, torch.dtype], Projection] = {}

    def projection(self, device: torch.device, dtype: torch.dtype) -> Projection:
        if (device, dtype) not in self._converted:
            bias_V = None if self._bias_V is None else self._bias_V.to(device)
            self._converted[device, dtype] = padded_projection(self._weight_VE.to(device), bias_V, dtype)
        return self._converted[device, dtype]


@dataclass(frozen=True, eq=False)
class CachedTargets:
    """The cache's bytes for a batch; small to copy to a device, and decoded there."""

    fixed_NF: Tensor
    records_RS: Tensor
    manifest: CacheManifest
    head: TeacherHead | None = None
    """The teacher's projection, if the cache stores hidden states."""

    @property
    def count(self) -> int:
        """Positions, that is, trained tokens of the batch."""
        return len(self.fixed_NF)

    @property
    def vocabulary(self) -> int:
        return self.manifest.vocabulary

    def require(self, temperature: float, divergence: Divergence) -> None:
        require_usable(self.manifest.codec, self.manifest.temperature, temperature, divergence)

    def to(self, device: torch.device) -> CachedTargets:
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> CachedTargets:
        return self._with(lambda tensor: tensor.pin_memory())

    def decoded(self) -> SparseTargets | DenseTargets:
        codec = self.manifest.codec_spec
        if codec.is_exact:
            assert self.head is not None and self.manifest.numbers is not None
            dtype: Any = getattr(torch, self.manifest.numbers)
            return DenseTargets(self.fixed_NF.view(dtype), self.head, self.vocabulary)
        return sparse_targets(codec, self.fixed_NF, self.records_RS)

    def _with(self, change: Callable[[Tensor], Tensor]) -> CachedTargets:
        return replace(self, fixed_NF=change(self.fixed_NF), records_RS=change(self.records_RS))


def sparse_targets(codec: Codec, fixed_NF: Tensor, records_RS: Tensor) -> SparseTargets:
    decoded = decode_targets(codec, fixed_NF, records_RS)
    # A sampled token carries the probability that it represents (its share of the draws times the
    # probability outside the top K), so E[sum w log q] = sum p log q: cross-entropy and gradient are
    # unbiased for any number of draws, while a truncated top K is biased. The constant sum p log p of
    # the KL is minus the teacher's exact entropy, which was stored before sampling.
    if decoded.entropy_N is not None:  # sampled: with the stored entropy the value of the KL is unbiased as well
        return SparseTargets(decoded.ids_NK, decoded.weights_NK, -decoded.entropy_N)
    assert decoded.rest_N is not None
    weights_NK, rest_N = decoded.weights_NK, decoded.rest_N
    # Top-k probabilities divided by their sum: the student is pulled to put nothing on other
    # tokens.
    if codec.tail == "renorm":
        weights_NK = weights_NK / weights_NK.sum(1, keepdim=True)
        return SparseTargets(decoded.ids_NK, weights_NK, _p_log_p(weights_NK).sum(1))
    if codec.tail == "ghost":
        # All unlisted tokens count as one class with the probability that is left: a proper KL
        # between two distributions over K + 1 classes.
        constant_N = _p_log_p(weights_NK).sum(1) + _p_log_p(rest_N)
        return SparseTargets(decoded.ids_NK, weights_NK, constant_N, ghost_N=rest_N)
    # gold: only the loss knows the label, so it adds the label's part of the constant
    return SparseTargets(decoded.ids_NK, weights_NK, _p_log_p(weights_NK).sum(1), gold_N=rest_N)


def _padded(tensor: Tensor | None, count: int) -> Tensor | None:
    if tensor is None or len(tensor) == count:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(count - len(tensor), *tensor.shape[1:])])


def _p_log_p(share: Tensor) -> Tensor:
    return torch.xlogy(share, share)


# terms of one chunk

_LISTED_AT_ONCE = 16384
"""Positions; with 51 listed tokens their comparison takes 0.2 GB."""


@dataclass(frozen=True)
class KdWeights:
    """loss = ce CE + kl T^2 KL, summed over positions."""

    ce: float
    kl: float
    temperature: float
    beta: float = 0.5
    """The teacher's share of the mixture in the Jensen-Shannon divergence."""


class Labels(NamedTuple):
    """The tokens of the text."""

    ids_C: Tensor
    mask_C1: Tensor | None = None
    """1.0, or 0.0 for the padding of a chunk; None: all count."""

    def masked(self, value: float) -> Tensor | float:
        return value if self.mask_C1 is None else value * self.mask_C1


def sparse_chunk(
    student_CD: Tensor,
    student: Projection,
    labels: Labels,
    teacher: SparseChunk,
    vocabulary: int,
    weights: KdWeights,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Against the listed tokens of a teacher."""
    T = weights.temperature
    ce, kl = labels.masked(weights.ce), labels.masked(weights.kl * T)
    logits_CV = F.linear(student_CD, student.weight_VD, student.bias_V).float()
    one_softmax = T == 1 and vocabulary >= logits_CV.shape[1]  # CE and KL then have the same softmax
    scaled_CV = logits_CV if one_softmax else _shared_logits(logits_CV, vocabulary) / T
    norm_C1 = logits_CV.logsumexp(-1, keepdim=True)
    scaled_norm_C1 = norm_C1 if one_softmax else scaled_CV.logsumexp(-1, keepdim=True)
    # `exp_` reuses the temporary: each pass over C x V numbers costs about a tenth of the product
    # that made them.
    grad_CV = scale_in_place((scaled_CV - scaled_norm_C1).exp_(), kl + ce if one_softmax else kl)
    if not one_softmax:
        grad_CV = grad_CV + ce * (logits_CV - norm_C1).exp()

    listed = listed_targets(teacher, labels, weights)
    logits_CK = logits_CV.gather(1, listed.ids_CK)
    log_CK, scaled_log_CK = logits_CK - norm_C1, logits_CK / T - scaled_norm_C1
    kl_C = listed.constant_C - (listed.teacher_CK * scaled_log_CK).sum(-1)
    grad_CK = ce * log_CK.exp() + kl * scaled_log_CK.exp() - listed.target_CK

    if teacher.ghost_C is not None:
        # log of the student's probability outside the list, as a logsumexp over the other logits: 1
        # - sum(q) would lose all digits where the listed tokens have nearly all of the mass.
        rest_CV = scaled_CV.scatter(1, teacher.ids_CK, -torch.inf)
        rest_norm_C1 = rest_CV.logsumexp(-1, keepdim=True)
        rest_norm_C1 = rest_norm_C1.masked_fill(rest_norm_C1.isneginf(), 0.0)  # no token left: avoid -inf minus -inf
        has_rest_C1, ghost_C1 = teacher.ghost_C[:, None] > 0, teacher.ghost_C[:, None]
        kl_C = kl_C - torch.where(has_rest_C1, ghost_C1 * (rest_norm_C1 - scaled_norm_C1), 0.0).sum(-1)
        ghost_kl_C1 = kl * torch.where(has_rest_C1, ghost_C1, 0.0)
        grad_CV = grad_CV - ghost_kl_C1 * (rest_CV - rest_norm_C1).exp()
        # the label belongs to the remainder unless the teacher lists it
        in_rest_C1 = ~(teacher.ids_CK == labels.ids_C[:, None]).any(-1, keepdim=True)
        label_rest_C1 = torch.where(in_rest_C1, ghost_kl_C1 * (logits_CK[:, -1:] / T - rest_norm_C1).exp(), 0.0)
        grad_CK = grad_CK - label_rest_C1 * _last_column(grad_CK)

    grad_CV = scale_in_place(grad_CV, scale).to(student_CD.dtype)
    grad_CV.scatter_(1, listed.ids_CK, (grad_CK * scale).to(student_CD.dtype))
    ce_sum = -(labels.masked(1.0) * log_CK[:, -1:]).sum()
    return torch.stack([ce_sum, T * T * (labels.masked(1.0) * kl_C[:, None]).sum()]), grad_CV


def sparse_terms_of_one_softmax(
    logits_CK: Tensor, entropy_C: Tensor, labels: Labels, listed: ListedTargets, weights: KdWeights, scale: float
) -> tuple[Tensor, Tensor]:
    """As `sparse_chunk` at temperature 1, from the listed logits and the cross-entropy of the label, which is the last
    of them: the sums, and the gradient by the listed logits."""
    logits_CK = logits_CK.float()
    log_CK = logits_CK - (entropy_C[:, None] + logits_CK[:, -1:])
    kl_C = listed.constant_C - (listed.teacher_CK * log_CK).sum(-1)
    kl_sum = kl_C.sum() if labels.mask_C1 is None else (labels.mask_C1[:, 0] * kl_C).sum()
    grad_CK = labels.masked(scale * (weights.ce + weights.kl)) * log_CK.exp() - scale * listed.target_CK
    return torch.stack([entropy_C.sum(), kl_sum]), grad_CK


class ListedTargets(NamedTuple):
    """What a loss needs of the teacher's tokens and of the label, which is the last of the K, before the student's
    logits are known."""

    ids_CK: Tensor
    teacher_CK: Tensor
    """Probabilities."""
    target_CK: Tensor
    """The gradient is that of the softmax minus this."""
    constant_C: Tensor
    """KL(teacher || student) = this - sum of probabilities x student log-probabilities."""

    def rows(self, rows: slice) -> ListedTargets:
        return ListedTargets(*(tensor[rows] for tensor in self))


def listed_targets(teacher: SparseChunk, labels: Labels, weights: KdWeights) -> ListedTargets:
    ids_CK = torch.cat([teacher.ids_CK, labels.ids_C[:, None]], 1)
    gold_C = torch.zeros_like(teacher.constant_C) if teacher.gold_C is None else teacher.gold_C
    teacher_CK = torch.cat([teacher.weights_CK, gold_C[:, None]], 1)
    # KL(p || q) = sum p log p - sum p log q: the first sum is a constant of the teacher, the second
    # needs the student's log-probabilities at the listed tokens only.
    constant_C = teacher.constant_C
    if teacher.gold_C is not None:  # the label receives the remaining probability in addition to its own
        before_C = torch.where(ids_CK[:, :-1] == ids_CK[:, -1:], teacher_CK[:, :-1], 0.0).sum(-1)
        constant_C = constant_C + _p_log_p(before_C + gold_C) - _p_log_p(before_C)
    ce, kl = labels.masked(weights.ce), labels.masked(weights.kl * weights.temperature)
    own_CK = kl * teacher_CK + ce * _last_column(teacher_CK)
    # The label may be among the teacher's tokens, and a sampled id may occur twice: an entry's
    # target is the sum over all entries with the same id.
    same_CKK = ids_CK[:, :, None] == ids_CK[:, None, :]
    target_CK = torch.where(same_CKK, own_CK[:, None, :], 0.0).sum(-1)
    return ListedTargets(ids_CK, teacher_CK, target_CK, constant_C)


def dense_chunk(
    student_CD: Tensor,
    student: Projection,
    labels: Labels,
    teacher: DenseChunk | None,
    divergence: str,
    weights: KdWeights,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Against a teacher's full distribution, or (None) against the labels only."""
    logits_CV = F.linear(student_CD, student.weight_VD, student.bias_V).float()
    if teacher is None:
        ce, grad_CV = _label_terms(logits_CV, labels, weights.ce)
        return torch.stack([ce, torch.zeros_like(ce)]), scale_in_place(grad_CV, scale).to(student_CD.dtype)
    T, shared = weights.temperature, teacher.vocabulary
    teacher_CV = F.linear(teacher.hidden_CE, teacher.projection.weight_VD, teacher.projection.bias_V)
    teacher_log_CW = teacher_log_softmax(teacher_CV[:, :shared], T)
    student_log_CW = F.log_softmax(logits_CV[:, :shared] / T, -1)
    if divergence == "jsd":
        divergence_C, slope_CW = jensen_shannon(student_log_CW, teacher_log_CW, weights.beta)
    else:
        divergence_C, slope_CW = DIVERGENCES[divergence](student_log_CW, teacher_log_CW)
    ce, grad_CV = _label_terms(logits_CV, labels, weights.ce)
    padding = logits_CV.shape[1] - slope_CW.shape[1]
    grad_CV = grad_CV + F.pad(labels.masked(weights.kl * T) * slope_CW, (0, padding))
    divergence_sum = T * T * (labels.masked(1.0) * divergence_C[:, None]).sum()
    return torch.stack([ce, divergence_sum]), scale_in_place(grad_CV, scale).to(student_CD.dtype)


def _label_terms(logits_CV: Tensor, labels: Labels, weight: float) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy, and `weight` times its gradient by the logits."""
    log_CV = F.log_softmax(logits_CV, -1)
    if not torch.compiler.is_compiling():
        # a pass over all these numbers costs about a tenth of the product that made them, so there are few passes
        ids_C1 = labels.ids_C[:, None]
        ce = -(labels.masked(1.0) * log_CV.gather(1, ids_C1)).sum()
        grad_CV = log_CV.exp_().scatter_add_(1, ids_C1, log_CV.new_full(ids_C1.shape, -1.0))
        return ce, scale_in_place(grad_CV, labels.masked(weight))
    # compared, not scattered: this way all of it is one kernel when compiled
    hit_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == labels.ids_C[:, None]
    ce = -(labels.masked(1.0) * torch.where(hit_CV, log_CV, 0.0)).sum()
    return ce, labels.masked(weight) * (log_CV.exp() - hit_CV.float())


def scale_in_place(values_CV: Tensor, factor: Tensor | float) -> Tensor:
    """A factor of 1 saves the pass."""
    return values_CV if isinstance(factor, float | int) and factor == 1 else values_CV.mul_(factor)


def _shared_logits(logits_CV: Tensor, vocabulary: int) -> Tensor:
    """Without the logits that pad the student's head: they take no part in the comparison with the teacher."""
    if vocabulary >= logits_CV.shape[1]:
        return logits_CV
    ids_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    return torch.where(ids_V < vocabulary, logits_CV, -torch.inf)


def _last_column(like_CK: Tensor) -> Tensor:
    """1 in the last column, which is the label."""
    columns = like_CK.shape[1]
    return (torch.arange(columns, device=like_CK.device) == columns - 1).float()


# the loss

AnyTargets = CachedTargets | DenseTargets | ScoredTargets | AlignedTargets


@dataclass(frozen=True)
class KdSums:
    loss: Tensor
    """alpha CE + (1 - alpha) T^2 KL, summed; the one to differentiate."""
    ce: Tensor
    kl: Tensor
    """T^2 times the divergence, summed. From samples it is right on average, not for each token."""
    count: int
    """Trained tokens."""


class KdLoss:
    """The loss of one training; without state between calls. With alpha 1 it is cross-entropy and needs no teacher."""

    def __init__(
        self,
        alpha: float,
        temperature: float = 1.0,
        divergence: Divergence = "forward",
        chunk: int = 1024,
        compile_mode: str = "off",
        beta: float = 0.5,
    ) -> None:
        if not 0 <= alpha <= 1 or not temperature > 0 or chunk < 1:
            raise ConfigError(
                f"alpha {alpha}, temperature {temperature}, chunk {chunk}; expected 0 to 1, above 0, at least 1"
            )
        self.weights = KdWeights(alpha, 1 - alpha, temperature, beta)
        self.divergence: Divergence = divergence
        self.chunk = chunk
        self._full_chunks = compile_mode != "off"
        functions = (sparse_chunk, sparse_terms_of_one_softmax, dense_chunk, scored_chunk)
        self._sparse, self._one_softmax, self._dense, self._scored = (
            compiled(function, compile_mode) for function in functions
        )

    def __call__(
        self,
        hidden_BTD: Tensor,
        weight_VD: Tensor,
        targets: AnyTargets | None,
        labels_BT: Tensor,
        *,
        count: int | None = None,
        bias_V: Tensor | None = None,
    ) -> KdSums:
        """`labels_BT` are aligned with the ids, NO_TARGET where nothing is trained; the shift by one is made here.

        `count` is the number of trained labels, if the host knows it; the targets do.
        """
        self._check(targets, weight_VD)
        count = _target_count(count, targets, labels_BT)
        if isinstance(targets, AlignedTargets) and self.weights.kl > 0:
            return self._over_spans(hidden_BTD, weight_VD, targets, labels_BT, bias_V)
        # Only trained positions are projected: in instruction data half of the tokens are prompts,
        # whose logits would be computed for nothing.
        order_N, labels_N = target_positions(labels_BT, self._entering(count, labels_BT.numel()))
        features = hidden_BTD.flatten(0, 1)
        dtype = matmul_dtype(features)
        terms = self._terms(targets if self.weights.kl > 0 else None, labels_N, len(weight_VD), dtype)
        job = ChunkedJob(terms, (self.weights.ce, self.weights.kl), len(order_N), self.chunk, dtype, order_N)
        loss, sums = chunked_loss(features, weight_VD, bias_V, job)
        return KdSums(loss, sums[0], sums[1], count)

    def _over_spans(
        self, hidden_BTD: Tensor, weight_VD: Tensor, targets: AlignedTargets, labels_BT: Tensor, bias_V: Tensor | None
    ) -> KdSums:
        """Against a teacher with another tokenizer. The gradient by the probability of a span's later tokens is known
        only after its first token, so it is added as a term whose value is 0."""
        T, spans, features = self.weights.temperature, targets.spans, hidden_BTD.flatten(0, 1)
        order_N, labels_N = target_positions(labels_BT, targets.count)
        order_N, labels_N = order_N[spans.student_order_N], labels_N[spans.student_order_N]
        dtype, later = matmul_dtype(features), slice(spans.size, spans.size + len(spans.student_group_R))
        logs_R = TargetLogProbabilities(self.chunk)(
            features[order_N[later]] / T, weight_VD[: targets.vocabulary], labels_N[later]
        )
        rest_G = logs_R.new_zeros(spans.size).index_add(0, spans.student_group_R, logs_R)
        teacher_rest_G, slope_G = targets.log_rest(T, self.chunk), torch.zeros_like(rest_G)

        def terms(rows: slice, place: Any, student_CD: Tensor, student: Projection, scale: float) -> Any:
            logits_CV = F.linear(student_CD, student.weight_VD, student.bias_V).float()
            ce, grad_CV = _label_terms(logits_CV, Labels(labels_N[rows]), self.weights.ce)
            firsts = slice(rows.start, max(rows.start, min(rows.stop, spans.size)))
            found = firsts.stop - firsts.start
            value, by_logits_CV, by_rest_C = span_terms(
                logits_CV[:found], rest_G.detach()[firsts], targets, teacher_rest_G[firsts], firsts,
                self.divergence, self.weights.beta, T,
            )  # fmt: skip
            grad_CV[:found] += self.weights.kl * T * T * by_logits_CV
            slope_G[firsts] = self.weights.kl * T * T * by_rest_C
            return torch.stack([ce, T * T * value]), scale_in_place(grad_CV, scale).to(student_CD.dtype)

        job = ChunkedJob(terms, (self.weights.ce, self.weights.kl), len(order_N), self.chunk, dtype, order_N)
        loss, sums = chunked_loss(features, weight_VD, bias_V, job)
        if torch.is_grad_enabled():
            loss = loss + (slope_G * (rest_G - rest_G.detach())).sum()
        return KdSums(loss, sums[0], sums[1], targets.count)

    def _entering(self, count: int, positions: int) -> int:
        """A compiled chunk has one size: the last one is padded with positions that are not trained."""
        return min(positions, -(-count // self.chunk) * self.chunk) if self._full_chunks else count

    def _check(self, targets: AnyTargets | None, weight_VD: Tensor) -> None:
        if self.weights.kl == 0:
            return
        if targets is None:
            raise ConfigError(f"alpha {self.weights.ce:g} needs a teacher's targets, but there are none", "set alpha 1")
        targets.require(self.weights.temperature, self.divergence)
        if targets.vocabulary > len(weight_VD):
            raise ConfigError(
                f"the teacher's vocabulary has {targets.vocabulary:,} tokens, the student's head {len(weight_VD):,} "
                "rows",
                "build the cache for the smaller of the two heads, or for the tokenizer's own size",
            )

    def _labels(self, labels_N: Tensor, rows: slice) -> Labels:
        ids_C = labels_N[rows]
        if not self._full_chunks:
            return Labels(ids_C)
        return Labels(ids_C.clamp(min=0), (ids_C != NO_TARGET).float()[:, None])

    def _terms(self, targets: AnyTargets | None, labels_N: Tensor, words: int, dtype: torch.dtype) -> ChunkTerms:
        """The chunk function for these targets. The positions of targets and labels are in the same order."""
        assert not isinstance(targets, AlignedTargets)
        decoded = None if targets is None else targets.decoded().padded(len(labels_N))
        if isinstance(decoded, SparseTargets):
            assert targets is not None
            vocabulary = targets.vocabulary
            one_softmax = self.weights.temperature == 1 and vocabulary >= words and decoded.ghost_N is None
            if one_softmax and takes_kernel(labels_N.device, dtype):
                return self._sparse_by_kernel(decoded, labels_N)

            def sparse(rows: slice, place: Any, student_CD: Tensor, student: Projection, scale: float) -> Any:
                labels = self._labels(labels_N, rows)
                return self._sparse(student_CD, student, labels, decoded.rows(rows), vocabulary, self.weights, scale)

            return sparse

        if isinstance(decoded, ScoredTargets):
            vocabulary, loss = decoded.vocabulary, (self.divergence, self.weights.beta, self.weights.kl)

            def scored(rows: slice, place: Any, student_CD: Tensor, student: Projection, scale: float) -> Any:
                return self._scored(student_CD, student, decoded.rows(rows), vocabulary, *loss, scale)

            return scored

        if takes_kernel(labels_N.device, dtype):
            return self._dense_by_kernel(decoded, labels_N, dtype)
        cast = None if decoded is None else replace(decoded, hidden_NE=decoded.hidden_NE.to(dtype))

        def dense(rows: slice, place: Any, student_CD: Tensor, student: Projection, scale: float) -> Any:
            labels, teacher = self._labels(labels_N, rows), None if cast is None else cast.rows(rows)
            return self._dense(student_CD, student, labels, teacher, self.divergence, self.weights, scale)

        return dense

    def _dense_by_kernel(self, targets: DenseTargets | None, labels_N: Tensor, dtype: torch.dtype) -> ChunkTerms:
        from joulelab.distill.vocabulary_kernel import overwrite_with_gradient

        weights, divergence = self.weights, self.divergence
        cast = None if targets is None else replace(targets, hidden_NE=targets.hidden_NE.to(dtype))

        def dense(rows: slice, place: Any, student_CD: Tensor, student: Projection, scale: float) -> Any:
            teacher_CV, shared, ids_C = None, None, labels_N[rows]
            if cast is not None:
                chunk = cast.rows(rows)
                shared = chunk.vocabulary
                teacher_CV = F.linear(chunk.hidden_CE, chunk.projection.weight_VD, chunk.projection.bias_V)
            logits_CV = F.linear(student_CD, student.weight_VD, student.bias_V)
            kl, ce = overwrite_with_gradient(
                logits_CV, teacher_CV, ids_C, (ids_C != NO_TARGET).float(), kl=weights.kl, ce=weights.ce,
                temperature=weights.temperature, scale=scale, divergence=divergence, beta=weights.beta, shared=shared,
            ).sum(1)  # fmt: skip
            return torch.stack([ce, kl]), logits_CV

        return dense

    def _sparse_by_kernel(self, targets: SparseTargets, labels_N: Tensor) -> ChunkTerms:
        """Every logit gets its part of the softmax by the kernel of the cross-entropy, then the listed ones get their
        complete gradient; they are read before the kernel overwrites them. What does not depend on the logits is
        computed for many chunks at once: with a small student, starting kernels takes longer than running them."""
        from joulelab.distill.vocabulary_kernel import overwrite_with_gradient

        both = self.weights.ce + self.weights.kl
        starts = range(0, max(1, len(labels_N)), _LISTED_AT_ONCE)
        parts = [slice(start, start + _LISTED_AT_ONCE) for start in starts]
        found = [listed_targets(targets.rows(rows), self._labels(labels_N, rows), self.weights) for rows in parts]
        all_listed = found[0] if len(found) == 1 else ListedTargets(*map(torch.cat, zip(*found, strict=True)))

        def sparse(rows: slice, place: Any, student_CD: Tensor, student: Projection, scale: float) -> Any:
            labels, listed, ids_C = self._labels(labels_N, rows), all_listed.rows(rows), labels_N[rows]
            logits_CV = F.linear(student_CD, student.weight_VD, student.bias_V)
            logits_CK = logits_CV.gather(1, listed.ids_CK)
            _, entropy_C = overwrite_with_gradient(
                logits_CV, None, ids_C, ids_C, kl=0.0, ce=both, temperature=1.0, scale=scale
            )
            sums, grad_CK = self._one_softmax(logits_CK, entropy_C, labels, listed, self.weights, scale)
            return sums, logits_CV.scatter_(1, listed.ids_CK, grad_CK.to(logits_CV.dtype))

        return sparse


def target_positions(labels_BT: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Positions that predict the trained tokens, as indices into the flattened rows in reading order, and the tokens.

    If there are fewer than `count`, positions without a target follow.
    """
    next_N = F.pad(labels_BT[:, 1:], (0, 1), value=NO_TARGET).flatten()
    # sorted instead of nonzero(): the count is known, so the host need not wait for the GPU
    order_N = (next_N == NO_TARGET).to(torch.uint8).argsort(stable=True)[:count]
    return order_N, next_N[order_N]


def _target_count(count: int | None, targets: AnyTargets | None, labels_BT: Tensor) -> int:
    if targets is not None:
        if count is not None and count != targets.count:
            raise JoulelabError(
                f"the batch trains {count} tokens, but the teacher's targets have {targets.count} positions",
                "look up the documents of this batch in the cache",
            )
        return targets.count
    return int((labels_BT[:, 1:] != NO_TARGET).sum()) if count is None else count
