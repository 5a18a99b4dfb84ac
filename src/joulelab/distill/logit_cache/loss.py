"""alpha CE + (1 - alpha) T^2 KL of a student against a teacher, cached or live, at the trained tokens alone.

No full tensor of logits exists (`chunked`), and no value is asked of a GPU on the way.

Shapes: B rows, T tokens, N trained tokens, D student's features, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joulelab.distill.chunked import ChunkedJob, ChunkTerms, Projection, chunked_loss, compiled, matmul_dtype
from joulelab.distill.logit_cache.dense_terms import dense_chunk, label_chunk
from joulelab.distill.logit_cache.manifest import Divergence
from joulelab.distill.logit_cache.sparse_terms import KdWeights, Labels, sparse_chunk
from joulelab.distill.logit_cache.targets import CachedTargets, DenseTargets
from joulelab.distill.losses import NO_TARGET
from joulelab.errors import ConfigError, JoulelabError


@dataclass(frozen=True)
class KdSums:
    loss: Tensor
    """alpha CE + (1 - alpha) T^2 KL, summed; the one to differentiate."""
    ce: Tensor
    kl: Tensor
    """T^2 times the divergence, summed. From draws it is right on average, not token by token."""
    count: int
    """Trained tokens."""


class KdLoss:
    """Holds what one training needs, and no state. With alpha 1 it is plain cross-entropy, and needs no teacher."""

    def __init__(
        self,
        alpha: float,
        temperature: float = 1.0,
        divergence: Divergence = "forward",
        chunk: int = 1024,
        compile_mode: str = "off",
    ) -> None:
        if not 0 <= alpha <= 1 or not temperature > 0 or chunk < 1:
            raise ConfigError(
                f"alpha {alpha}, temperature {temperature}, chunks of {chunk}; expected 0 to 1, above 0, 1 or more"
            )
        self.weights = KdWeights(alpha, 1 - alpha, temperature)
        self.divergence: Divergence = divergence
        self.chunk = chunk
        self._whole_chunks = compile_mode != "off"
        self._sparse, self._dense, self._labels = (
            compiled(function, compile_mode) for function in (sparse_chunk, dense_chunk, label_chunk)
        )

    def __call__(
        self,
        hidden_BTD: Tensor,
        weight_VD: Tensor,
        targets: CachedTargets | DenseTargets | None,
        labels_BT: Tensor,
        *,
        count: int | None = None,
        bias_V: Tensor | None = None,
    ) -> KdSums:
        """`labels_BT` lie where their ids lie, NO_TARGET where nothing is trained; the shift is made here.

        `count` says how many of them are trained where the host knows it; the targets do.
        """
        self._refuse_misfit(targets, weight_VD)
        count = _count(count, targets, labels_BT)
        order_N, labels_N = trained_places(labels_BT, self._entering(count, labels_BT.numel()))
        features = hidden_BTD.flatten(0, 1)
        dtype = matmul_dtype(features)
        work = (
            self._compared(targets, labels_N, dtype)
            if targets is not None and self.weights.kl > 0
            else self._alone(labels_N)
        )
        job = ChunkedJob(work, (self.weights.ce, self.weights.kl), len(order_N), self.chunk, dtype, order_N)
        loss, sums = chunked_loss(features, weight_VD, bias_V, job)
        return KdSums(loss, sums[0], sums[1], count)

    def _entering(self, count: int, places: int) -> int:
        """A compiled chunk has one size: the last one is filled up with places that are not trained."""
        return min(places, -(-count // self.chunk) * self.chunk) if self._whole_chunks else count

    def _refuse_misfit(self, targets: CachedTargets | DenseTargets | None, weight_VD: Tensor) -> None:
        if self.weights.kl == 0:
            return
        if targets is None:
            raise ConfigError(f"alpha {self.weights.ce:g} compares with a teacher, and there is none", "set alpha 1")
        targets.require(self.weights.temperature, self.divergence)
        if targets.vocabulary > len(weight_VD):
            raise ConfigError(
                f"the teacher's words go up to {targets.vocabulary:,}, the student's head has {len(weight_VD):,} rows",
                "make the cache for the vocabulary of both: the smaller head, or the tokenizer's own size",
            )

    def _rows(self, labels_N: Tensor, rows: slice) -> Labels:
        words_C = labels_N[rows]
        if not self._whole_chunks:
            return Labels(words_C)
        return Labels(words_C.clamp(min=0), (words_C != NO_TARGET).float()[:, None])

    def _alone(self, labels_N: Tensor) -> ChunkTerms:
        def work(rows: slice, place: Any, own_CD: Tensor, own: Projection, scale: float) -> Any:
            return self._labels(own_CD, own, self._rows(labels_N, rows), self.weights, scale)

        return work

    def _compared(self, targets: CachedTargets | DenseTargets, labels_N: Tensor, dtype: torch.dtype) -> ChunkTerms:
        said, vocabulary = targets.decoded().filled_up(len(labels_N)), targets.vocabulary
        if not isinstance(said, DenseTargets):

            def sparse(rows: slice, place: Any, own_CD: Tensor, own: Projection, scale: float) -> Any:
                labels = self._rows(labels_N, rows)
                return self._sparse(own_CD, own, labels, said.rows(rows), vocabulary, self.weights, scale)

            return sparse
        there_NE, head = said.hidden_NE.to(dtype), said.head.projection(said.hidden_NE.device, dtype)

        def dense(rows: slice, place: Any, own_CD: Tensor, own: Projection, scale: float) -> Any:
            labels, kind = self._rows(labels_N, rows), self.divergence
            return self._dense(own_CD, own, labels, there_NE[rows], head, vocabulary, kind, self.weights, scale)

        return dense


def trained_places(labels_BT: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Where the trained tokens are predicted from, in rows laid end to end and in reading order, and what they are.

    Beyond the trained ones come places without a target.
    """
    next_N = F.pad(labels_BT[:, 1:], (0, 1), value=NO_TARGET).flatten()
    # sorted, not searched for: how many there are is known, and a GPU need not tell the host
    order_N = (next_N == NO_TARGET).to(torch.uint8).argsort(stable=True)[:count]
    return order_N, next_N[order_N]


def _count(count: int | None, targets: CachedTargets | DenseTargets | None, labels_BT: Tensor) -> int:
    if targets is not None:
        if count is not None and count != targets.count:
            raise JoulelabError(
                f"the batch trains {count} tokens, and the teacher's answers are {targets.count}",
                "ask the cache for the pieces of this very batch",
            )
        return targets.count
    return int((labels_BT[:, 1:] != NO_TARGET).sum()) if count is None else count
