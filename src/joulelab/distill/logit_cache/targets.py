"""What a loss learns of a teacher at the positions of a batch: some words with weights, or hidden states and a head.

Shapes: N positions, K words, E teacher's features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from joulelab.distill.chunked import Projection, padded_projection
from joulelab.distill.logit_cache.codecs import Codec
from joulelab.distill.logit_cache.manifest import CacheManifest, Divergence, refuse_use
from joulelab.distill.logit_cache.packing import decode
from joulelab.distill.logit_cache.sparse_terms import Named


@dataclass(frozen=True, eq=False)
class SparseTargets:
    """KL(teacher || student) = constant - sum of weights x the student's log-probabilities - ghost x its log-rest."""

    ids_NK: Tensor
    weights_NK: Tensor
    constant_N: Tensor
    ghost_N: Tensor | None = None
    """Probability of all other words together, where they are compared as one."""
    gold_N: Tensor | None = None
    """Probability that goes to the token of the text."""

    def rows(self, rows: slice) -> Named:
        ghost_C = None if self.ghost_N is None else self.ghost_N[rows]
        gold_C = None if self.gold_N is None else self.gold_N[rows]
        return Named(self.ids_NK[rows], self.weights_NK[rows], self.constant_N[rows], ghost_C, gold_C)

    def filled_up(self, count: int) -> SparseTargets:
        """With positions about which nothing is said, to this many."""
        every = (self.ids_NK, self.weights_NK, self.constant_N, self.ghost_N, self.gold_N)
        return SparseTargets(*(_filled_up(tensor, count) for tensor in every))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class DenseTargets:
    """Exact: logits are made of them in the loss, chunk by chunk."""

    hidden_NE: Tensor
    head: TeacherHead
    vocabulary: int

    @property
    def count(self) -> int:
        return len(self.hidden_NE)

    def require(self, temperature: float, divergence: Divergence) -> None:
        """Good for everything."""

    def decoded(self) -> DenseTargets:
        return self

    def filled_up(self, count: int) -> DenseTargets:
        hidden_NE = _filled_up(self.hidden_NE, count)
        assert hidden_NE is not None
        return replace(self, hidden_NE=hidden_NE)


class TeacherHead:
    """A teacher's projection to its vocabulary, laid out once for each device and kind of numbers."""

    def __init__(self, weight_VE: Tensor, bias_V: Tensor | None = None) -> None:
        self._weight_VE, self._bias_V = weight_VE.detach(), None if bias_V is None else bias_V.detach()
        self._laid_out: dict[tuple[torch.device, torch.dtype], Projection] = {}

    def projection(self, device: torch.device, dtype: torch.dtype) -> Projection:
        if (device, dtype) not in self._laid_out:
            bias_V = None if self._bias_V is None else self._bias_V.to(device)
            self._laid_out[device, dtype] = padded_projection(self._weight_VE.to(device), bias_V, dtype)
        return self._laid_out[device, dtype]


@dataclass(frozen=True, eq=False)
class CachedTargets:
    """A batch's bytes of the cache; small to carry to a device, and decoded there."""

    fixed_NF: Tensor
    records_RS: Tensor
    manifest: CacheManifest
    head: TeacherHead | None = None
    """Of a cache of hidden states."""

    @property
    def count(self) -> int:
        """Positions, that is, trained tokens of the batch."""
        return len(self.fixed_NF)

    @property
    def vocabulary(self) -> int:
        return self.manifest.vocabulary

    def require(self, temperature: float, divergence: Divergence) -> None:
        refuse_use(self.manifest.codec, self.manifest.temperature, temperature, divergence)

    def to(self, device: torch.device) -> CachedTargets:
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> CachedTargets:
        return self._with(lambda tensor: tensor.pin_memory())

    def decoded(self) -> SparseTargets | DenseTargets:
        codec = self.manifest.how
        if codec.is_exact:
            assert self.head is not None and self.manifest.numbers is not None
            kind: Any = getattr(torch, self.manifest.numbers)
            return DenseTargets(self.fixed_NF.view(kind), self.head, self.vocabulary)
        return sparse_targets(codec, self.fixed_NF, self.records_RS)

    def _with(self, change: Callable[[Tensor], Tensor]) -> CachedTargets:
        return replace(self, fixed_NF=change(self.fixed_NF), records_RS=change(self.records_RS))


def sparse_targets(codec: Codec, fixed_NF: Tensor, records_RS: Tensor) -> SparseTargets:
    found = decode(codec, fixed_NF, records_RS)
    if found.entropy_N is not None:  # drawn: with the entropy kept, the value of the KL is right on average as well
        return SparseTargets(found.ids_NK, found.weights_NK, -found.entropy_N)
    assert found.rest_N is not None
    weights_NK, rest_N = found.weights_NK, found.rest_N
    if codec.tail == "renorm":
        weights_NK = weights_NK / weights_NK.sum(1, keepdim=True)
        return SparseTargets(found.ids_NK, weights_NK, _p_log_p(weights_NK).sum(1))
    if codec.tail == "ghost":
        constant_N = _p_log_p(weights_NK).sum(1) + _p_log_p(rest_N)
        return SparseTargets(found.ids_NK, weights_NK, constant_N, ghost_N=rest_N)
    # gold: which of the words is the text's own is known in the loss, and so is the constant's last part
    return SparseTargets(found.ids_NK, weights_NK, _p_log_p(weights_NK).sum(1), gold_N=rest_N)


def _filled_up(tensor: Tensor | None, count: int) -> Tensor | None:
    if tensor is None or len(tensor) == count:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(count - len(tensor), *tensor.shape[1:])])


def _p_log_p(share: Tensor) -> Tensor:
    return torch.xlogy(share, share)
