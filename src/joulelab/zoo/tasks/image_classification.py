"""Image classification, and the images of the vision tasks: synthetic, or a folder."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from joulelab.data import sources
from joulelab.data.batches import Rows, ShuffledRows, TensorBatch
from joulelab.data.images import CENTER_SHARE, FolderImages
from joulelab.data.splits import parse_split
from joulelab.data.synthetic import SyntheticImages
from joulelab.errors import ConfigError
from joulelab.zoo import objective
from joulelab.zoo.objective import ObjectiveOutput, PlainObjective, Workload
from joulelab.zoo.registry import SYNTHETIC, WorkloadRequest, refuse_dataset

# Images for the vision tasks: synthetic, or from a folder.


class Images(Protocol):
    """Batches with `pixels` [B, 3, side, side] around 0, channels last in memory, and `labels` [B]."""

    @property
    def rows(self) -> Rows: ...

    @property
    def classes(self) -> int: ...

    def batch(self, rows: Rows, draw: int) -> TensorBatch: ...


def open_images(
    request: WorkloadRequest, side: int, classes: int, augment: bool, center_share: float = CENTER_SHARE
) -> tuple[Images, Images]:
    """Training and held-out images; `classes` is the number of classes of synthetic images."""
    train, held_out = request.wanted_split, parse_split("validation")
    if request.dataset == SYNTHETIC:
        return SyntheticImages(classes, side, train), SyntheticImages(classes, side, held_out)
    source = sources.parse(request.dataset)
    if source.kind != "folder" or source.path is None:
        raise refuse_dataset(request)
    return (
        FolderImages(source.path, side, train, augment, center_share),
        FolderImages(source.path, side, held_out, augment=False, center_share=center_share),
    )


def shuffled(request: WorkloadRequest, images: Images) -> ShuffledRows:
    return ShuffledRows(images.rows, request.rows_per_batch, request.seed, images.batch)


# shapes: B images, V classes


def prepare(request: WorkloadRequest) -> Workload:
    classes = int(request.size.settings["num_labels"])
    train, held_out = open_images(request, request.shape["side"], classes, augment=True)
    if train.classes < 2:
        raise ConfigError(
            f"the images of {request.dataset} are all of one class; a classifier needs two or more",
            "put the images of each class into a separate folder",
        )
    model: Any = objective.build(request, num_labels=train.classes)
    _require_enough_outputs(request, int(model.config.num_labels), train.classes)
    if request.entry.options.get("channels_last"):
        # channels last, the layout of the fast tensor-core convolutions; moving the model to a device keeps it
        model = model.to(memory_format=torch.channels_last)
    return Workload(model, PlainObjective(class_loss), shuffled(request, train), shuffled(request, held_out))


def class_loss(model: nn.Module, batch: TensorBatch) -> ObjectiveOutput:
    logits_BV = model(pixel_values=batch["pixels"]).logits
    return ObjectiveOutput(functional.cross_entropy(logits_BV, batch["labels"], reduction="sum"), batch.count)


def _require_enough_outputs(request: WorkloadRequest, outputs: int, classes: int) -> None:
    """Loaded weights have their own head."""
    if outputs < classes:
        raise ConfigError(
            f"the weights '{request.weights}' have {outputs} classes; {request.dataset} has {classes}",
            "use weights with as many classes or more, or none",
        )
