"""Images in folders with one subfolder per class, and image-question tables: decoded, cropped and normalized.

Threads decode and crop; batches carry bytes, which become floating-point numbers on the device.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from joulelab.data.batches import Rows, TensorBatch
from joulelab.data.image_folders import LabeledFiles, find_files
from joulelab.data.splits import Split
from joulelab.data.text import pick, read_table
from joulelab.errors import ConfigError, DependencyMissing, NotFoundError
from joulelab.lookup import install_hint
from joulelab.meter.sensors.cpu import usable_cores

# Crops of ImageNet training: https://arxiv.org/abs/1409.4842 and torchvision's reference scripts.
AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
CENTER_SHARE = 7 / 8  # 224 out of 256
_TRIES = 10


class Box(NamedTuple):
    """Edges as fractions of the image's width and height, so that they also apply to a smaller decode of it."""

    left: float
    top: float
    right: float
    bottom: float

    def pixels(self, width: int, height: int) -> tuple[float, float, float, float]:
        # rounding must not push an edge outside the image
        return self.left * width, self.top * height, min(1.0, self.right) * width, min(1.0, self.bottom) * height


def random_box(width: int, height: int, random: np.random.Generator) -> Box:
    """A random crop with an area in `AREA` and an aspect ratio in `RATIO`; the center crop if none fits."""
    areas = random.uniform(*AREA, size=_TRIES) * width * height
    # Uniform in the logarithm, so that 3:4 and 4:3 are equally likely.
    ratios = np.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1]), size=_TRIES))
    widths, heights = np.sqrt(areas * ratios) / width, np.sqrt(areas / ratios) / height
    left_share, top_share = random.random(2)
    # Rejection sampling with a bounded number of tries, all sampled at once; the first one that
    # fits is used, as in torchvision.
    fitting = np.flatnonzero((widths <= 1) & (heights <= 1))
    if not len(fitting):
        return center_box(width, height, share=1.0)
    wide, high = float(widths[fitting[0]]), float(heights[fitting[0]])
    left, top = left_share * (1 - wide), top_share * (1 - high)
    return Box(left, top, left + wide, top + high)


def center_box(width: int, height: int, share: float = CENTER_SHARE) -> Box:
    """The centered square whose side is this fraction of the shorter side."""
    edge = share * min(width, height)
    wide, high = edge / width, edge / height
    return Box((1 - wide) / 2, (1 - high) / 2, (1 + wide) / 2, (1 + high) / 2)


# Shapes: B images, C colors, H x W pixels.
Bytes = NDArray[np.uint8]
# Mean and standard deviation of ImageNet's pixels, with which published weights were trained.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MAX_THREADS = 16


class FolderImages:
    """`augment` takes a random crop of each image, flipped at random, from the batch's seed; otherwise the center."""

    def __init__(
        self,
        root: Path | LabeledFiles,
        side: int,
        split: Split,
        augment: bool,
        center_share: float = CENTER_SHARE,
    ) -> None:
        """`root`: a folder with the split, or its images."""
        self._found = find_files(root, split.name) if isinstance(root, Path) else root
        self._side, self._augment, self._center_share = side, augment, center_share
        self.rows = split.rows(len(self._found.files))
        self.classes = len(self._found.classes)
        _pillow()  # a missing package is reported here, not at the first step

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
            return read_center(file, self._side, self._center_share)
        with _opened(file) as image:
            width, height = image.size
            seen = _shown(image, random_box(width, height, random), self._side)
        return seen[:, ::-1] if random.random() < 0.5 else seen


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """An open image; errors name the file."""
    pillow = _pillow()
    try:
        with pillow.open(file) as image:
            yield image
    except (OSError, EOFError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise ConfigError(
            f"{file.absolute()} cannot be read as an image: {error}", "repair or remove the file"
        ) from error


def _shown(image: Any, box: Box, side: int) -> Bytes:
    """[H, W, C]: the crop, scaled to `side`."""
    enough = round(side / (box.right - box.left)), round(side / (box.bottom - box.top))
    image.draft("RGB", enough)  # a JPEG can be decoded at a half, a quarter or an eighth of its size
    scaled = image.convert("RGB").resize(
        (side, side), _pillow().Resampling.BILINEAR, box=box.pixels(*image.size), reducing_gap=2.0
    )
    return np.asarray(scaled)


def read_center(file: Path, side: int, center_share: float = CENTER_SHARE) -> Bytes:
    """[H, W, C]: the center of an image, scaled to `side`."""
    with _opened(file) as image:
        width, height = image.size
        return _shown(image, center_box(width, height, center_share), side)


def normalized(bytes_BHWC: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """[B, C, H, W] around 0, in channels-last memory format, which tensor cores read fastest."""
    mean_C, deviation_C = (torch.tensor(values, device=bytes_BHWC.device) for values in (mean, deviation))
    return ((bytes_BHWC / 255.0 - mean_C) / deviation_C).permute(0, 3, 1, 2)


def _to_numbers(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {"labels": tensors["labels"], "pixels": normalized(tensors["bytes"], MEAN, DEVIATION)}


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise DependencyMissing("images need Pillow, which is not installed", install_hint("vision")) from error


@dataclass(frozen=True)
class Questions:
    """Questions about images."""

    files: tuple[Path, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]


def read_questions(path: Path) -> Questions:
    """A table (CSV, JSON lines, Parquet) with columns `image`, `question` and `answer`; file names are relative to it.

    All files are checked here, before a training run starts.
    """
    columns = read_table(str(path), subset="all")

    def texts(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(value) for value in columns.values[pick(columns, names, names[0], str(path))])

    files = tuple(path.parent / name for name in texts(("image", "image_path", "file")))
    absent = next((file for file in files if not file.is_file()), None)
    if absent is not None:
        raise NotFoundError(f"there is no file {absent.absolute()}", f"names in {path.name} are relative to it")
    return Questions(files, texts(("question", "prompt")), texts(("answer", "response", "text")))
