"""Losses over a vocabulary: closed forms, and the chunked way equal to the plain way in values and gradients."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from joulelab.distill import chunked
from joulelab.distill.chunked import (
    Positions,
    TermWeights,
    VocabularyLoss,
    add_product,
    chunk_terms,
    compiled,
    padded_projection,
    project_chunk,
)
from joulelab.distill.losses import (
    NO_TARGET,
    cosine_distance_sum,
    logit_mse_sum,
    response_kl_sum,
    token_cross_entropy_sum,
)


def test_kl_of_two_words_is_the_formula():
    student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[2 * math.log(3.0), 0.0]])
    # at T=2 the teacher says (3/4, 1/4) and the student (1/2, 1/2)
    expected = 4 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert float(response_kl_sum(student, teacher, 2.0)) == pytest.approx(expected, rel=1e-6)


def test_equal_models_lose_nothing_to_each_other():
    logits = torch.randn(5, 7)
    assert float(response_kl_sum(logits, logits, 2.0)) == pytest.approx(0, abs=1e-6)
    assert float(logit_mse_sum(logits, logits)) == 0
    assert float(cosine_distance_sum(logits, 3 * logits)) == pytest.approx(0, abs=1e-5)


def test_a_uniform_guess_over_v_words_costs_log_v_and_no_target_costs_nothing():
    targets = torch.tensor([1, NO_TARGET, 4])
    assert float(token_cross_entropy_sum(torch.zeros(3, 8), targets)) == pytest.approx(2 * math.log(8))


def test_squares_are_summed_over_the_vocabulary():
    assert float(logit_mse_sum(torch.ones(2, 5), torch.zeros(2, 5))) == 10


def test_opposite_hidden_states_are_2_apart_and_padding_does_not_count():
    hidden = torch.randn(3, 4)
    assert float(cosine_distance_sum(hidden, -hidden, torch.tensor([1.0, 0.0, 1.0]))) == pytest.approx(4, rel=1e-5)


class Sides:
    """Features and projections of both sides, and the positions of a batch with padding."""

    def __init__(self, rows=23, words=37, own=8, reported=12):
        torch.manual_seed(0)
        self.features = torch.randn(rows, own, requires_grad=True)
        self.weight = nn.Parameter(torch.randn(words, own))
        self.bias = nn.Parameter(torch.randn(words))
        self.reported, self.teacher_weight = torch.randn(rows, reported), torch.randn(words, reported)
        order = torch.randperm(rows)
        targets = torch.full((rows,), NO_TARGET)
        targets[:6] = torch.randint(words, (6,))
        counted = (torch.arange(rows) < 19).float()
        self.positions = Positions(targets, counted, count=19, with_targets=6, order_N=order)

    def chunked(self, weights, chunk, bias=True):
        loss = VocabularyLoss(weights, chunk)
        projection = padded_projection(self.teacher_weight, None, self.features.dtype)
        bias_V = self.bias if bias else None
        return loss(self.features, self.weight, bias_V, self.positions, self.reported, projection)

    def plain(self, weights, bias=True):
        at = self.positions.order_N[:19]
        own = F.linear(self.features, self.weight, self.bias if bias else None)[at]
        reported = (self.reported @ self.teacher_weight.T)[at]
        targets = self.positions.targets_N[:19]
        return (
            weights.kl * response_kl_sum(own, reported, weights.temperature)
            + weights.mse * logit_mse_sum(own, reported)
            + weights.ce * token_cross_entropy_sum(own, targets)
        )

    def gradients(self, loss):
        inputs = (self.features, self.weight, self.bias)
        return [g for g in torch.autograd.grad(loss, inputs, allow_unused=True) if g is not None]


ALL = TermWeights(kl=1.5, mse=0.01, ce=6.0, temperature=2.0)


@pytest.mark.parametrize(
    "weights", [ALL, TermWeights(kl=1.0, temperature=3.0), TermWeights(ce=1.0), TermWeights(mse=2.0)]
)
@pytest.mark.parametrize("chunk", [1, 5, 19, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_chunked_equals_plain_in_value_and_gradient(weights, chunk, bias):
    sides = Sides()
    found, parts = sides.chunked(weights, chunk, bias)
    expected = sides.plain(weights, bias)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert set(parts) == set(weights.names)
    for own, plain in zip(sides.gradients(3 * found), sides.gradients(3 * expected), strict=True):
        torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_gradient_is_the_plain_one_to_rounding_and_padded_words_get_none(dtype):
    """37 words are padded to 64 in half precision."""
    sides = Sides()
    with torch.autocast("cpu", dtype=dtype):
        found, _ = VocabularyLoss(ALL, 5)(
            sides.features, sides.weight, sides.bias, sides.positions, sides.reported,
            padded_projection(sides.teacher_weight, None, dtype),
        )  # fmt: skip
    assert found.dtype == torch.float32
    expected = sides.plain(ALL)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=0.02)
    for own, plain in zip(sides.gradients(found), sides.gradients(expected), strict=True):
        assert own.shape == plain.shape
        assert float((own - plain).norm() / plain.norm()) < 0.02


def test_without_gradients_only_the_value_is_computed():
    sides = Sides()
    with torch.no_grad():
        found, parts = sides.chunked(ALL, 4)
    torch.testing.assert_close(found, sides.plain(ALL).detach(), rtol=1e-5, atol=1e-4)
    assert not found.requires_grad
    assert {name: value.requires_grad for name, value in parts.items()} == {"kl": False, "mse": False, "ce": False}


def test_a_weight_that_is_also_the_embedding_gets_both_gradients():
    torch.manual_seed(0)
    embedding = nn.Embedding(37, 8)
    ids, targets = torch.arange(9), torch.randint(37, (9,))
    positions = Positions(targets, torch.ones(9), 9, 9)

    def gradient(loss):
        embedding.weight.grad = None
        loss.backward()
        return embedding.weight.grad

    chunked = gradient(
        VocabularyLoss(TermWeights(ce=1.0), 4)(embedding(ids).tanh(), embedding.weight, None, positions)[0]
    )
    plain = gradient(token_cross_entropy_sum(embedding(ids).tanh() @ embedding.weight.T, targets))
    torch.testing.assert_close(chunked, plain, rtol=1e-4, atol=1e-5)


def test_a_term_without_a_weight_is_not_computed_and_needs_no_teacher():
    assert TermWeights() == TermWeights(kl=0.0, mse=0.0, ce=0.0, temperature=1.0)
    assert TermWeights(ce=1.0).names == ("ce",) and not TermWeights(ce=1.0).needs_teacher
    assert TermWeights(kl=1.0).needs_teacher and TermWeights(mse=1.0).needs_teacher


def test_a_chunk_without_teacher_features_has_only_cross_entropy():
    """Logits 0 and 0 after one feature and a weight of 0: the gradient of target 0 is (1/2 - 1, 1/2)."""
    features, projection = torch.ones(1, 1), padded_projection(torch.zeros(2, 1), None, torch.float32)
    targets, weights = torch.tensor([0]), torch.ones(1)
    sums, gradient = project_chunk(features, projection, None, projection, targets, weights, TermWeights(ce=1.0), 4.0)
    assert sums.tolist() == pytest.approx([0.0, 0.0, math.log(2)])
    assert gradient[0, :2].tolist() == pytest.approx([-2.0, 2.0])


def test_a_function_that_cannot_be_compiled_is_called_itself_from_then_on(monkeypatch):
    tried = []

    def not_compiled(function, mode):
        def call(value):
            tried.append(mode)
            raise torch._dynamo.exc.TorchDynamoException("no compiler")

        return call

    monkeypatch.setattr(torch, "compile", not_compiled)
    double = compiled(lambda value: 2 * value, "max-autotune")
    with pytest.warns(UserWarning, match="not compiled: no compiler"):
        assert double(3) == 6
    assert double(4) == 8 and tried == ["max-autotune-no-cudagraphs"]
    monkeypatch.setattr(torch, "compile", lambda function, mode: lambda value: (mode, value))
    assert compiled(abs, "default")(5) == (None, 5) and compiled(abs, "off") is abs


@pytest.mark.parametrize(("mode", "passed"), [("max-autotune", "max-autotune-no-cudagraphs"), ("default", None)])
def test_a_chunk_is_too_short_for_cuda_graphs(monkeypatch, mode, passed):
    modes = []
    monkeypatch.setattr(torch, "compile", lambda function, mode: modes.append(mode) or function)
    assert compiled(abs, mode)(-1) == 1 and modes == [passed]
    assert compiled(abs, "off") is abs


def test_a_term_needs_a_weight_and_what_it_compares_with():
    """Logits (0, 0) and (2, 0) of a token whose target is word 1: a cross-entropy of ln 2."""
    student, teacher, target = torch.zeros(1, 2), torch.tensor([[2.0, 0.0]]), torch.tensor([1])

    def terms(teacher, target, **weights):
        found, gradient = chunk_terms(student, teacher, target, torch.ones(1), TermWeights(temperature=1.0, **weights))
        return found.tolist(), gradient.tolist()[0]

    assert terms(teacher, target, kl=0.0, mse=0.0, ce=0.0) == ([0.0, 0.0, 0.0], [0.0, 0.0])
    assert terms(None, None, kl=1.0, mse=1.0, ce=1.0) == ([0.0, 0.0, 0.0], [0.0, 0.0])
    (kl, mse, ce), gradient = terms(None, target, kl=1.0, mse=1.0, ce=3.0)
    assert (kl, mse, ce) == (0.0, 0.0, pytest.approx(math.log(2))) and gradient == pytest.approx([1.5, -1.5])


def test_a_half_precision_product_is_added_to_float32_numbers_in_one_call_where_torch_can(monkeypatch):
    """No CPU build does it, so that a stand-in records the call; the result is the same."""
    calls = []

    def addmm(total, left, right, *, alpha, out_dtype, out):
        calls.append(out_dtype)
        return out.add_(left.float() @ right.float(), alpha=alpha)

    left, right = torch.randn(6, 4).bfloat16(), torch.randn(4, 5).bfloat16()
    plain, fused = torch.ones(6, 5), torch.ones(6, 5)
    add_product(plain, left, right, 0.5)
    monkeypatch.setattr(chunked, "_adds_to_float32", lambda device, dtype: True)
    monkeypatch.setattr(torch, "addmm", addmm)
    add_product(fused, left, right, 0.5)
    assert calls == [torch.float32]
    torch.testing.assert_close(fused, 1 + 0.5 * left.float() @ right.float())
    torch.testing.assert_close(plain, fused, rtol=0.01, atol=0.01)


def test_a_cpu_adds_half_precision_products_in_two_calls():
    assert not chunked._adds_to_float32(torch.device("cpu"), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_that_is_added_on_a_gpu_is_more_exact_than_the_rounded_one(dtype):
    torch.manual_seed(0)
    left, right = (torch.randn(*shape, device="cuda", dtype=dtype) for shape in ((512, 256), (256, 128)))
    exact = 3 + left.double() @ right.double() / 4
    fused, plain = torch.full((512, 128), 3.0, device="cuda"), torch.full((512, 128), 3.0, device="cuda")
    assert chunked._adds_to_float32(left.device, dtype)
    add_product(fused, left, right, 0.25)
    plain.add_(left @ right, alpha=0.25)
    assert (fused - exact).norm() < 0.1 * (plain - exact).norm()


def test_gradients_are_scaled_in_place_and_cast_in_the_same_pass():
    """A second float32 matrix of the vocabulary's size would be 1 GB for 128,256 words of 2,048 features."""
    found = torch.arange(12.0).view(4, 3)
    own = chunked._scaled(found.clone(), torch.tensor(0.5), 3, torch.bfloat16)
    assert own.dtype == torch.bfloat16 and own.tolist() == (found[:3] / 2).tolist()
    same = chunked._scaled(found, torch.tensor(0.5), 3, torch.float32)
    assert same.data_ptr() == found.data_ptr() and found[1].tolist() == [1.5, 2.0, 2.5]
    assert chunked._scaled(None, torch.tensor(0.5), 3, torch.float32) is None


