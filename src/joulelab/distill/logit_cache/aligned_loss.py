"""A divergence from a teacher with another vocabulary, over spans of text that both cover by whole tokens.

Approximate: two models with different tokenizers have no common distribution of the next token. Per span (see
`data.chat.token_alignment`) each side has the distribution at its first token, times the probability of its other
tokens,

    P(y) = p(y | before) p(t_2 | before, t_1) ... p(t_n | ...)        teacher, tokens t_1 ... t_n of the span
    Q(y) = q(y | before) q(s_2 | before, s_1) ... q(s_m | ...)        student, tokens s_1 ... s_m

so that P(t_1) and Q(s_1) are the exact probabilities of the span's text; for other y both are too small by the same
rule (Hugging Face's GOLD, 2025, merge strategy "observed"). For a span of one token each they are the plain
distributions. Two losses compare them:

    gold   on tokens of both vocabularies their divergence, and of the others the sorted probabilities; weighted by the
           share of the teacher's tokens that are common, and its complement
    uld    sum of |P - Q| over both lists of probabilities, each in descending order (Boizard et al., 2024)

P and Q do not sum to 1 over the common tokens. There the KL divergences have the terms that make them 0 at P = Q and
positive elsewhere: p log(p / q) - p + q. In the Jensen-Shannon divergence these terms cancel. With equal vocabularies
`gold` is the divergence of `kd_loss`.

Shapes: N trained tokens of the student, M of the teacher, G spans, R tokens of spans after the first, C spans of a
chunk, V student's vocabulary, W teacher's vocabulary, K common tokens, E teacher's features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joulelab.distill.logit_cache.codecs import Divergence
from joulelab.distill.logit_cache.scored_tokens import divergence_terms

CrossTokenizerLoss = Literal["gold", "uld"]
_SPANS_AT_ONCE = 128  # sorting keeps several tensors of this many rows over the vocabulary


class BatchSpans(NamedTuple):
    """Spans of a batch; tokens are counted among the trained tokens of the student or teacher, in reading order."""

    student_order_N: Tensor
    """First tokens of all spans, then their other tokens, then the tokens that are in no span."""
    student_group_R: Tensor
    """The span of each of the other tokens."""
    teacher_first_G: Tensor
    teacher_rest_R: Tensor
    teacher_group_R: Tensor

    @property
    def size(self) -> int:
        """Number of spans."""
        return len(self.teacher_first_G)


@dataclass(frozen=True, eq=False)
class CommonTokens:
    """Ids of the tokens that both vocabularies have, and of those that only one has."""

    student_K: Tensor
    teacher_K: Tensor
    student_rest: Tensor
    teacher_rest: Tensor

    @property
    def share(self) -> float:
        return len(self.teacher_K) / max(1, len(self.teacher_K) + len(self.teacher_rest))

    @property
    def student_words(self) -> int:
        """Rows of the student's head beyond these are padding."""
        return len(self.student_K) + len(self.student_rest)

    @property
    def teacher_words(self) -> int:
        return len(self.teacher_K) + len(self.teacher_rest)


@dataclass(frozen=True, eq=False)
class AlignedTargets:
    """The teacher's hidden states at its own tokens of the same text, and the spans."""

    hidden_ME: Tensor
    ids_M: Tensor
    """The teacher's tokens that these states predict."""
    weight_WE: Tensor
    """The teacher's projection, without padding."""
    spans: BatchSpans
    common: CommonTokens
    loss: CrossTokenizerLoss

    @property
    def count(self) -> int:
        return len(self.spans.student_order_N)

    @property
    def vocabulary(self) -> int:
        return self.common.student_words

    def require(self, temperature: float, divergence: Divergence) -> None:
        """Any temperature and divergence can be used."""

    @torch.no_grad()
    def log_rest(self, temperature: float, chunk: int) -> Tensor:
        """For each span, the teacher's log-probability of its tokens after the first."""
        rest_R = self.spans.teacher_rest_R
        sums_G = self.hidden_ME.new_zeros(self.spans.size, dtype=torch.float32)
        for start in range(0, len(rest_R), chunk):
            at_C = rest_R[start : start + chunk]
            log_CW = self.log_probabilities(self.hidden_ME[at_C], temperature)
            own_C = log_CW.gather(1, self.ids_M[at_C][:, None])[:, 0]
            sums_G.index_add_(0, self.spans.teacher_group_R[start : start + chunk], own_C)
        return sums_G

    def log_probabilities(self, hidden_CE: Tensor, temperature: float) -> Tensor:
        logits_CW = F.linear(hidden_CE, self.weight_WE.to(hidden_CE.dtype)).float()
        return F.log_softmax(logits_CW / temperature, -1)


def span_terms(
    logits_CV: Tensor, student_rest_C: Tensor, targets: AlignedTargets, teacher_rest_C: Tensor, rows: slice,
    divergence: str, beta: float, temperature: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The summed divergence of the spans `rows`, and its gradients by the logits of their first tokens and by
    `student_rest_C`, the student's log-probability of the others."""
    total, grad_CV = logits_CV.new_zeros(()), torch.zeros_like(logits_CV)
    grad_C, words = torch.zeros_like(student_rest_C), targets.common.student_words
    firsts_C = targets.spans.teacher_first_G[rows]
    for start in range(0, len(logits_CV), _SPANS_AT_ONCE):
        part = slice(start, start + _SPANS_AT_ONCE)
        log_p = targets.log_probabilities(targets.hidden_ME[firsts_C[part]], temperature)
        log_p = log_p + teacher_rest_C[part, None]
        with torch.enable_grad():
            own, rest = logits_CV[part, :words].detach().requires_grad_(), student_rest_C[part].detach()
            rest.requires_grad_()
            log_q = F.log_softmax(own / temperature, -1) + rest[:, None]
            value = span_divergence(log_q, log_p, targets.common, targets.loss, divergence, beta).sum()
            grad_own, grad_rest = torch.autograd.grad(value, (own, rest))
        total = total + value.detach()
        grad_CV[part, :words], grad_C[part] = grad_own, grad_rest
    return total, grad_CV, grad_C


def span_divergence(
    log_q_CV: Tensor, log_p_CW: Tensor, common: CommonTokens, loss: CrossTokenizerLoss, divergence: str, beta: float
) -> Tensor:
    """Divergence of each span, from the logarithms of Q and P."""
    if loss == "uld":
        return sorted_distance(log_q_CV.exp(), log_p_CW.exp())
    log_p_CK, log_q_CK = log_p_CW[:, common.teacher_K], log_q_CV[:, common.student_K]
    terms_CK, _ = divergence_terms(divergence, log_p_CK, log_q_CK, beta)
    matched_C = terms_CK.sum(-1)
    if divergence != "jsd":
        mass_C = log_q_CK.exp().sum(-1) - log_p_CK.exp().sum(-1)
        matched_C = matched_C + (mass_C if divergence == "forward" else -mass_C)
    rest_C = sorted_distance(log_q_CV[:, common.student_rest].exp(), log_p_CW[:, common.teacher_rest].exp())
    return common.share * matched_C + (1 - common.share) * rest_C


def sorted_distance(student_CV: Tensor, teacher_CW: Tensor) -> Tensor:
    """Sum of |difference| of the probabilities by rank; the shorter list continues with zeros."""
    one, other = (values.sort(-1, descending=True).values for values in (student_CV, teacher_CW))
    width = max(one.shape[-1], other.shape[-1])
    one, other = (F.pad(values, (0, width - values.shape[-1])) for values in (one, other))
    return (one - other).abs().sum(-1)
