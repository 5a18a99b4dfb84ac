"""Image classification: which of the classes an image shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from joulelab.data.batches import TensorBatch
from joulelab.errors import ConfigError
from joulelab.zoo import architectures
from joulelab.zoo.objective import ObjectiveOutput, PlainObjective
from joulelab.zoo.request import WorkloadRequest
from joulelab.zoo.tasks.image_rows import open_images, shuffled
from joulelab.zoo.workload import Workload

# shapes: B images, V classes


def prepare(request: WorkloadRequest) -> Workload:
    classes = int(request.size.settings["num_labels"])
    train, held_out = open_images(request, request.shape["side"], classes, augment=True)
    if train.classes < 2:
        raise ConfigError(
            f"the images of {request.dataset} are all of one class; a classifier needs two or more",
            "put the images of each class into a folder of its own",
        )
    model: Any = architectures.build(request, num_labels=train.classes)
    _require_enough_outputs(request, int(model.config.num_labels), train.classes)
    if request.entry.options.get("channels_last"):
        # the layout in which tensor cores convolve; moving the model to a device keeps it
        model = model.to(memory_format=torch.channels_last)
    return Workload(model, PlainObjective(class_loss), shuffled(request, train), shuffled(request, held_out))


def class_loss(model: nn.Module, batch: TensorBatch) -> ObjectiveOutput:
    logits_BV = model(pixel_values=batch["pixels"]).logits
    return ObjectiveOutput(functional.cross_entropy(logits_BV, batch["labels"], reduction="sum"), batch.count)


def _require_enough_outputs(request: WorkloadRequest, outputs: int, classes: int) -> None:
    """Loaded weights bring a head of their own."""
    if outputs < classes:
        raise ConfigError(
            f"the weights '{request.weights}' tell {outputs} classes apart; {request.dataset} has {classes}",
            "use weights with as many classes or more, or none",
        )
