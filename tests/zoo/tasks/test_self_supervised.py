"""Self-distillation and latent prediction: the terms by closed forms, the moving averages, what is hidden."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from joulelab import lookup
from joulelab.data.synthetic import generator_on
from joulelab.errors import ConfigError
from joulelab.zoo.objective import Workload, prepare
from joulelab.zoo.registry import WorkloadRequest
from joulelab.zoo.tasks.latent_prediction import clip_distance
from joulelab.zoo.tasks.masked_patches import MovingAverage, gather_tokens, ranked_patches, repeat_over_time
from joulelab.zoo.tasks.self_distillation import (
    _as_mask,
    _stochastic_depth,
    balanced_targets,
    crop_agreement,
    koleo,
    patch_agreement,
    random_crops,
)

CPU = torch.device("cpu")
record = torch.autograd.profiler.record_function


def tiny(name: str, **requested: Any) -> Workload:
    return prepare(WorkloadRequest(lookup.ZOO.resolve(name), "tiny", **requested))


def test_balanced_targets_are_probabilities_that_use_every_prototype() -> None:
    # many more samples than prototypes, all preferring the first one
    scores = torch.randn(200, 5, generator=generator_on(CPU, 0)) * 0.1 + torch.tensor([1.0, 0, 0, 0, 0])
    targets = balanced_targets(scores, temperature=0.5)
    assert torch.allclose(targets.sum(1), torch.ones(200), atol=1e-5)
    assert torch.allclose(targets.sum(0), torch.full((5,), 40.0), rtol=0.02)


def test_balanced_targets_of_equal_scores_are_uniform() -> None:
    assert torch.allclose(balanced_targets(torch.full((6, 4), 0.3), 0.07), torch.full((6, 4), 0.25))


def test_balanced_targets_are_those_of_the_textbook_iteration() -> None:
    scores = torch.randn(7, 4, generator=generator_on(CPU, 1))
    expected = torch.exp(scores.double() / 0.7)
    for _ in range(3):
        expected = expected / expected.sum(0, keepdim=True) / 4
        expected = expected / expected.sum(1, keepdim=True) / 7
    assert torch.allclose(balanced_targets(scores, 0.7).double(), expected * 7, atol=1e-6)


def test_crop_agreement_is_the_mean_over_pairs_of_different_crops() -> None:
    random = generator_on(CPU, 2)
    global_, local = torch.randn(2, 3, 5, generator=random), torch.randn(4, 3, 5, generator=random)
    targets = torch.rand(2, 3, 5, generator=random).softmax(-1)
    crops = torch.cat([global_, local])
    pairs = [
        -(targets[seen] * (crops[crop] / 0.1).log_softmax(-1)).sum()
        for seen in range(2)
        for crop in range(6)
        if seen != crop
    ]
    assert len(pairs) == 2 + 8
    assert torch.allclose(crop_agreement(global_, local, targets, 0.1), torch.stack(pairs).mean(), rtol=1e-5)


def test_agreement_with_a_uniform_student_is_the_logarithm_of_the_prototypes() -> None:
    targets = torch.eye(8)[:6]
    assert patch_agreement(torch.zeros(6, 8), targets, 0.1, patches_per_image=3).item() == pytest.approx(
        2 * math.log(8)
    )


def test_koleo_is_minus_the_log_distance_to_the_nearest_neighbor() -> None:
    # on the unit circle at 0, 90 and 180 degrees (lengths do not matter): everyone's nearest is 90 degrees away
    features = torch.tensor([[2.0, 0.0], [0.0, 0.5], [-3.0, 0.0]])
    assert koleo(features).item() == pytest.approx(-3 * math.log(math.sqrt(2)), abs=1e-5)


def test_koleo_pushes_neighbors_apart_and_leaves_a_single_image_alone() -> None:
    features = torch.tensor([[1.0, 0.0], [1.0, 0.2]], requires_grad=True)
    koleo(features).backward()
    assert features.grad is not None
    assert features.grad[0, 1] > 0 > features.grad[1, 1]  # a step against the gradient turns them away from each other
    assert koleo(torch.randn(1, 4)).item() == 0.0


def test_a_moving_average_keeps_its_share_and_takes_the_rest() -> None:
    followed = nn.Linear(3, 2)
    average = MovingAverage(followed, momentum=0.9)
    before = [weight.clone() for weight in average.module.parameters()]
    with torch.no_grad():
        for weight in followed.parameters():
            weight.add_(torch.randn_like(weight))
    average.update()
    for ours, old, new in zip(average.module.parameters(), before, followed.parameters(), strict=True):
        assert not ours.requires_grad
        assert torch.allclose(ours, 0.9 * old + 0.1 * new, atol=1e-6)


@pytest.mark.parametrize(("name", "kept", "followed"), [("dinov2", 0.9, ""), ("vjepa2", 0.996, "encoder")])
def test_after_a_step_the_teacher_follows_the_student(name: str, kept: float, followed: str) -> None:
    workload = tiny(name)
    (teacher,) = workload.objective.modules().values()
    student = workload.model.get_submodule(followed)
    old = {key: value.clone() for key, value in teacher.state_dict().items()}
    assert all(torch.equal(value, student.state_dict()[key]) for key, value in old.items())
    output = workload.objective(workload.model, workload.batches.at(0, 0).to(CPU), record)
    output.loss_sum.backward()
    torch.optim.SGD(workload.model.parameters(), lr=0.1).step()
    workload.objective.after_step(workload.model)
    moved = 0
    for key, value in teacher.state_dict().items():
        new = student.state_dict()[key]
        assert torch.allclose(value, kept * old[key] + (1 - kept) * new, atol=1e-6)
        moved += not torch.equal(new, old[key])
    assert moved == len(old)


def test_the_parts_of_self_distillation_add_up_to_its_loss() -> None:
    workload = tiny("dinov2")
    output = workload.objective(workload.model, workload.batches.at(0, 0).to(CPU), record)
    assert set(output.parts) == {"dino", "ibot", "koleo"}
    assert torch.allclose(sum(output.parts.values()), output.loss_sum.detach())
    assert not any(part.requires_grad for part in output.parts.values())


def test_the_student_does_not_see_what_is_hidden_and_the_teacher_does() -> None:
    workload = tiny("dinov2")
    batch = workload.batches.at(0, 0).to(CPU)
    model: Any = workload.model.eval()  # no layer is skipped
    side = model.backbone.config.patch_size
    changed = batch["global_crops"].clone()
    for row, patches in enumerate(batch["hidden"]):
        for patch in patches:
            top, left = divmod(int(patch), changed.shape[-1] // side)
            changed[row, :, top * side : (top + 1) * side, left * side : (left + 1) * side] += 1.0
    with torch.no_grad():
        as_student = [model(crops, batch["hidden"], batch["local_crops"]) for crops in (batch["global_crops"], changed)]
        as_teacher = [model(crops, batch["hidden"]) for crops in (batch["global_crops"], changed)]
    assert torch.allclose(as_student[0].patches, as_student[1].patches, atol=1e-6)
    assert not torch.allclose(as_teacher[0].patches, as_teacher[1].patches, atol=1e-3)


def test_the_context_encoder_does_not_see_what_is_hidden() -> None:
    workload = tiny("vjepa2")
    batch = workload.batches.at(0, 0).to(CPU)
    model: Any = workload.model
    unit, frames, side = 8, batch["clips"].shape[1], batch["clips"].shape[-1]
    grid = side // unit
    visible = set(batch["visible0"][0].tolist())
    assert visible.isdisjoint(batch["hidden0"][0].tolist())
    assert len(visible) + batch["hidden0"].shape[1] == frames // 2 * grid**2
    changed = batch["clips"].clone()
    for place in batch["hidden0"][0].tolist():
        time, patch = divmod(place, grid**2)
        top, left = divmod(patch, grid)
        changed[0, 2 * time : 2 * time + 2, :, top * unit : (top + 1) * unit, left * unit : (left + 1) * unit] += 1.0
    with torch.no_grad():
        before, after = (model.encoder(pixels, batch["visible0"]) for pixels in (batch["clips"], changed))
    assert torch.allclose(before, after, atol=1e-6)


def test_encoding_all_patches_is_what_the_library_itself_does() -> None:
    workload = tiny("vjepa2")
    clips = workload.batches.at(0, 0).to(CPU)["clips"]
    encoder: Any = workload.model.get_submodule("encoder")
    everywhere = torch.arange(2 * 16).expand(len(clips), -1)
    with torch.no_grad():
        theirs = encoder.vit(clips).last_hidden_state
        assert torch.allclose(encoder(clips), theirs, atol=1e-5)
        assert torch.allclose(encoder(clips, everywhere), theirs, atol=1e-5)


def test_the_distance_of_clips_is_a_mean_of_absolute_differences() -> None:
    assert clip_distance(torch.zeros(2, 3, 4), torch.full((2, 3, 4), -0.5)).tolist() == [0.5, 0.5]


def test_hidden_patches_lie_together_and_are_always_as_many() -> None:
    ranked = ranked_patches(50, grid=8, blobs=3, generator=generator_on(CPU, 0))
    assert torch.equal(ranked.sort(dim=1).values, torch.arange(64).expand(50, -1))
    mask = _as_mask(ranked[:, :16], crops=50, patches=64).view(50, 8, 8)
    assert mask.sum(dim=(1, 2)).tolist() == [16] * 50
    side_by_side = (mask[:, :, 1:] & mask[:, :, :-1]).sum() / 50
    assert side_by_side > 1.5 * 7 * 8 * (16 / 64) ** 2  # of 56 pairs, at random a sixteenth would be hidden together


def test_patches_through_time_are_the_same_in_every_frame() -> None:
    assert repeat_over_time(torch.tensor([[1, 3]]), frames=3, patches_per_frame=4).tolist() == [[1, 3, 5, 7, 9, 11]]
    tokens = torch.arange(6.0).view(1, 6, 1)
    assert gather_tokens(tokens, torch.tensor([[4, 0]])).flatten().tolist() == [4.0, 0.0]


def test_skipping_a_layer_keeps_its_mean_effect() -> None:
    torch.manual_seed(0)

    class AddOne(nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return tokens + 1

    through = _stochastic_depth(AddOne(), torch.zeros(10, 2, 3), skipped_share=0.4)
    assert sorted(through[:, 0, 0].tolist()) == [0.0] * 4 + [pytest.approx(10 / 6)] * 6
    assert torch.equal(_stochastic_depth(AddOne(), torch.zeros(4, 2, 3), 0.0), torch.ones(4, 2, 3))


def test_crops_show_parts_of_their_own_image() -> None:
    images = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 3, 16, 16) * 100
    crops = random_crops(images, crops=2, side=8, area=(0.1, 0.5), generator=generator_on(CPU, 3))
    assert crops.shape == (6, 3, 8, 8)
    assert (crops.mean(dim=(1, 2, 3)) / 100).round().clamp(0, 2).tolist()[0::3] == [0.0, 0.0]
    assert torch.allclose(crops.std(dim=(1, 2, 3)), torch.zeros(6), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape"), [("dinov2", {"side": 30}), ("dinov2", {"local_side": 12}), ("vjepa2", {"frames": 3})]
)
def test_a_shape_that_patches_do_not_fill_is_refused(name: str, shape: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="not a multiple"):
        tiny(name, requested_shape=shape)


def test_clips_of_another_shape_can_be_requested() -> None:
    workload = tiny("vjepa2", requested_shape={"frames": 8, "side": 48}, batch_size=2)
    batch = workload.batches.at(0, 0).to(CPU)
    assert batch["clips"].shape == (2, 8, 3, 48, 48)
    assert math.isfinite(float(workload.objective(workload.model, batch, record).loss_sum.detach()))


def test_video_of_the_users_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="vjepa2 cannot read the dataset"):
        tiny("vjepa2", dataset="some/videos")
