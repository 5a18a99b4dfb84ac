"""The loss against a cache or a live teacher: exact where it should be, refused where it would be wrong."""

import sys
import types
from dataclasses import replace

import pytest
import torch
from cached_positions import against, cached, make_manifest

from joulelab.distill.chunked import Projection
from joulelab.distill.logit_cache.codecs import CacheManifest
from joulelab.distill.logit_cache.kd_loss import (
    DenseTargets,
    KdLoss,
    KdWeights,
    Labels,
    TeacherHead,
    dense_chunk,
    sparse_chunk,
    target_positions,
)
from joulelab.distill.losses import DIVERGENCES, response_kl_sum, teacher_log_softmax, token_cross_entropy_sum
from joulelab.errors import ConfigError, JoulelabError

WORDS = 40


def dense(hidden_NE, head_VE, vocabulary=WORDS):
    return DenseTargets(hidden_NE, TeacherHead(head_VE), vocabulary)


def rows(positions=9, words=WORDS, features=8):
    """Hidden states, head and labels of one row in which every token but the first is trained."""
    torch.manual_seed(0)
    labels = torch.randint(words, (1, positions + 1))
    labels[0, 0] = -100
    return torch.randn(1, positions + 1, features), torch.randn(words, features), labels


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_a_student_equal_to_the_teacher_has_loss_0_with_hidden_states(divergence, temperature):
    hidden, head, labels = rows()
    hidden.requires_grad_()
    loss = KdLoss(0.0, temperature, divergence, chunk=4)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            sums = loss(hidden, head, dense(hidden[0, :-1].detach(), head), labels)
        assert float(sums.kl) == 0.0
        (gradient,) = torch.autograd.grad(sums.loss, hidden)
        assert float(gradient.abs().max()) == 0.0 if divergence == "forward" else float(gradient.abs().max()) < 1e-5


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradients_of_the_divergences_equal_autograd(divergence):
    torch.manual_seed(0)
    own, reported = torch.randn(5, 7, dtype=torch.float64, requires_grad=True), torch.randn(5, 7, dtype=torch.float64)

    def apart(own):
        return DIVERGENCES[divergence](torch.log_softmax(own, -1), torch.log_softmax(reported, -1))

    value, slope = apart(own)
    (expected,) = torch.autograd.grad(value.sum(), own)
    torch.testing.assert_close(slope, expected)
    p, q = torch.softmax(reported, -1), torch.softmax(own, -1)
    kl = {"forward": lambda: (p * (p / q).log()).sum(-1), "reverse": lambda: (q * (q / p).log()).sum(-1)}
    m = (p + q) / 2
    kl["jsd"] = lambda: 0.5 * ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1))
    torch.testing.assert_close(value, kl[divergence]())


def test_alpha_weighs_labels_against_the_teacher_and_only_trained_tokens_count():
    hidden, head, labels = rows()
    labels[0, 3:6] = -100
    reported, at = torch.randn(1, 10, 8), labels[0, 1:] != -100
    own = (hidden[0, :-1] @ head.T)[at]
    teacher = (reported[0, :-1] @ head.T)[at]
    targets = dense(reported[0, :-1][at], head)
    sums = KdLoss(0.25, 2.0, chunk=4)(hidden, head, targets, labels)
    ce, kl = token_cross_entropy_sum(own, labels[0, 1:][at]), response_kl_sum(own, teacher, 2.0)
    assert sums.count == 6
    torch.testing.assert_close(sums.loss, 0.25 * ce + 0.75 * kl)
    alone = KdLoss(1.0, chunk=4)(hidden, head, None, labels)
    torch.testing.assert_close(alone.loss, ce)
    assert alone.count == 6
    with pytest.raises(JoulelabError, match="6"):
        KdLoss(0.25, 2.0)(hidden, head, targets, labels, count=7)
    with pytest.raises(ConfigError, match="teacher"):
        KdLoss(0.5)(hidden, head, None, labels)


def test_trained_tokens_are_found_in_reading_order():
    labels = torch.tensor([[7, 1, -100, 2], [-100, -100, 3, -100]])
    order, words = target_positions(labels, 3)
    assert order.tolist() == [0, 2, 5] and words.tolist() == [1, 2, 3]


