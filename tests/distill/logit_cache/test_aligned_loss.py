"""The loss over spans of text against a plain loop, against numbers computed by hand, and against GOLD of TRL."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from joulelab.distill.logit_cache.aligned_loss import AlignedTargets, BatchSpans, CommonTokens, sorted_distance
from joulelab.distill.logit_cache.kd_loss import DenseTargets, KdLoss, TeacherHead

STUDENT, TEACHER = 13, 17
COMMON = CommonTokens(
    torch.tensor([0, 2, 3, 7, 9]), torch.tensor([4, 1, 0, 16, 8]),
    torch.tensor([1, 4, 5, 6, 8, 10, 11, 12]), torch.tensor([2, 3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15]),
)  # fmt: skip
# student's trained tokens -> teacher's: one to one, two to one, one to three, two to two; tokens 1 and 7 in no span
GROUPS = [([0], [0]), ([2, 3], [1]), ([4], [2, 3, 4]), ([5, 6], [6, 7]), ([8], [8])]


def spans_of(groups, count):
    inside = {token for own, _ in groups for token in own}
    order = [own[0] for own, _ in groups] + [t for own, _ in groups for t in own[1:]]
    order += [token for token in range(count) if token not in inside]
    return BatchSpans(
        torch.tensor(order),
        torch.tensor([g for g, (own, _) in enumerate(groups) for _ in own[1:]], dtype=torch.long),
        torch.tensor([other[0] for _, other in groups]),
        torch.tensor([t for _, other in groups for t in other[1:]], dtype=torch.long),
        torch.tensor([g for g, (_, other) in enumerate(groups) for _ in other[1:]], dtype=torch.long),
    )


def inputs(seed=0, padding=0):
    torch.manual_seed(seed)
    hidden, head = torch.randn(2, 7, 6), torch.randn(STUDENT + padding, 6)
    labels = torch.randint(STUDENT, (2, 7))
    labels[0, 0] = labels[1, 0] = labels[0, 1] = labels[0, 2] = labels[1, 4] = -100  # nine trained tokens
    teacher, teacher_head, ids = torch.randn(9, 5), torch.randn(TEACHER, 5), torch.randint(TEACHER, (9,))
    return hidden, head, labels, teacher, teacher_head, ids


def slow_loss(hidden, head, labels, teacher, teacher_head, ids, kind, divergence, beta, alpha, T):
    """Span by span, token by token, over full logits."""
    at = labels[:, 1:] != -100
    logits, tokens = (hidden @ head.T)[:, :-1][at], labels[:, 1:][at]
    q, p = F.softmax(logits[:, :STUDENT] / T, -1), F.softmax(teacher @ teacher_head.T / T, -1)
    total = logits.new_zeros(())
    for own, other in GROUPS:
        Q, P = q[own[0]], p[other[0]]
        for token in own[1:]:
            Q = Q * q[token, tokens[token]]
        for token in other[1:]:
            P = P * p[token, ids[token]]
        if kind == "uld":
            total = total + by_rank(Q, P)
            continue
        matched = logits.new_zeros(())
        for mine, theirs in zip(COMMON.student_K, COMMON.teacher_K, strict=True):
            one, two = Q[mine], P[theirs]
            m = beta * two + (1 - beta) * one
            matched = (
                matched
                + {
                    "forward": two * (two / one).log() - two + one,
                    "reverse": one * (one / two).log() - one + two,
                    "jsd": beta * two * (two / m).log() + (1 - beta) * one * (one / m).log(),
                }[divergence]
            )
        share = len(COMMON.student_K) / TEACHER
        total = total + share * matched + (1 - share) * by_rank(Q[COMMON.student_rest], P[COMMON.teacher_rest])
    return alpha * F.cross_entropy(logits, tokens, reduction="sum") + (1 - alpha) * T * T * total


def by_rank(Q, P):
    one, other = (sorted(values, key=lambda value: -float(value.detach())) for values in (Q, P))
    zero = Q.new_zeros(())
    one, other = one + [zero] * (len(other) - len(one)), other + [zero] * (len(one) - len(other))
    return sum((a - b).abs() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(("alpha", "temperature"), [(0.0, 1.0), (0.3, 2.0)])
@pytest.mark.parametrize(
    ("kind", "divergence", "beta"),
    [("gold", "forward", 0.5), ("gold", "reverse", 0.5), ("gold", "jsd", 0.2), ("uld", "forward", 0.5)],
)
def test_value_and_gradients_are_those_of_a_plain_loop(kind, divergence, beta, alpha, temperature, padding):
    hidden, head, labels, *teacher = inputs(padding=padding)
    targets = AlignedTargets(teacher[0], teacher[2], teacher[1], spans_of(GROUPS, 9), COMMON, kind)
    found = []
    for ours in (True, False):
        own = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        if ours:
            # chunks of 4 positions: spans and their later tokens are in different chunks
            value = KdLoss(alpha, temperature, divergence, chunk=4, beta=beta)(*own, targets, labels).loss
        else:
            value = slow_loss(*own, labels, *teacher, kind, divergence, beta, alpha, temperature)
        found.append([value.detach(), *torch.autograd.grad(value, own)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-6)


def test_a_span_of_two_tokens_by_hand():
    """The teacher writes `ab` as one token with probability 0.5; the student as a (0.8) and b (0.25). P = (0.5, 0.5),
    Q = 0.25 (0.8, 0.2) = (0.2, 0.05)."""
    head, hidden = torch.eye(2), torch.tensor([[[0.8, 0.2], [0.75, 0.25], [1.0, 0.0]]]).clamp(min=1e-9).log()
    labels = torch.tensor([[-100, 0, 1]])
    common = CommonTokens(torch.tensor([1]), torch.tensor([1]), torch.tensor([0]), torch.tensor([0]))
    targets = AlignedTargets(
        torch.tensor([[0.5, 0.5]]).log(), torch.tensor([0]), torch.eye(2), spans_of([([0, 1], [0])], 2), common, "uld"
    )
    sums = KdLoss(0.0)(hidden, head, targets, labels)
    assert float(sums.kl) == pytest.approx(abs(0.5 - 0.2) + abs(0.5 - 0.05), rel=1e-5)
    gold = AlignedTargets(targets.hidden_ME, targets.ids_M, targets.weight_WE, targets.spans, common, "gold")
    matched = 0.5 * math.log(0.5 / 0.05) - 0.5 + 0.05
    expected = 0.5 * matched + 0.5 * abs(0.5 - 0.2)
    assert float(KdLoss(0.0)(hidden, head, gold, labels).kl) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_with_one_vocabulary_it_is_the_usual_divergence(divergence):
    hidden, head, labels, teacher, teacher_head, _ = inputs()
    teacher_head, everything = teacher_head[:STUDENT], torch.arange(STUDENT)
    tokens = labels[:, 1:][labels[:, 1:] != -100]
    none = torch.zeros(0, dtype=torch.long)
    common = CommonTokens(everything, everything, none, none)
    groups = [([k], [k]) for k in range(9)]
    aligned = AlignedTargets(teacher, tokens, teacher_head, spans_of(groups, 9), common, "gold")
    usual = DenseTargets(teacher, TeacherHead(teacher_head), STUDENT)
    found = []
    for targets in (aligned, usual):
        own = [hidden.clone().requires_grad_(), head.clone().requires_grad_()]
        value = KdLoss(0.4, 1.5, divergence, chunk=4)(*own, targets, labels).loss
        found.append([value.detach(), *torch.autograd.grad(value, own)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-6)


def test_sorted_probabilities_by_hand():
    student, teacher = torch.tensor([[0.1, 0.6, 0.3]]), torch.tensor([[0.25, 0.25, 0.4, 0.1]])
    assert float(sorted_distance(student, teacher)) == pytest.approx(0.2 + 0.05 + 0.15 + 0.1)


def test_the_loss_is_that_of_gold_in_trl():
    pytest.importorskip("trl")
    from trl.experimental.gold.gold_trainer import ULDLoss

    hidden, head, labels, teacher, teacher_head, ids = inputs()
    targets = AlignedTargets(teacher, ids, teacher_head, spans_of(GROUPS, 9), COMMON, "gold")
    ours = KdLoss(0.0, 1.0, "jsd", chunk=4, beta=0.3)(hidden, head, targets, labels).kl / len(GROUPS)
    peer = ULDLoss.__new__(ULDLoss)
    torch.nn.Module.__init__(peer)
    peer.token_merge_strategy, peer.beta, peer.hybrid_matched_weight = "observed", 0.3, None
    pairs = dict(zip(COMMON.teacher_K.tolist(), COMMON.student_K.tolist(), strict=True))
    peer._teacher_matched_ids, peer._student_matched_ids = set(pairs), set(pairs.values())
    peer.mapping_tensor = torch.tensor([pairs.get(number, -1) for number in range(TEACHER)])
    at = labels[:, 1:] != -100
    student_probabilities = F.softmax((hidden @ head.T)[:, :-1][at], -1)
    merged = [
        peer._merge_probabilities_with_alignment_groups(values, groups, tokens.tolist())
        for values, groups, tokens in (
            (student_probabilities, [own for own, _ in GROUPS], labels[:, 1:][at]),
            (F.softmax(teacher @ teacher_head.T, -1), [other for _, other in GROUPS], ids),
        )
    ]
    torch.testing.assert_close(ours, peer._compute_hybrid_uld_loss(*merged), rtol=1e-4, atol=1e-6)
