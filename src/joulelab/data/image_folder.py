"""Images of the user's, read: decoded and cropped by a pool of threads, carried as bytes, numbers on the device."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joulelab.data.batch_source import Rows, TensorBatch
from joulelab.data.cores import usable_cores
from joulelab.data.image_boxes import CENTRE_SHARE, Box, centre_box, random_box
from joulelab.data.image_files import find_files
from joulelab.data.splits import Split
from joulelab.errors import ConfigError, DependencyMissing

# shapes: B images, C colours, H x W pixels
Bytes = NDArray[np.uint8]
# Mean and deviation of ImageNet's pixels, which published weights were trained with.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MAX_THREADS = 16


class FolderImages:
    """`augment` shows a random part of each image, flipped or not, as the batch's draw decides; else the middle."""

    def __init__(self, root: Path, side: int, split: Split, augment: bool, centre_share: float = CENTRE_SHARE) -> None:
        self._found = find_files(root, split.name)
        self._side, self._augment, self._centre_share = side, augment, centre_share
        self.rows = split.rows(len(self._found.files))
        self.classes = len(self._found.classes)
        _pillow()  # that the package is missing is told now, not at the first step

    def batch(self, rows: Rows, draw: int) -> TensorBatch:
        chosen = self._found.at(rows)
        randoms = [np.random.default_rng([draw, place]) for place in range(len(rows))]
        images = list(self._pool.map(self._read, chosen.files, randoms))
        tensors = {"labels": torch.from_numpy(chosen.labels), "bytes": torch.from_numpy(np.stack(images))}
        return TensorBatch(tensors, samples=len(rows), count=len(rows), expand=_to_numbers)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(min(_MAX_THREADS, usable_cores()), thread_name_prefix="joulelab-images")

    def _read(self, file: Path, random: np.random.Generator) -> Bytes:
        if not self._augment:
            return read_middle(file, self._side, self._centre_share)
        with _opened(file) as image:
            width, height = image.size
            seen = _shown(image, random_box(width, height, random), self._side)
        return seen[:, ::-1] if random.random() < 0.5 else seen


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """An image; what is wrong with a broken one is told with the file's name."""
    pillow = _pillow()
    try:
        with pillow.open(file) as image:
            yield image
    except (OSError, EOFError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise ConfigError(
            f"{file.absolute()} cannot be read as an image: {error}", "repair or remove the file"
        ) from error


def _shown(image: Any, box: Box, side: int) -> Bytes:
    """[H, W, C]: the box, scaled to `side`."""
    enough = round(side / (box.right - box.left)), round(side / (box.bottom - box.top))
    image.draft("RGB", enough)  # a JPEG is decoded at half, a quarter or an eighth where that is enough
    scaled = image.convert("RGB").resize(
        (side, side), _pillow().Resampling.BILINEAR, box=box.pixels(*image.size), reducing_gap=2.0
    )
    return np.asarray(scaled)


def read_middle(file: Path, side: int, centre_share: float = CENTRE_SHARE) -> Bytes:
    """[H, W, C]: the middle of an image, scaled to `side`."""
    with _opened(file) as image:
        width, height = image.size
        return _shown(image, centre_box(width, height, centre_share), side)


def normalised(bytes_BHWC: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """Numbers around 0, seen as [B, C, H, W] and laid out with the channels last, as tensor cores read them."""
    mean_C, deviation_C = (torch.tensor(values, device=bytes_BHWC.device) for values in (mean, deviation))
    return ((bytes_BHWC / 255.0 - mean_C) / deviation_C).permute(0, 3, 1, 2)


def _to_numbers(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"labels": tensors["labels"], "pixels": normalised(tensors["bytes"], MEAN, DEVIATION)}


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise DependencyMissing("reading images needs Pillow, not installed here", "pip install pillow") from error