def test_a_second_backward_pass_is_an_error_because_the_first_overwrites_the_gradients():
    sides = Sides()
    loss, _ = sides.chunked(ALL, 4)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once; compute the loss again"):
        loss.backward()


def test_a_bf16_weight_gets_the_rounded_float32_gradient():
    sides = Sides()
    weight = nn.Parameter(sides.weight.detach().bfloat16())
    sides.weight = nn.Parameter(weight.detach().float())
    exact = sides.gradients(2 * sides.chunked(TermWeights(ce=1.0), 4, bias=False)[0])[1]
    loss, _ = VocabularyLoss(TermWeights(ce=1.0), 4)(sides.features, weight, None, sides.positions)
    (2 * loss).backward()
    assert torch.equal(weight.grad, exact.bfloat16())


def test_the_product_of_a_weight_that_is_not_trained_is_not_computed(monkeypatch):
    """As with adapters: the gradient by the features needs only the other product."""
    sides = Sides()
    expected = sides.gradients(sides.chunked(ALL, 4)[0])[0]
    sides.weight.requires_grad_(False)
    sides.bias.requires_grad_(False)
    monkeypatch.setattr(chunked, "add_product", lambda *arguments: pytest.fail("a product for nothing"))
    (found,) = torch.autograd.grad(sides.chunked(ALL, 4)[0], sides.features)
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kl", "ce"), [(5.0, 2.0), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_kernel_has_the_sums_and_gradients_of_the_formulas(dtype, kl, ce, temperature):
    torch.manual_seed(0)
    student, teacher = (3 * torch.randn(64, 5000, device="cuda")).to(dtype), None
    if kl:
        teacher = (3 * torch.randn(64, 5000, device="cuda")).to(dtype)
    targets = torch.randint(0, 5000, (64,), device="cuda") if ce else None
    if targets is not None:
        targets[::3] = NO_TARGET
    positions = torch.ones(64, device="cuda")
    positions[5] = 0.0
    weights = TermWeights(kl=kl, ce=ce, temperature=temperature)
    sums, gradient = chunk_terms(student, teacher, targets, positions, weights)
    eye = chunked.Projection(torch.eye(5000, device="cuda", dtype=dtype), None)
    own_sums, own = chunked.label_and_kl_terms(student, eye, teacher, eye, targets, positions, weights, 4.0)
    torch.testing.assert_close(own_sums, sums, rtol=1e-4, atol=1e-4)
    assert (own.float() / 4 - gradient).norm() / gradient.norm() < (0.006 if dtype == torch.bfloat16 else 0.001)
