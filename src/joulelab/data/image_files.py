"""Images of the user's, found: a folder with one sub-folder a class.

`train` and `validation` (or `val`) may be folders of their own; without the latter every tenth image is held out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from joulelab import lookup
from joulelab.data.batch_source import Rows
from joulelab.errors import ConfigError, NotFoundError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".gif", ".tif", ".tiff")
FOLDER_NAMES = {"train": ("train",), "validation": ("validation", "val"), "test": ("test",)}
HELD_OUT_EVERY = 10
_LAYOUT = "expected FOLDER/CLASS/IMAGE, or FOLDER/train/CLASS/IMAGE beside FOLDER/validation/CLASS/IMAGE"


@dataclass(frozen=True, eq=False)
class LabelledFiles:
    classes: tuple[str, ...]
    files: tuple[Path, ...]
    labels: NDArray[np.int64]

    def at(self, rows: Rows) -> LabelledFiles:
        return LabelledFiles(self.classes, tuple(self.files[row] for row in rows), self.labels[rows])


def find_files(root: Path, split_name: str) -> LabelledFiles:
    """The images of a split; their order, and so their rows, follows from their names."""
    if split_name not in FOLDER_NAMES:
        raise lookup.unknown(f"split of {root}", split_name, FOLDER_NAMES)
    train, own = _split_folder(root, "train"), _split_folder(root, split_name)
    if _split_folder(root, "validation") is None and split_name != "test":
        return _without_a_folder(_scan(train or root), split_name)
    if own is None or train is None:
        raise NotFoundError(f"{root.absolute()} has no folder '{split_name if own is None else 'train'}'", _LAYOUT)
    return _labelled_alike(_scan(own), _class_names(train), own)


def _without_a_folder(everything: LabelledFiles, split_name: str) -> LabelledFiles:
    is_held_out = np.arange(len(everything.files)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return everything.at(np.flatnonzero(is_held_out == (split_name == "validation")))


def _labelled_alike(found: LabelledFiles, classes: tuple[str, ...], folder: Path) -> LabelledFiles:
    """With the numbers that the training images' classes have."""
    unknown = sorted(set(found.classes) - set(classes))
    if unknown:
        raise ConfigError(
            f"{folder.absolute()} has classes that the training images lack: {', '.join(unknown[:5])}",
            "name the class folders alike",
        )
    numbers = np.array([classes.index(name) for name in found.classes])
    return LabelledFiles(classes, found.files, numbers[found.labels])


def _scan(folder: Path) -> LabelledFiles:
    classes = _class_names(folder)
    found = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((folder / name).rglob("*"))
        if file.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise ConfigError(f"there are no images in class folders of {folder.absolute()}", _LAYOUT)
    return LabelledFiles(classes, tuple(file for file, _ in found), np.array([label for _, label in found]))


def _class_names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")))


def _split_folder(root: Path, split_name: str) -> Path | None:
    return next((root / name for name in FOLDER_NAMES[split_name] if (root / name).is_dir()), None)
