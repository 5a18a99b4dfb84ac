"""Images for the vision tasks: synthetic, or a folder of the user's."""

from __future__ import annotations

from typing import Protocol

from joulelab.data import sources
from joulelab.data.batches import Rows, ShuffledRows, TensorBatch
from joulelab.data.images import CENTER_SHARE, FolderImages
from joulelab.data.splits import parse_split
from joulelab.data.synthetic import SyntheticImages
from joulelab.zoo.request import SYNTHETIC, WorkloadRequest, refuse_dataset


class Images(Protocol):
    """Batches with `pixels` [B, 3, side, side] around 0, channels last in memory, and `labels` [B]."""

    @property
    def rows(self) -> Rows: ...

    @property
    def classes(self) -> int: ...

    def batch(self, rows: Rows, draw: int) -> TensorBatch: ...


def open_images(
    request: WorkloadRequest, side: int, classes: int, augment: bool, centre_share: float = CENTER_SHARE
) -> tuple[Images, Images]:
    """To train on, and held out; `classes` is how many the synthetic ones have."""
    train, held_out = request.wanted_split, parse_split("validation")
    if request.dataset == SYNTHETIC:
        return SyntheticImages(classes, side, train), SyntheticImages(classes, side, held_out)
    source = sources.parse(request.dataset)
    if source.kind != "folder" or source.path is None:
        raise refuse_dataset(request)
    return (
        FolderImages(source.path, side, train, augment, centre_share),
        FolderImages(source.path, side, held_out, augment=False, centre_share=centre_share),
    )


def shuffled(request: WorkloadRequest, images: Images) -> ShuffledRows:
    return ShuffledRows(images.rows, request.rows_per_batch, request.seed, images.batch)
