"""Labeled texts and images of the classification pipelines, and the teacher's outputs on every training text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from joulelab.data import labeled_text, tokenized_text
from joulelab.data.batches import Batch, iterate_in_order
from joulelab.data.image_folders import count_duplicates, missing_splits
from joulelab.data.images import FolderImages
from joulelab.data.labeled_rows import WantedTokens
from joulelab.data.splits import SPLITS, SplitName
from joulelab.data.synthetic import SyntheticImages
from joulelab.data.tokenize import TruncatingEncoder
from joulelab.data.tokenized_text import TokenizedSet
from joulelab.distill.classify.config import ClassifySpec, FitnetsImagesSpec, ImageData
from joulelab.distill.classify.objective import ForwardAdapter, ForwardOutput
from joulelab.distill.runner import PREPROCESS, Runner
from joulelab.errors import JoulelabError
from joulelab.runs.artifacts import Artifact, Bill
from joulelab.runs.context import Stage
from joulelab.runs.paths import read_json, write_json
from joulelab.zoo.pretrained import load_tokenizer, weights_identity
from joulelab.zoo.tasks.image_classification import Images


@dataclass(frozen=True)
class Texts:
    """Tokenized texts in three splits."""

    artifact: Artifact

    @property
    def bills(self) -> Sequence[Bill]:
        return [self.artifact.bill]

    @cached_property
    def classes(self) -> int:
        return len(self.split("train").class_names)

    def split(self, name: str) -> TokenizedSet:
        return tokenized_text.open_set(self.artifact.folder / name)


_SPLITS = "splits.json"


def prepare_texts(runner: Runner[ClassifySpec]) -> Texts:
    """The stage `data.preprocess`: texts are split, and tokenized once for teacher and students."""
    data, tokenizer_name = runner.spec.data, runner.spec.tokenizer

    def write(folder: Path, stage: Stage) -> None:
        tokenizer = load_tokenizer(tokenizer_name)
        encode = TruncatingEncoder(tokenizer, data.max_tokens)
        wanted = WantedTokens(encode.sha256, data.max_tokens)
        splits = labeled_text.load_splits(data, runner.reading, wanted)
        for name in SPLITS:
            part, counter = getattr(splits, name), runner.counter(stage)
            tokenized_text.write(folder / name, part, encode, len(tokenizer), tokenizer.pad_token_id, counter)
        if data.is_own:
            write_json(folder / _SPLITS, {"notes": splits.notes, "duplicates": splits.duplicates})

    inputs = {**data.model_dump(), "tokenizer": weights_identity(tokenizer_name)}
    if data.is_own:
        inputs["splits"] = "own"  # artifacts of earlier releases merged the splits of a source
    raw = [runner.input_bill(name, file, "text", role="data") for name, file in data.inputs().items()]
    made = runner.make("data", PREPROCESS, write, kind="tokenized-text", inputs=inputs, parents=raw)
    texts = Texts(made)
    if data.is_own:  # also where another run prepared it: each run's record states what it was evaluated on
        report_splits(runner, texts)
    return texts


def report_splits(runner: Runner[Any], texts: Texts) -> None:
    """How the texts were split, their numbers, and test texts that were also trained on."""
    found = read_json(texts.artifact.folder / _SPLITS)
    sizes: dict[str, int] = {name: len(texts.split(name)) for name in SPLITS}
    runner.report_data(sizes, found["notes"], found["duplicates"])


@dataclass(frozen=True)
class ImageSplits:
    """Images are read, and augmented, in every epoch: there is no stage that prepares them."""

    config: ImageData
    bills: Sequence[Bill]

    @cached_property
    def train(self) -> Images:
        return self.split("train", augment=True)

    def split(self, name: str, augment: bool = False) -> Images:
        chosen = self.config.slice_of(name)
        if not self.config.is_own:
            return SyntheticImages(self.config.classes, self.config.side, chosen)
        return FolderImages(self.config.find(cast(SplitName, name)), self.config.side, chosen, augment)


def find_images(runner: Runner[FitnetsImagesSpec]) -> ImageSplits:
    data = runner.spec.data
    if not data.is_own:
        return ImageSplits(data, [])
    source = {} if "train" in data.folders else {"images": data.source}
    named = {**source, **{f"images for {split}": folder for split, folder in data.folders.items()}}
    bills = [runner.input_bill(name, folder, "images", role="data") for name, folder in named.items()]
    splits = ImageSplits(data, bills)
    missing = missing_splits(data.source, data.folders)
    where = named.get("images", data.train)
    notes = [f"{where}: no images for {' and '.join(missing)}; held out by the hash of the file name"]
    sizes: dict[str, int] = {name: len(splits.split(name).rows) for name in SPLITS}
    runner.report_data(sizes, notes if missing else [], count_duplicates(data.find("train"), data.find("test")))
    return splits


# The teacher's outputs on every training text, computed once for all epochs and students. They are found by the text's
# content id, never by position or iteration, so a shuffle cannot misalign them.
# Shapes: N texts, B batch, C classes, H width.

_LOGITS, _FEATURES, _IDS = "logits.npy", "features.npy", "ids.npy"
# A cache up to this size is kept on the device: copying a batch's rows from the host would delay every step.
_BYTES_ON_DEVICE = 8 * 2**30


@torch.inference_mode()
def write_cache(
    folder: Path,
    teacher: nn.Module,
    dataset: TokenizedSet,
    *,
    forward: ForwardAdapter,
    batch_size: int,
    device: torch.device,
    count: Callable[[int, int], None],
) -> None:
    """Logits and pooled hidden states of one layer, in float32, written to files batch by batch: millions of texts
    fit."""
    teacher.eval()
    files: dict[str, NDArray[np.float32]] = {}
    samples, tokens = 0, 0
    for batch in iterate_in_order(dataset, batch_size):
        output = forward(teacher, batch.to(device), True)
        assert output.features is not None
        for name, values in ((_LOGITS, output.logits_BC), (_FEATURES, output.features)):
            if name not in files:
                files[name] = np.lib.format.open_memmap(
                    folder / name, mode="w+", dtype=np.float32, shape=(len(dataset), values.shape[1])
                )
            files[name][batch.rows] = values.float().cpu().numpy()
        samples, tokens = samples + batch.samples, tokens + batch.tokens
        count(samples, tokens)
    np.save(folder / _IDS, np.array(dataset.ids))


class CachedTeacher:
    """The teacher's outputs in the order of a data set's rows."""

    def __init__(self, logits_NC: NDArray[np.float32], features_NH: NDArray[np.float32]) -> None:
        self.logits_NC = logits_NC
        self.features_NH = features_NH
        self._on_device: dict[str, Tensor] = {}

    def outputs(self, batch: Batch, features: bool) -> ForwardOutput:
        device = batch.input_ids.device
        return ForwardOutput(
            self._rows("logits", self.logits_NC, batch.rows, device),
            self._rows("features", self.features_NH, batch.rows, device) if features else None,
        )

    @property
    def width(self) -> int:
        return int(self.features_NH.shape[1])

    def _rows(self, name: str, values: NDArray[np.float32], rows: NDArray[np.int64], device: torch.device) -> Tensor:
        if device.type == "cpu" or values.nbytes > _BYTES_ON_DEVICE:
            return torch.from_numpy(values[rows]).to(device, non_blocking=True)
        if name not in self._on_device:
            self._on_device[name] = torch.from_numpy(np.asarray(values).copy()).to(device)
        return self._on_device[name][torch.from_numpy(rows).to(device, non_blocking=True)]


def open_cache(folder: Path, dataset: TokenizedSet) -> CachedTeacher:
    """The cache in the row order of this data set; a text without outputs is an error."""
    cached = np.load(folder / _IDS)
    logits_NC, features_NH = (np.load(folder / name, mmap_mode="r") for name in (_LOGITS, _FEATURES))
    if np.array_equal(cached, np.array(dataset.ids)):  # nothing to reorder: it is read from the disk when needed
        return CachedTeacher(logits_NC, features_NH)
    row_of = {str(identity): number for number, identity in enumerate(cached)}
    missing = [identity for identity in dataset.ids if identity not in row_of]
    if missing:
        raise JoulelabError(
            f"{len(missing)} of {len(dataset.ids)} training texts are not in the teacher's cache {folder}",
            "make the cache from the same data, or set reuse_artifacts=false",
        )
    rows = np.array([row_of[identity] for identity in dataset.ids], dtype=np.int64)
    return CachedTeacher(logits_NC[rows], features_NH[rows])