def test_another_temperature_and_other_divergences_are_refused_with_the_reason(tmp_path):
    teacher, labels = torch.randn(3, WORDS), torch.zeros(3, dtype=torch.long)
    targets = cached(tmp_path, make_manifest("rs50", 2.0, WORDS), teacher)
    with pytest.raises(ConfigError, match="has distributions at temperature 2, but 1 was requested"):
        against(targets, teacher, labels, temperature=1.0)
    for divergence in ("reverse", "jsd"):
        with pytest.raises(ConfigError, match=f"{divergence} needs the teacher's full distribution") as found:
            against(targets, teacher, labels, temperature=2.0, divergence=divergence)
        assert "hidden" in found.value.hint
    with pytest.raises(ConfigError, match="a different token"):
        targets.manifest.require(temperature=2.0, tokenizer_sha256="ef")
    targets.manifest.require(temperature=2.0, tokenizer_sha256="cd")
    exact = make_manifest("hidden", 2.0, WORDS, features=8, numbers="float32")
    exact.require(temperature=1.0, divergence="jsd")
    with pytest.raises(ValueError, match="features"):
        CacheManifest(**exact.model_dump() | {"features": None})


@pytest.mark.parametrize("codec", ["rs50", "topk20-ghost", "hidden"])
def test_rows_that_pad_a_vocabulary_are_ignored(tmp_path, codec):
    """Qwen's sizes: heads of 151,936 and of 152,064 rows; what the padding says is loud, and nobody listens."""
    shared, padded = 151_936, 152_064
    torch.manual_seed(0)
    hidden, head = torch.randn(1, 5, 4), torch.randn(padded, 4)
    head[shared:] = 50 * hidden[0, 0]
    labels = torch.tensor([[-100, 3, 5, 7, 11]])
    logits = hidden[0, :-1] @ head.T
    assert int(logits[0].argmax()) >= shared
    if codec == "hidden":
        targets = dense(hidden[0, :-1], head, shared)
    else:
        targets = cached(tmp_path, make_manifest(codec, vocabulary=shared), logits)
        assert int(targets.decoded().ids_NK.max()) < shared
    weight = head.clone().requires_grad_()
    KdLoss(0.0)(hidden, weight, targets, labels).loss.backward()
    assert float(weight.grad[shared:].abs().max()) == 0.0, "only labels teach a student to be silent there"
    narrow = head[:shared].clone().requires_grad_()
    KdLoss(0.0)(hidden, narrow, targets, labels).loss.backward()
    torch.testing.assert_close(weight.grad[:shared], narrow.grad, atol=1e-6, rtol=1e-4)
    with pytest.raises(ConfigError, match="rows"):
        KdLoss(0.0)(hidden, head[:100], targets, labels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_is_the_same_to_rounding(tmp_path, dtype):
    """A student who is nearly sure: from a rounded probability little would be left of 1 - p."""
    torch.manual_seed(0)
    hidden, head = torch.randn(1, 65, 16), torch.randn(100, 16)
    teacher = hidden[0, :-1] @ head.T
    labels = torch.cat([torch.tensor([-100]), teacher.argmax(1)])[None]
    targets = cached(tmp_path, make_manifest(vocabulary=100), teacher)

    def gradients(half):
        leaves = (hidden.clone().requires_grad_(), head.clone().requires_grad_())
        with torch.autocast("cpu", dtype=dtype, enabled=half):
            sums = KdLoss(0.5, chunk=16)(*leaves, targets, labels)
        assert sums.loss.dtype == torch.float32
        return float(sums.loss.detach()), torch.autograd.grad(sums.loss, leaves)

    (exact, expected), (found, rounded) = gradients(False), gradients(True)
    assert found == pytest.approx(exact, rel=0.02)
    for plain, half in zip(expected, rounded, strict=True):
        assert float((plain - half).norm() / plain.norm()) < 0.03


def test_a_padded_last_chunk_changes_nothing(tmp_path, monkeypatch):
    """Compiled chunks are all of one size."""
    hidden, head, labels = rows(positions=14)
    labels[0, 4:8] = -100
    at = labels[0, 1:] != -100
    logits = (torch.randn(14, 8) @ head.T)[at]
    sparse = [cached(tmp_path / name, make_manifest(name, vocabulary=WORDS), logits) for name in ("rs50", "topk5-gold")]
    monkeypatch.setattr("joulelab.distill.logit_cache.kd_loss.compiled", lambda function, mode: function)
    for targets in (*sparse, dense(torch.randn(10, 8), head), None):
        leaves = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        exact, whole = (
            KdLoss(1.0 if targets is None else 0.3, chunk=4, compile_mode=mode)(*leaves, targets, labels)
            for mode in ("off", "default")
        )
        assert whole.count == exact.count == 10
        torch.testing.assert_close(whole.loss, exact.loss)
        torch.testing.assert_close(torch.autograd.grad(whole.loss, leaves), torch.autograd.grad(exact.loss, leaves))


@pytest.mark.parametrize("teacher", ["sparse", "dense", None])
def test_a_chunk_is_one_graph_for_the_compiler(tmp_path, teacher):
    hidden, head, labels = rows()
    student = (hidden[0, :-1], Projection(head, None), Labels(labels[0, 1:], torch.ones(9, 1)))
    function, weights = dense_chunk, (KdWeights(0.5, 0.5, 1.0), 1.0)
    if teacher == "sparse":
        targets = cached(tmp_path, make_manifest(vocabulary=WORDS), hidden[0, :-1] @ head.T).decoded()
        function, arguments = sparse_chunk, (*student, targets.rows(slice(None)), WORDS, *weights)
    else:
        chunk = dense(torch.randn(9, 8), head).rows(slice(None)) if teacher else None
        arguments = (*student, chunk, "forward", *weights)
    sums, gradient = torch.compile(function, backend="eager", fullgraph=True)(*arguments)
    expected_sums, expected = function(*arguments)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(sums, expected_sums)


def formula_of_the_kernel(
    student_CV,
    teacher_CV,
    targets_C,
    weights_C,
    *,
    kl,
    ce,
    temperature,
    scale,
    divergence="forward",
    beta=0.5,
    shared=None,
):
    """`vocabulary_kernel.overwrite_with_gradient`."""
    trained_C, logits_CV = targets_C >= 0, student_CV.float()
    log_CV, ids_C1 = logits_CV.log_softmax(-1), targets_C.clamp(min=0)[:, None]
    entropy_C = torch.where(trained_C, -log_CV.gather(1, ids_C1)[:, 0], 0.0)
    gradient_CV = log_CV.exp().scatter_add(1, ids_C1, torch.full(ids_C1.shape, -1.0, device=log_CV.device))
    gradient_CV = ce * trained_C[:, None] * gradient_CV
    divergence_C = torch.zeros_like(entropy_C)
    if teacher_CV is not None:
        more = (beta,) if divergence == "jsd" else ()
        student_log_CW = (logits_CV[:, :shared] / temperature).log_softmax(-1)
        teacher_log_CW = teacher_log_softmax(teacher_CV[:, :shared], temperature)
        divergence_C, slope_CW = DIVERGENCES[divergence](student_log_CW, teacher_log_CW, *more)
        divergence_C = temperature**2 * weights_C * divergence_C
        gradient_CV[:, :shared] += kl * temperature * weights_C[:, None] * slope_CW
    student_CV.copy_(scale * gradient_CV)
    return torch.stack([divergence_C, entropy_C])


def gradients_by(tmp_path, targets, mode, dtype, device="cpu", divergence="forward", temperature=1.0, alpha=0.3):
    """Loss, its parts and gradients, with four labels that are not trained, and a head of two padded rows for a teacher
    that does not list tokens."""
    hidden, head, labels = rows(positions=30)
    labels[0, 4:8] = -100
    at = labels[0, 1:] != -100
    if targets == "dense":
        given = dense(torch.randn(30, 8)[at].to(device), torch.randn(WORDS, 8).to(device), WORDS - 2)
        labels = labels.clamp(max=WORDS - 3)
    else:
        logits = (torch.randn(30, 8) @ head.T)[at]
        given = cached(tmp_path / f"{targets}-{mode}", make_manifest(targets, vocabulary=WORDS), logits).to(device)
    leaves = [tensor.to(device).requires_grad_() for tensor in (hidden, head)]
    loss = KdLoss(alpha, temperature, divergence, chunk=16, compile_mode=mode)
    with torch.autocast(device, dtype=dtype):
        sums = loss(*leaves, given, labels.to(device))
    return (sums.loss, sums.ce, sums.kl), torch.autograd.grad(sums.loss, leaves)


DENSE = [
    ("dense", divergence, temperature) for divergence in ("forward", "reverse", "jsd") for temperature in (1.0, 2.0)
]
SPARSE = [(codec, "forward", 1.0) for codec in ("rs50", "topk5-gold", "topk5-renorm")]


@pytest.mark.parametrize(("targets", "divergence", "temperature"), [*SPARSE, *DENSE])
@pytest.mark.parametrize("mode", ["off", "default"])
@pytest.mark.parametrize("alpha", [0.3, 0.0])
def test_the_kernel_of_the_cross_entropy_serves_every_teacher(
    tmp_path, monkeypatch, targets, divergence, temperature, mode, alpha
):
    """With the formula in place of the kernel, which needs a GPU."""
    called = []
    kernel = lambda *a, **more: called.append(1) or formula_of_the_kernel(*a, **more)  # noqa: E731
    module = types.SimpleNamespace(overwrite_with_gradient=kernel)
    monkeypatch.setitem(sys.modules, "joulelab.distill.vocabulary_kernel", module)
    monkeypatch.setattr("joulelab.distill.logit_cache.kd_loss.compiled", lambda function, mode: function)
    asked = (targets, mode, torch.bfloat16, "cpu", divergence, temperature, alpha)
    expected, gradients = gradients_by(tmp_path, *asked)
    assert not called
    monkeypatch.setattr("joulelab.distill.logit_cache.kd_loss.takes_kernel", lambda device, dtype: True)
    own, own_gradients = gradients_by(tmp_path / "kernel", *asked)
    assert len(called) == 2
    torch.testing.assert_close(own, expected)
    torch.testing.assert_close(own_gradients, gradients, rtol=0.02, atol=1e-3)


def test_what_does_not_depend_on_logits_is_computed_in_parts_of_any_size(tmp_path, monkeypatch):
    module = types.SimpleNamespace(overwrite_with_gradient=formula_of_the_kernel)
    monkeypatch.setitem(sys.modules, "joulelab.distill.vocabulary_kernel", module)
    monkeypatch.setattr("joulelab.distill.logit_cache.kd_loss.takes_kernel", lambda device, dtype: True)
    whole = gradients_by(tmp_path / "whole", "topk5-gold", "off", torch.bfloat16)
    monkeypatch.setattr("joulelab.distill.logit_cache.kd_loss._LISTED_AT_ONCE", 7)
    torch.testing.assert_close(gradients_by(tmp_path / "parts", "topk5-gold", "off", torch.bfloat16), whole)


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("codec", ["rs50", "hybrid5", "topk5-gold"])
def test_a_batch_without_trained_tokens_has_no_loss(tmp_path, monkeypatch, codec, by_kernel):
    module = types.SimpleNamespace(overwrite_with_gradient=formula_of_the_kernel)
    monkeypatch.setitem(sys.modules, "joulelab.distill.vocabulary_kernel", module)
    monkeypatch.setattr("joulelab.distill.logit_cache.kd_loss.takes_kernel", lambda device, dtype: by_kernel)
    hidden, head, labels = rows()
    targets = cached(tmp_path, make_manifest(codec, vocabulary=WORDS), hidden[0, :-1] @ head.T)
    none = replace(targets, fixed_NF=targets.fixed_NF[:0], records_RS=targets.records_RS[:0])
    assert float(KdLoss(0.5)(hidden, head, none, torch.full_like(labels, -100)).loss) == 0


@pytest.mark.parametrize("codec", ["topk5-ghost", "rs50"])
def test_the_kernel_is_not_for_ghost_classes_and_padded_heads(tmp_path, monkeypatch, codec):
    """Their softmax is not that of the labels."""
    monkeypatch.setattr("joulelab.distill.logit_cache.kd_loss.takes_kernel", lambda device, dtype: True)
    monkeypatch.setattr(KdLoss, "_sparse_by_kernel", lambda *_: pytest.fail("the kernel was used"))
    hidden, head, labels = rows()
    shared = WORDS if codec == "topk5-ghost" else WORDS - 2
    targets = cached(tmp_path, make_manifest(codec, vocabulary=shared), hidden[0, :-1] @ head.T)
    KdLoss(0.5)(hidden, head, targets, labels.clamp(max=shared - 1))


@pytest.mark.gpu
@pytest.mark.parametrize(("targets", "divergence", "temperature"), [*SPARSE, *DENSE])
@pytest.mark.parametrize("mode", ["off", "default"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_teacher_by_the_kernel_on_a_gpu(tmp_path, monkeypatch, targets, divergence, temperature, mode, dtype):
    asked = (targets, mode, dtype, "cuda", divergence, temperature)
    own, own_gradients = gradients_by(tmp_path / "kernel", *asked)
    monkeypatch.setattr("joulelab.distill.logit_cache.kd_loss.takes_kernel", lambda device, dtype: False)
    expected, gradients = gradients_by(tmp_path, *asked)
    torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-3)
    for one, other in zip(own_gradients, gradients, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.01
