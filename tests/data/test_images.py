"""Images from a folder: found, split, cropped and read; what is wrong with a folder is told in words."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from joulelab import lookup
from joulelab.data.image_folders import find_files
from joulelab.data.images import DEVIATION, MEAN, FolderImages, center_box, random_box
from joulelab.data.splits import parse_split
from joulelab.errors import ConfigError, DependencyMissing, NotFoundError
from joulelab.zoo.objective import prepare
from joulelab.zoo.registry import WorkloadRequest

CPU = torch.device("cpu")


def write_images(folder: Path, classes: dict[str, tuple[int, int, int]], count: int = 10, mode: str = "RGB") -> Path:
    image = pytest.importorskip("PIL.Image")
    for name, color in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            picture = image.new("RGB", (40 + number, 30), color)
            picture.putpixel((0, 0), (255, 255, 255))
            suffix = "png" if number % 2 else "jpg"
            picture.convert(mode).save(folder / name / f"{number:02}.{suffix}")
    return folder


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    return write_images(tmp_path / "pets", {"cat": (200, 10, 10), "dog": (10, 10, 200)})


def read(root: Path, split: str = "train", augment: bool = False, side: int = 16) -> FolderImages:
    return FolderImages(root, side, parse_split(split), augment)


def test_every_tenth_image_is_held_out_where_no_folder_states_otherwise(pets: Path) -> None:
    train, held_out = find_files(pets, "train"), find_files(pets, "validation")
    assert train.classes == held_out.classes == ("cat", "dog")
    assert (len(train.files), len(held_out.files)) == (18, 2)
    assert held_out.labels.tolist() == [0, 1]
    assert set(train.files).isdisjoint(held_out.files)


def test_folders_of_the_splits_own_are_used_and_labeled_alike(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"ant": (0, 0, 0), "cat": (0, 0, 0), "dog": (0, 0, 0)}, count=2)
    write_images(tmp_path / "val", {"dog": (0, 0, 0)}, count=1)
    assert len(find_files(tmp_path, "train").files) == 6
    held_out = find_files(tmp_path, "validation")
    assert held_out.labels.tolist() == [2]
    with pytest.raises(NotFoundError, match="has no folder 'test'"):
        find_files(tmp_path, "test")


def test_a_held_out_class_that_was_never_trained_on_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cat": (0, 0, 0), "dog": (0, 0, 0)}, count=1)
    write_images(tmp_path / "validation", {"fox": (0, 0, 0)}, count=1)
    with pytest.raises(ConfigError, match="classes that the training images do not have: fox"):
        find_files(tmp_path, "validation")


def test_a_folder_without_images_is_refused_with_the_layout(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="there are no images in class folders of") as caught:
        find_files(tmp_path, "train")
    assert "FOLDER/CLASS/IMAGE" in caught.value.hint


def test_an_unknown_split_is_answered_with_the_known_ones(pets: Path) -> None:
    with pytest.raises(NotFoundError, match="did you mean 'train'"):
        find_files(pets, "trian")


def test_pixels_are_those_of_the_images_around_zero(pets: Path) -> None:
    images = read(pets)
    batch = images.batch(np.array([0, 17]), draw=0).to(CPU)
    assert batch["labels"].tolist() == [0, 1]
    assert batch["pixels"].shape == (2, 3, 16, 16)
    assert batch["pixels"].is_contiguous(memory_format=torch.channels_last)
    colors = batch["pixels"].mean(dim=(2, 3)) * torch.tensor(DEVIATION) + torch.tensor(MEAN)
    expected = torch.tensor([[200.0, 10, 10], [10, 10, 200]]) / 255
    assert torch.allclose(colors, expected, atol=0.02)


def test_what_is_shown_follows_from_the_draw(pets: Path) -> None:
    images, rows = read(pets, augment=True), np.arange(4)
    first, again, other = (images.batch(rows, draw)["bytes"] for draw in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_gray_images_and_slices_of_a_split_are_read(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": (90, 90, 90), "dog": (30, 30, 30)}, mode="L")
    images = read(tmp_path, "train[:4]")
    assert len(images.rows) == 4
    assert images.batch(images.rows, 0)["bytes"].shape == (4, 16, 16, 3)


@pytest.mark.parametrize("content", [b"no image at all", b""])
def test_a_broken_image_is_named(pets: Path, content: bytes) -> None:
    broken = pets / "cat" / "00.jpg"
    broken.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cat/00\.jpg cannot be read as an image") as caught:
        read(pets).batch(np.arange(3), draw=0)
    assert caught.value.hint == "repair or remove the file"


def test_an_image_that_ends_early_is_named(pets: Path) -> None:
    broken = pets / "dog" / "03.png"
    broken.write_bytes(broken.read_bytes()[:60])
    files = find_files(pets, "train").files
    with pytest.raises(ConfigError, match=r"dog/03\.png cannot be read"):
        read(pets).batch(np.array([files.index(broken)]), draw=0)


def test_without_pillow_the_answer_is_what_to_install(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DependencyMissing, match="need Pillow"):
        read(pets)


def test_random_boxes_stay_inside_and_vary() -> None:
    random = np.random.default_rng(0)
    boxes = [random_box(400, 300, random) for _ in range(300)]
    areas = [(box.right - box.left) * (box.bottom - box.top) for box in boxes]
    assert all(0 <= box.left < box.right <= 1 + 1e-9 and 0 <= box.top < box.bottom <= 1 + 1e-9 for box in boxes)
    assert 0.08 <= min(areas) < 0.15 and 0.8 < max(areas) <= 1
    left, top, right, bottom = random_box(1000, 2, random).pixels(1000, 2)  # no wanted shape fits: the middle
    assert (right - left, bottom - top) == pytest.approx((2, 2))


def test_the_center_box_is_a_square_of_pixels() -> None:
    left, top, right, bottom = center_box(640, 320).pixels(640, 320)
    assert (right - left, bottom - top) == pytest.approx((280, 280))
    assert (left + right, top + bottom) == pytest.approx((640, 320))


def test_a_classifier_trains_on_a_folder_with_as_many_outputs_as_it_has_classes(pets: Path) -> None:
    entry = lookup.ZOO.resolve("resnet50")
    workload = prepare(WorkloadRequest(entry, "tiny", batch_size=6, dataset=str(pets)))
    batch = workload.batches.at(0, 0).to(CPU)
    assert workload.model(pixel_values=batch["pixels"]).logits.shape == (6, 2)
    assert workload.batches.batches_per_epoch == 3
    assert workload.validation is not None and workload.validation.at(0, 0).samples == 2


def test_a_classifier_of_one_class_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": (0, 0, 0)})
    with pytest.raises(ConfigError, match="all of one class"):
        prepare(WorkloadRequest(lookup.ZOO.resolve("resnet50"), "tiny", dataset=str(tmp_path)))


def test_self_distillation_cuts_its_crops_from_a_folder(pets: Path) -> None:
    workload = prepare(WorkloadRequest(lookup.ZOO.resolve("dinov2"), "tiny", batch_size=4, dataset=str(pets)))
    batch = workload.batches.at(0, 0).to(CPU)
    assert batch["global_crops"].shape == (8, 3, 32, 32)
    assert batch["local_crops"].shape == (8, 3, 16, 16)
    assert batch["hidden"].shape == (4, 5)
