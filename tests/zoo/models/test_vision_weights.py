"""Vision models that start from weights of a folder, made for other inputs than those they are now trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from joulelab import lookup
from joulelab.errors import ConfigError
from joulelab.zoo.objective import Workload, make_config, prepare
from joulelab.zoo.registry import WorkloadRequest

CPU = torch.device("cpu")


def saved(name: str, folder: Path, **settings: Any) -> Any:
    request = WorkloadRequest(lookup.ZOO.resolve(name), "tiny")
    model = getattr(transformers, request.entry.architecture)(make_config(request, **settings))
    model.save_pretrained(folder)
    return model


def started_from(folder: Path, name: str, **requested: Any) -> Workload:
    return prepare(WorkloadRequest(lookup.ZOO.resolve(name), "tiny", weights=str(folder), **requested))


def loss_of(workload: Workload) -> torch.Tensor:
    batch = workload.batches.at(0, 0).to(CPU)
    return workload.objective(workload.model, batch, torch.autograd.profiler.record_function).loss_sum.detach()


def test_a_classifier_keeps_the_head_it_was_saved_with(tmp_path: Path) -> None:
    original = saved("convnext-large", tmp_path, num_labels=12)
    workload: Any = started_from(tmp_path, "convnext-large")
    assert torch.equal(workload.model.classifier.weight, original.classifier.weight)
    assert loss_of(workload).isfinite()


def test_weights_with_too_few_classes_are_refused(tmp_path: Path) -> None:
    saved("convnext-large", tmp_path, num_labels=4)
    with pytest.raises(ConfigError, match="have 4 classes; synthetic has 10"):
        started_from(tmp_path, "convnext-large")


def test_a_backbone_trained_on_larger_images_serves_smaller_ones(tmp_path: Path) -> None:
    original = saved("dinov2", tmp_path, image_size=64)
    workload: Any = started_from(tmp_path, "dinov2")
    mine, theirs = (net.embeddings.position_embeddings for net in (workload.model.backbone, original))
    assert torch.equal(mine, theirs)
    assert loss_of(workload).isfinite()


def test_positions_follow_the_clips_and_not_those_of_the_weights(tmp_path: Path) -> None:
    original = saved("vjepa2", tmp_path, crop_size=64)
    for attention in (layer.attention for layer in original.encoder.layer):
        attention.query.weight.data *= 50  # fresh weights attend everywhere alike, whatever the positions
    original.save_pretrained(tmp_path)
    workload: Any = started_from(tmp_path, "vjepa2")
    clips = workload.batches.at(0, 0).to(CPU)["clips"]
    as_if_trained_here: Any = transformers.VJEPA2Model(
        make_config(WorkloadRequest(lookup.ZOO.resolve("vjepa2"), "tiny"), crop_size=32)
    )
    as_if_trained_here.load_state_dict(original.state_dict())
    with torch.no_grad():
        expected = as_if_trained_here.encoder(clips).last_hidden_state
        assert torch.allclose(workload.model.encoder(clips), expected, atol=1e-5)
        assert not torch.allclose(original.encoder(clips).last_hidden_state, expected, atol=1e-3)
