"""Image files in folders with one subfolder per class: found, labeled and split, without reading them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from joulelab import lookup
from joulelab.data import sources
from joulelab.data.splits import SplitName, split_of, text_id
from joulelab.errors import ConfigError, NotFoundError
from joulelab.runs.spec import user_path

Rows = NDArray[np.int64]
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".gif", ".tif", ".tiff")
FOLDER_NAMES = {"train": ("train",), "validation": ("validation", "val"), "test": ("test",)}
HELD_OUT_EVERY = 10
_LAYOUT = "expected FOLDER/CLASS/IMAGE, or FOLDER/train/CLASS/IMAGE and FOLDER/validation/CLASS/IMAGE"


@dataclass(frozen=True, eq=False)
class LabeledFiles:
    classes: tuple[str, ...]
    files: tuple[Path, ...]
    labels: NDArray[np.int64]

    def at(self, rows: Rows) -> LabeledFiles:
        return LabeledFiles(self.classes, tuple(self.files[row] for row in rows), self.labels[rows])


def find_files(root: Path, split_name: str) -> LabeledFiles:
    """The images of a split, ordered by name. Without a folder `validation` or `val`, every tenth image is held out."""
    if split_name not in FOLDER_NAMES:
        raise lookup.unknown(f"split of {root}", split_name, FOLDER_NAMES)
    train, own = _split_folder(root, "train"), _split_folder(root, split_name)
    if _split_folder(root, "validation") is None and split_name != "test":
        return _hold_out(_scan(train or root), split_name)
    if own is None or train is None:
        raise NotFoundError(f"{root.absolute()} has no folder '{split_name if own is None else 'train'}'", _LAYOUT)
    return _relabeled(_scan(own), _class_names(train), own)


def _hold_out(everything: LabeledFiles, split_name: str) -> LabeledFiles:
    is_held_out = np.arange(len(everything.files)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    return everything.at(np.flatnonzero(is_held_out == (split_name == "validation")))


def _relabeled(found: LabeledFiles, classes: tuple[str, ...], folder: Path) -> LabeledFiles:
    """With the class numbers of the training images."""
    unknown = sorted(set(found.classes) - set(classes))
    if unknown:
        raise ConfigError(
            f"{folder.absolute()} has classes that the training images do not have: {', '.join(unknown[:5])}",
            "use the same class folder names in every split",
        )
    numbers = np.array([classes.index(name) for name in found.classes])
    return LabeledFiles(classes, found.files, numbers[found.labels])


def _scan(folder: Path) -> LabeledFiles:
    classes = _class_names(folder)
    found = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((folder / name).rglob("*"))
        if file.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise ConfigError(f"there are no images in class folders of {folder.absolute()}", _LAYOUT)
    return LabeledFiles(classes, tuple(file for file, _ in found), np.array([label for _, label in found]))


def _class_names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")))


def _split_folder(root: Path, split_name: str) -> Path | None:
    return next((root / name for name in FOLDER_NAMES[split_name] if (root / name).is_dir()), None)


# Splits for a comparison: folders that the user has are kept, missing ones are held out by the hash of a file's name.


def find_split(source: str, folders: Mapping[str, str], split: SplitName) -> LabeledFiles:
    """The images of a split. `folders`: those that the settings name for a split, in place of the source's."""
    root, train = user_path(source), _own_folder(source, folders, "train")
    own = _own_folder(source, folders, split)
    trained = _scan(train or root)
    if split != "train" and own is not None:
        return _relabeled(_scan(own), trained.classes, own)
    missing = {name for name in ("validation", "test") if _own_folder(source, folders, name) is None}
    splits = [split_of(text_id(str(file.relative_to(train or root)))) for file in trained.files]
    kept = [row for row, name in enumerate(splits) if name == split or (split == "train" and name not in missing)]
    if not kept:
        raise ConfigError(
            f"{(train or root).absolute()} has {len(trained.files)} images, too few to hold some out for {split}",
            f"provide them: data.{split}=FOLDER",
        )
    return trained.at(np.array(kept, dtype=np.int64))


def missing_splits(source: str, folders: Mapping[str, str]) -> list[str]:
    return [name for name in ("validation", "test") if _own_folder(source, folders, name) is None]


def count_duplicates(train: LabeledFiles, test: LabeledFiles) -> int:
    """Test files with the same bytes as a training file; only files of the same size are read."""
    sizes = {file.stat().st_size for file in train.files} & {file.stat().st_size for file in test.files}
    hashes = {sources.content_hash(file) for file in train.files if file.stat().st_size in sizes}
    return sum(sources.content_hash(file) in hashes for file in test.files if file.stat().st_size in sizes)


def _own_folder(source: str, folders: Mapping[str, str], split: str) -> Path | None:
    if split in folders:
        return user_path(folders[split])
    return None if "train" in folders else _split_folder(user_path(source), split)
