"""Losses over where an answer begins and ends: sums over windows, each window the mean of its start and its end.

Shapes: B windows, T tokens. Softmax goes over the positions that an answer can have, the paragraph and the class token;
padding and the question are left out, as they are when an answer is looked for.
"""

from __future__ import annotations

from torch import Tensor

from joulelab.distill.losses import cross_entropy_sum, soft_target_kl_sum

# Finite, so that two masked positions subtract to 0 and not to NaN; its exponential is 0 in float32 at any temperature
# below a million.
_IMPOSSIBLE = -1e9

Span = tuple[Tensor, Tensor]
"""Start and end: logits_BT each."""


def span_ce_sum(student: Span, spans_B2: Tensor, answerable_BT: Tensor) -> Tensor:
    start, end = (
        cross_entropy_sum(_masked(logits_BT, answerable_BT), spans_B2[:, edge])
        for edge, logits_BT in enumerate(student)
    )
    return (start + end) / 2


def span_kl_sum(student: Span, teacher: Span, answerable_BT: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student)."""
    start, end = (
        soft_target_kl_sum(_masked(own_BT, answerable_BT), _masked(said_BT, answerable_BT), temperature)
        for own_BT, said_BT in zip(student, teacher, strict=True)
    )
    return (start + end) / 2


def _masked(logits_BT: Tensor, answerable_BT: Tensor) -> Tensor:
    return logits_BT.float().masked_fill(~answerable_BT, _IMPOSSIBLE)
