"""What the teacher says about every training text, computed once for all epochs and students.

Answers are found by the text's content id, never by position or iteration: a shuffle cannot misalign them.

Shapes: N texts, B batch, C classes, H width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from joulelab.data.batches import Batch, iterate_in_order
from joulelab.data.labeled_text import TokenizedSet
from joulelab.distill.classify_view import Look, View
from joulelab.errors import JoulelabError

LOGITS, FEATURES, IDS = "logits.npy", "features.npy", "ids.npy"
# A cache up to this size lies on the device: fetching a batch's rows from the host would make every step wait.
_BYTES_ON_DEVICE = 8 * 2**30


@torch.inference_mode()
def write_cache(
    folder: Path,
    teacher: nn.Module,
    dataset: TokenizedSet,
    *,
    look: Look,
    batch_size: int,
    device: torch.device,
    tick: Callable[[int, int], None],
) -> None:
    """Logits and pooled hidden states of one layer, in float32, straight into files: millions of texts fit."""
    teacher.eval()
    files: dict[str, NDArray[np.float32]] = {}
    samples, tokens = 0, 0
    for batch in iterate_in_order(dataset, batch_size):
        view = look(teacher, batch.to(device), True)
        assert view.features is not None
        for name, values in ((LOGITS, view.logits_BC), (FEATURES, view.features)):
            if name not in files:
                files[name] = _new_file(folder / name, (len(dataset), values.shape[1]))
            files[name][batch.rows] = values.float().cpu().numpy()
        samples, tokens = samples + batch.samples, tokens + batch.tokens
        tick(samples, tokens)
    np.save(folder / IDS, np.array(dataset.ids))


def _new_file(path: Path, shape: tuple[int, int]) -> NDArray[np.float32]:
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)


class TeacherCache:
    """The teacher's answers in the order of a data set's rows."""

    def __init__(self, logits_NC: NDArray[np.float32], features_NH: NDArray[np.float32]) -> None:
        self.logits_NC = logits_NC
        self.features_NH = features_NH
        self._there: dict[str, Tensor] = {}

    def answer(self, batch: Batch, features: bool) -> View:
        device = batch.input_ids.device
        return View(
            self._rows("logits", self.logits_NC, batch.rows, device),
            self._rows("features", self.features_NH, batch.rows, device) if features else None,
        )

    @property
    def width(self) -> int:
        return int(self.features_NH.shape[1])

    def _rows(self, name: str, values: NDArray[np.float32], rows: NDArray[np.int64], device: torch.device) -> Tensor:
        if device.type == "cpu" or values.nbytes > _BYTES_ON_DEVICE:
            return torch.from_numpy(values[rows]).to(device, non_blocking=True)
        if name not in self._there:
            self._there[name] = torch.from_numpy(np.asarray(values).copy()).to(device)
        return self._there[name][torch.from_numpy(rows).to(device, non_blocking=True)]


def open_cache(folder: Path, dataset: TokenizedSet) -> TeacherCache:
    """The cache laid out for this data set; a text the teacher has not seen is an error, not a guess."""
    cached = np.load(folder / IDS)
    logits_NC, features_NH = (np.load(folder / name, mmap_mode="r") for name in (LOGITS, FEATURES))
    if np.array_equal(cached, np.array(dataset.ids)):  # nothing to lay out: it stays on the disk until it is read
        return TeacherCache(logits_NC, features_NH)
    place = {str(identity): number for number, identity in enumerate(cached)}
    unseen = [identity for identity in dataset.ids if identity not in place]
    if unseen:
        raise JoulelabError(
            f"{len(unseen)} of {len(dataset.ids)} training texts are not in the teacher's cache {folder}",
            "make the cache from the same data, or set reuse_artifacts=false",
        )
    rows = np.array([place[identity] for identity in dataset.ids], dtype=np.int64)
    return TeacherCache(logits_NC[rows], features_NH[rows])
