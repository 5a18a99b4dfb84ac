"""FLOPs and bytes on paper, against what can be worked out by hand."""

from functools import partial

import pytest
import torch
from torch import nn

from joulelab.data.batches import TensorBatch
from joulelab.zoo.cost import cost_summary, model_cost, training_bytes
from joulelab.zoo.objective import ObjectiveOutput, PlainObjective, Workload
from joulelab.zoo.registry import Size, WorkloadRequest, ZooEntry, find_model


def test_gpt2_costs_what_its_shape_states():
    layers, width, vocabulary, tokens = 12, 768, 50257, 1024
    cost = model_cost(WorkloadRequest(find_model("gpt2"), "base"))
    products = 2 * tokens * (12 * layers * width**2 + vocabulary * width)  # blocks and the output layer
    attention = 4 * layers * width * tokens**2  # scores and their sum over values, the whole square
    assert cost.parameters == 124_439_808
    assert cost.how == "fake tensors"
    assert cost.forward_flops == pytest.approx(products + attention, rel=1e-3)
    assert cost.training_flops == pytest.approx(3 * (products + attention), rel=1e-3)
    rule_of_thumb = 6 * cost.parameters * tokens + 12 * layers * width * tokens**2
    assert cost.training_flops == pytest.approx(rule_of_thumb, rel=0.02)


def test_twice_the_tokens_are_twice_the_products_and_four_times_the_attention():
    request = partial(WorkloadRequest, find_model("gpt2"), "tiny")
    half, whole = (model_cost(request(requested_shape={"tokens": tokens})).forward_flops for tokens in (32, 64))
    attention = 4 * 2 * 64 * 32**2
    assert whole - 2 * half == pytest.approx(2 * attention, rel=1e-6)


class Batches:
    batches_per_epoch = 1

    def __init__(self, shape):
        self.shape = shape

    def at(self, epoch, index):
        return TensorBatch({"x": torch.ones(self.shape)}, samples=self.shape[0], count=self.shape[0])


def entry_of(make, shape, parameters=1):
    """A model made by hand: `make()` builds it, and its loss is the sum of what comes out."""

    def loss(model, batch):
        return ObjectiveOutput(model(batch["x"]).sum(), batch.count)

    def prepare(request):
        return Workload(make(), PlainObjective(loss), Batches((request.rows_per_batch, *shape)))

    return ZooEntry("made", "f", "t", "i", "a", {"tiny": Size(parameters, {}, {}, 1)}, prepare, needs=("torch",))


def test_the_groups_of_a_convolution_make_its_backward_pass_cheaper_too():
    layer = partial(nn.Conv2d, 32, 32, kernel_size=7, padding=3, groups=32)
    make = lambda: nn.Sequential(nn.Conv2d(3, 32, 1), layer())  # noqa: E731
    cost = model_cost(WorkloadRequest(entry_of(make, (3, 16, 16))))
    first, depthwise = 2 * 16 * 16 * 32 * 3, 2 * 16 * 16 * 32 * 49
    assert cost.forward_flops == first + depthwise
    assert cost.training_flops == 2 * first + 3 * depthwise  # the input wants no gradient


class Curious(nn.Module):
    """Looks at its numbers, which fake ones do not have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) if float(self.layer(x).detach().sum()) < 1e9 else x


def test_a_small_model_that_looks_at_its_numbers_is_counted_on_real_ones():
    cost = model_cost(WorkloadRequest(entry_of(Curious, (8,))))
    assert cost.how == "a batch of 2"
    assert cost.forward_flops == 2 * 2 * 8 * 8


def test_a_large_one_is_not_counted_and_that_is_reported():
    cost = model_cost(WorkloadRequest(entry_of(Curious, (8,), parameters=10**9)))
    assert cost.training_flops is None
    assert "depends on tensor values" in cost.how
    assert cost_summary(WorkloadRequest(entry_of(Curious, (8,), parameters=10**9)))["bytes"] == []


def test_a_yes_or_no_question_to_fake_numbers_does_not_stop_the_count():
    class Asks(Curious):
        def forward(self, x):
            return self.layer(x) if bool((x > 2).any()) else self.layer(self.layer(x))

    assert model_cost(WorkloadRequest(entry_of(Asks, (8,)))).how == "fake tensors"


def test_the_bytes_of_training_by_precision_and_optimizer():
    make = lambda: nn.Linear(10, 20)  # noqa: E731
    cost = model_cost(WorkloadRequest(entry_of(make, (10,))))
    assert cost.parameters == 220
    full = training_bytes(cost, "fp32", "adamw")
    assert full == {
        "weights": 880, "gradients": 880, "optimizer state": 1760, "16-bit copies of the weights": 0,
    }  # fmt: skip
    assert training_bytes(cost, "bf16", "sgd")["16-bit copies of the weights"] == 440
    assert training_bytes(cost, "bf16", "sgd")["optimizer state"] == 880
    assert training_bytes(cost, "fp32", "adafactor")["optimizer state"] == 4 * (20 + 10 + 20)
