"""The vision models of the zoo: as large as they say, and their tiny sizes learn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from joulelab import lookup
from joulelab.train.config import TrainingConfig
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.trainer import SimpleTrainer, StepReport, TrainerCallbacks
from joulelab.zoo.objective import Workload, build_on_meta, count_parameters, prepare
from joulelab.zoo.registry import WorkloadRequest

CLASSIFIERS = ("resnet50", "resnet152", "convnext-large", "regnet-y-128gf")
SELF_SUPERVISED = ("vit-g14", "dinov2", "vjepa2")
VISION = CLASSIFIERS + SELF_SUPERVISED
CPU = torch.device("cpu")
# What the authors published, in millions; of the self-supervised ones without the heads that are thrown away later.
PUBLISHED_M = {
    ("resnet50", "base"): 25.6,
    ("resnet152", "base"): 60.2,
    ("convnext-large", "large"): 197.8,
    ("regnet-y-128gf", "128gf"): 644.8,
    ("vit-g14", "giant"): 1_134.8,
    ("dinov2", "small"): 21.6,
    ("dinov2", "base"): 85.7,
    ("dinov2", "large"): 303.2,
    ("dinov2", "giant"): 1_134.8,
    ("vjepa2", "large"): 303.9,
    ("vjepa2", "huge"): 631.6,
    ("vjepa2", "giant"): 1_012.2,
}
SIZES = [(name, size) for name in VISION for size in lookup.ZOO.resolve(name).sizes]


def tiny(name: str, **requested: Any) -> Workload:
    return prepare(WorkloadRequest(lookup.ZOO.resolve(name), "tiny", **requested))


def trained(workload: Workload, steps: int = 20, learning_rate: float = 1e-2) -> list[StepReport]:
    reports: list[StepReport] = []
    config = TrainingConfig(epochs=None, max_steps=steps, learning_rate=learning_rate, log_every_steps=1)
    torch.manual_seed(0)
    around = TrainerCallbacks(on_log=reports.append)
    SimpleTrainer(workload.model, workload.batches, workload.objective, config, NoOpStats(), around).train()
    return reports


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_a_size_has_the_parameters_it_states(name: str, size: str) -> None:
    entry = lookup.ZOO.resolve(name)
    model: Any = build_on_meta(lambda: prepare(WorkloadRequest(entry, size)).model)
    assert count_parameters(model) == entry.sizes[size].parameters
    if size != "tiny":
        published = model.backbone if hasattr(model, "backbone") else getattr(model, "encoder", model)
        assert round(count_parameters(published) / 1e6, 1) == PUBLISHED_M[name, size]


@pytest.mark.parametrize("name", VISION)
def test_twenty_steps_of_the_tiny_size_lower_the_loss(name: str) -> None:
    losses = [report.loss for report in trained(tiny(name))]
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-3:]) < 0.85 * sum(losses[:3])


@pytest.mark.parametrize("name", VISION)
def test_a_batch_follows_from_its_position_alone(name: str) -> None:
    first, again, other_seed = tiny(name), tiny(name), tiny(name, seed=1)
    drawn = first.batches.at(0, 3).to(CPU)
    torch.manual_seed(99)
    for key, value in again.batches.at(0, 3).to(CPU).tensors.items():
        assert torch.equal(value, drawn[key])
    pixels = next(key for key in ("pixels", "global_crops", "clips") if key in drawn.tensors)
    assert first.validation is not None
    for source, place in ((first.batches, (0, 4)), (first.batches, (1, 3)), (other_seed.batches, (0, 3))):
        assert not torch.equal(source.at(*place).to(CPU)[pixels], drawn[pixels])
    assert not torch.equal(first.validation.at(0, 3).to(CPU)[pixels], drawn[pixels])


@pytest.mark.parametrize("name", VISION)
def test_drawing_a_batch_leaves_the_random_numbers_of_training_alone(name: str) -> None:
    workload = tiny(name)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    workload.batches.at(0, 0).to(CPU)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("name", VISION)
def test_one_step_under_bf16_autocast_has_finite_gradients(name: str) -> None:
    workload = tiny(name)
    batch = workload.batches.at(0, 0).to(CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = workload.objective(workload.model, batch, torch.autograd.profiler.record_function)
    output.loss_sum.backward()
    assert output.loss_sum.dtype == torch.float32
    gradients = [weight.grad for weight in workload.model.parameters() if weight.grad is not None]
    assert gradients and all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("name", VISION)
def test_every_weight_of_the_model_is_trained_and_no_other(name: str) -> None:
    workload = tiny(name)
    torch.manual_seed(0)
    batch = workload.batches.at(0, 0).to(CPU)
    workload.objective(workload.model, batch, torch.autograd.profiler.record_function).loss_sum.backward()
    idle = [key for key, weight in workload.model.named_parameters() if weight.grad is None]
    assert idle == []
    for module in workload.objective.modules().values():
        assert not any(weight.requires_grad for weight in module.parameters())


@pytest.mark.parametrize("name", ["resnet50", "dinov2", "vjepa2"])
def test_the_model_is_one_graph_without_a_break(name: str) -> None:
    workload = tiny(name)
    batch = workload.batches.at(0, 0).to(CPU)
    compiled: Any = torch.compile(workload.model, fullgraph=True, backend="eager")
    for module in workload.objective.modules().values():
        module.compile(fullgraph=True, backend="eager")
    output = workload.objective(compiled, batch, torch.autograd.profiler.record_function)
    assert math.isfinite(float(output.loss_sum.detach()))


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_images_and_convolutions_lie_in_memory_with_the_channels_last(name: str) -> None:
    workload = tiny(name)
    pixels = workload.batches.at(0, 0).to(CPU)["pixels"]
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    kernels = [weight for weight in workload.model.parameters() if weight.ndim == 4]
    assert all(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)


def test_the_loss_of_a_classifier_is_a_sum_over_images() -> None:
    workload = tiny("convnext-large")  # no BatchNorm: an image's loss does not depend on its neighbors
    batch = workload.batches.at(0, 0).to(CPU)
    whole = workload.objective(workload.model, batch, torch.autograd.profiler.record_function)
    logits = workload.model(pixel_values=batch["pixels"]).logits.detach()
    one_by_one = -logits.log_softmax(-1)[torch.arange(batch.samples), batch["labels"]].sum()
    assert whole.count == batch.samples
    assert torch.allclose(whole.loss_sum.detach(), one_by_one, rtol=1e-4)
