"""Whisper, LLaVA, PNA, DimeNet and GFlowNet: as large as they say, deterministic, and able to learn."""

import math

import pytest
import torch

from joulelab.errors import ConfigError
from joulelab.train.config import TrainingConfig
from joulelab.train.stats.hooks import NoOpStats
from joulelab.train.trainer import SimpleTrainer, TrainerCallbacks
from joulelab.zoo import objective
from joulelab.zoo.objective import build_on_meta, count_parameters, prepare
from joulelab.zoo.registry import WorkloadRequest, absent_packages, find_model
from joulelab.zoo.tasks import image_text

LEARNING_RATE = 1e-2
NAMES = ("whisper", "llava", "pna", "dimenet", "gflownet")
FROM_TRANSFORMERS = ("whisper", "llava")


def tiny(name, **requested):
    entry = find_model(name)
    if absent := absent_packages(entry):
        pytest.skip(f"{name} needs {' and '.join(absent)}")
    return prepare(WorkloadRequest(entry, size_name="tiny", **requested))


def on_cpu(batch):
    return batch.to(torch.device("cpu"))


def tensors_of(batch):
    return getattr(batch, "tensors", None) or {"noise": batch.noise}


def train(workload, learning_rate, steps):
    losses = []
    config = TrainingConfig(epochs=None, max_steps=steps, learning_rate=learning_rate, log_every_steps=1)
    around = TrainerCallbacks(on_log=lambda report: losses.append(report.loss))
    trainer = SimpleTrainer(workload.model, workload.batches, workload.objective, config, NoOpStats(), around)
    trainer.train()
    return losses, trainer.position


@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_lower_the_loss(name):
    workload = tiny(name)
    losses, position = train(workload, LEARNING_RATE, 20)
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert position.samples == 20 * find_model(name).sizes["tiny"].batch_size
    assert position.tokens > position.samples  # tokens, atoms or fragments


@pytest.mark.parametrize("name", NAMES)
def test_a_training_can_be_replayed_bit_for_bit(name):
    first, second = (train(tiny(name), LEARNING_RATE, 3)[0] for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", NAMES)
def test_batches_are_fresh_and_follow_from_their_position(name):
    one, same = tiny(name), tiny(name)
    first, again, next_one = on_cpu(one.batches.at(0, 0)), on_cpu(same.batches.at(0, 0)), on_cpu(one.batches.at(0, 1))
    for key, value in tensors_of(first).items():
        assert torch.equal(value, tensors_of(again)[key])
    assert any(not torch.equal(value, tensors_of(next_one)[key]) for key, value in tensors_of(first).items())


@pytest.mark.parametrize("name", NAMES)
def test_held_out_batches_are_others(name):
    workload = tiny(name)
    trained, held_out = on_cpu(workload.batches.at(0, 0)), on_cpu(workload.validation.at(0, 0))
    output = workload.objective(workload.model, held_out, torch.autograd.profiler.record_function)
    assert torch.isfinite(output.loss_sum) and output.count >= held_out.samples
    shared = tensors_of(trained).keys() & tensors_of(held_out).keys()
    assert any(not torch.equal(tensors_of(trained)[key], tensors_of(held_out)[key]) for key in shared)


@pytest.mark.parametrize("name", NAMES)
def test_every_trained_parameter_gets_a_gradient(name):
    """Ranks that average gradients would wait for the others for ever."""
    workload = tiny(name)
    batch = on_cpu(workload.batches.at(0, 0))
    workload.objective(workload.model, batch, torch.autograd.profiler.record_function).loss_sum.backward()
    without = [key for key, value in workload.model.named_parameters() if value.requires_grad and value.grad is None]
    assert without == []


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name in FROM_TRANSFORMERS for size in find_model(name).sizes]
)
def test_the_parameters_are_as_many_as_stated(name, size):
    request = WorkloadRequest(find_model(name), size_name=size)
    if name == "llava":
        model = build_on_meta(lambda: image_text.build(request))
    else:
        model = build_on_meta(lambda: objective.build(request, max_source_positions=request.shape["frames"] // 2))
    assert count_parameters(model) == request.size.parameters


@pytest.mark.parametrize(("name", "total"), [("whisper", 37_760_640), ("llava", 7_063_427_072)])
def test_with_what_is_not_trained_they_have_the_published_number(name, total):
    request = WorkloadRequest(find_model(name))
    model = build_on_meta(lambda: image_text.build(request) if name == "llava" else objective.build(request))
    assert sum(parameter.numel() for parameter in model.parameters()) == total


@pytest.mark.parametrize("name", ["pna", "dimenet", "gflownet"])
def test_the_parameters_of_small_models_are_as_many_as_stated(name):
    entry = find_model(name)
    if absent := absent_packages(entry):
        pytest.skip(f"{name} needs {' and '.join(absent)}")
    for size_name, size in entry.sizes.items():
        model = prepare(WorkloadRequest(entry, size_name=size_name)).model
        assert count_parameters(model) == size.parameters


@pytest.mark.parametrize("name", FROM_TRANSFORMERS)
def test_a_step_in_bf16(name):
    workload = tiny(name)
    batch = on_cpu(workload.batches.at(0, 0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = workload.objective(workload.model, batch, torch.autograd.profiler.record_function)
    output.loss_sum.backward()
    assert output.loss_sum.dtype == torch.float32
    assert all(torch.isfinite(p.grad).all() for p in workload.model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["pna", "dimenet", "gflownet"])
def test_there_are_no_weights_to_start_from(name):
    with pytest.raises(ConfigError, match=f"{name} cannot start from 'published'"):
        tiny(name, weights="published")


@pytest.mark.parametrize("name", ["llava", "gflownet"])
def test_a_dataset_that_it_cannot_read_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=f"{name} cannot read the dataset"):
        tiny(name, dataset=str(tmp_path))
