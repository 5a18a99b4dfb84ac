"""A divergence from a teacher that reports only its k most likely tokens, and the token that the student has sampled.

A divergence per token is a sum over the vocabulary, D = sum_v h(p_v, q_v). The terms of the listed tokens S are exact.
The rest is an expectation over the token y that the student sampled with probability mu_y:

    sum over v outside S of h(p_v, q_v)  =  E_y [ [y outside S] h(p_y, q_y) / mu_y ]

so the sum over S plus that one term is right on average, in value and gradient, for any k (importance sampling; with
k = 0 it is the usual one-sample estimate of on-policy distillation). Renormalizing the k tokens, or comparing the rest
as one class, would be biased. mu_y is the probability at the time of sampling, also if the weights have changed since.
The student samples from its whole distribution at temperature 1: a token that cannot be sampled would have no estimate.

The gradient by a logit needs the terms only: with g_v = q_v dh/dq_v, dD/dz_j = g_j - q_j sum_v g_v.

Shapes: N positions, C of them in a chunk, V vocabulary, D features, K listed tokens and the sampled one, which is last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joulelab.distill.chunked import Projection
from joulelab.distill.logit_cache.codecs import Divergence
from joulelab.errors import ConfigError


class ScoredChunk(NamedTuple):
    ids_CK: Tensor
    log_p_CK: Tensor
    weights_CK: Tensor


@dataclass(frozen=True, eq=False)
class ScoredTargets:
    """The teacher's log-probabilities of some tokens at every position, with the weight of each term."""

    ids_NK: Tensor
    log_p_NK: Tensor
    weights_NK: Tensor
    """1 for a listed token; 1 / mu for the sampled token if it is not listed, else 0."""
    vocabulary: int

    @classmethod
    def of(
        cls, ids_NK: Tensor, log_p_NK: Tensor, sampled_N: Tensor, sampled_log_p_N: Tensor, log_mu_N: Tensor, words: int
    ) -> ScoredTargets:
        """Listed tokens and the sampled one; a list shorter than K is filled with log-probabilities of -inf."""
        is_listed_NK = log_p_NK > -math.inf
        outside_N = ~((ids_NK == sampled_N[:, None]) & is_listed_NK).any(-1)
        weights_N1 = torch.where(outside_N, (-log_mu_N.double()).exp().float(), 0.0)[:, None]
        return cls(
            torch.cat([ids_NK, sampled_N[:, None]], 1),
            torch.cat([torch.where(is_listed_NK, log_p_NK, 0.0), sampled_log_p_N[:, None]], 1),
            torch.cat([is_listed_NK.float(), weights_N1], 1),
            words,
        )

    @property
    def count(self) -> int:
        return len(self.ids_NK)

    def require(self, temperature: float, divergence: Divergence) -> None:
        if temperature != 1:
            raise ConfigError(
                f"temperature {temperature:g} needs the teacher's full distribution, but a server reports some tokens",
                "set on_policy.temperature=1, or use a teacher in this process",
            )

    def decoded(self) -> ScoredTargets:
        return self

    def padded(self, count: int) -> ScoredTargets:
        """With positions of weight 0 up to this count."""
        if len(self.ids_NK) == count:
            return self
        more = (0, 0, 0, count - len(self.ids_NK))
        ids_NK, log_p_NK, weights_NK = (F.pad(one, more) for one in (self.ids_NK, self.log_p_NK, self.weights_NK))
        return ScoredTargets(ids_NK, log_p_NK, weights_NK, self.vocabulary)

    def rows(self, rows: slice) -> ScoredChunk:
        return ScoredChunk(self.ids_NK[rows], self.log_p_NK[rows], self.weights_NK[rows])


def divergence_terms(divergence: str, log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """h(p, q) and q dh/dq of single tokens. Of the reverse KL the derivative of sum q = 1 is left out: it is 0 in the
    whole sum, and only adds noise to an estimate of it."""
    p, q = log_p.exp(), log_q.exp()
    if divergence == "forward":
        return p * (log_p - log_q), -p
    if divergence == "reverse":
        return q * (log_q - log_p), q * (log_q - log_p)
    log_m = torch.logaddexp(math.log(beta) + log_p, math.log1p(-beta) + log_q)
    student = (1 - beta) * q * (log_q - log_m)
    return beta * p * (log_p - log_m) + student, student


def scored_chunk(
    student_CD: Tensor,
    student: Projection,
    teacher: ScoredChunk,
    vocabulary: int,
    divergence: str,
    beta: float,
    weight: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Sums of (CE, divergence) of a chunk, CE being 0, and the gradient of the weighted sum by the logits."""
    logits_CV = F.linear(student_CD, student.weight_VD, student.bias_V).float()
    if vocabulary < logits_CV.shape[1]:  # padding of the head takes no part
        is_word_V = torch.arange(logits_CV.shape[1], device=logits_CV.device) < vocabulary
        logits_CV = torch.where(is_word_V, logits_CV, -torch.inf)
    log_q_CV = F.log_softmax(logits_CV, -1)
    terms_CK, slopes_CK = divergence_terms(divergence, teacher.log_p_CK, log_q_CV.gather(1, teacher.ids_CK), beta)
    slopes_CK = slopes_CK * teacher.weights_CK
    grad_CV = log_q_CV.exp() * -slopes_CK.sum(-1, keepdim=True)
    grad_CV = grad_CV.scatter_add(1, teacher.ids_CK, slopes_CK) * (weight * scale)
    total = (terms_CK * teacher.weights_CK).sum()
    return torch.stack([torch.zeros_like(total), total]), grad_CV.to(student_CD.dtype)
